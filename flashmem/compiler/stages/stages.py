"""All stages of the compiler, in order: what each makes of the results before it, how that reads, and which rules hold for it.

Searches (`compiler.adaptive`) call stages with other parameters until a plan suffices: FUSE with other cuts, LOWER with other
slices, PATCH with other chains. `flashmem compile --dump-stages DIR` writes the results of the program that was chosen.

A session adds chains of small launches to a program, which is no stage: they depend on the cores of the device at hand, which
no descriptor states (`runtime.kernels.chains`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashmem.compiler.ir.graph import Graph
from flashmem.compiler.ir.text import graph_text
from flashmem.compiler.lowering.generated import sharing_weights
from flashmem.compiler.lowering.instruction_sets import for_other_instruction_sets
from flashmem.compiler.lowering.program import lower
from flashmem.compiler.lowering.steady import with_steady
from flashmem.compiler.memory.joined_updates import join_updates
from flashmem.compiler.memory.launch_order import in_lowest_order
from flashmem.compiler.memory.placement import place
from flashmem.compiler.passes.fusion import fuse
from flashmem.compiler.passes.pipeline import prepare
from flashmem.compiler.passes.verifier import verify
from flashmem.compiler.stages import texts, verifiers
from flashmem.compiler.stages.planned import lay_out, plan
from flashmem.compiler.stages.stage import Stage
from flashmem.compiler.tiling.patches import in_patches

if TYPE_CHECKING:
    from pathlib import Path

    from flashmem.compiler.options import Options


def _import(model: Path, options: Options, *changes: Any) -> Graph:
    from flashmem.compiler.frontend.import_graph import import_graph  # takes half a second, which a graph of the zoo needs not

    return import_graph(model, options, *changes)


IMPORT = Stage("import", "the graph of an ONNX file: constants folded, no weight read", _import, graph_text, verify)

REWRITE = Stage(
    "rewrite",
    "the graph in few operators, with layouts and attention: the passes of `compiler.passes.pipeline`, a verifier after each",
    prepare,
    graph_text,
    verifiers.verify_rewritten,
)

PATCH = Stage(
    "patch",
    "the graph with chains of operators in patches, if a budget needs that",
    in_patches,
    graph_text,
    verifiers.verify_rewritten,
)

FUSE = Stage("fuse", "fusion groups: operators that share a launch", fuse, texts.groups_text, verifiers.verify_groups)

ORDER = Stage(
    "order",
    "the groups in the order with the lowest peak of activations",
    in_lowest_order,
    texts.order_text,
    verifiers.verify_order,
)

PLACE = Stage(
    "place", "the groups that are launched, and the memory of each value", place, texts.placed_text, verifiers.verify_placed
)

JOIN = Stage(
    "join",
    "updates of caches, and rotary positions before them, in one launch, where memory allows it",
    join_updates,
    texts.placed_text,
    verifiers.verify_placed,
)

LOWER = Stage(
    "lower", "the program: kernels, launches, slices of weights, arena", lower, texts.program_text, verifiers.verify_program
)

PLAN = Stage(
    "plan",
    "the plan: which weights stay, and when each other is read and moved",
    plan,
    texts.attempt_text,
    verifiers.verify_plan,
)

INSTRUCTION_SETS = Stage(
    "instruction-sets",
    "other kernels for CPUs with other registers, over the same weights",
    for_other_instruction_sets,
    texts.elsewhere_text,
    verifiers.verify_elsewhere,
)

STEADY = Stage(
    "steady",
    "other kernels for runs after the first, over the same weights",
    with_steady,
    texts.steady_text,
    verifiers.verify_program,
)

LAY_OUT = Stage(
    "lay-out",
    "the place of each slice on the device, in each transfer mode",
    lay_out,
    texts.layouts_text,
    verifiers.verify_laid_out,
)

PACK = Stage(
    "pack",
    "the weight file of all shape variants: its pieces and their offsets. `write_weights` writes it",
    sharing_weights,
    texts.weights_text,
    verifiers.verify_weights,
)

STAGES: tuple[Stage[Any, Any], ...] = (
    IMPORT, REWRITE, PATCH, FUSE, ORDER, PLACE, JOIN, LOWER, PLAN, INSTRUCTION_SETS, STEADY, LAY_OUT, PACK,
)  # fmt: skip
