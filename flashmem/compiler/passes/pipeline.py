"""The pass pipeline: the passes between import and fusion, in order.

Each pass maps a graph to a graph. `requires` and `ensures` name forms of a graph (`compiler.passes.verifier`). Once a pass has
ensured a form, every later pass keeps it. The verifier runs after every pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashmem.base.errors import UserError
from flashmem.base.files import written_whole
from flashmem.base.paths import can_be_written
from flashmem.compiler.ir.graph import Graph
from flashmem.compiler.ir.text import graph_text
from flashmem.compiler.passes.attention import match_attention
from flashmem.compiler.passes.attention_views import fold_attention_views
from flashmem.compiler.passes.decompose import decompose
from flashmem.compiler.passes.fusion import fuse
from flashmem.compiler.passes.layout import assign_layouts
from flashmem.compiler.passes.normalization import match_normalizations
from flashmem.compiler.passes.qdq_fusion import fuse_qdq
from flashmem.compiler.passes.quantised_caches import quantise_caches
from flashmem.compiler.passes.rotary import match_rotary
from flashmem.compiler.passes.row_parts import fold_row_parts
from flashmem.compiler.passes.rows_as_images import rows_as_images
from flashmem.compiler.passes.split_matmul import split_matmuls
from flashmem.compiler.passes.transpose_hoisting import hoist_transposes
from flashmem.compiler.passes.transpose_sinking import sink_transposes
from flashmem.compiler.passes.update_views import fold_update_views
from flashmem.compiler.passes.verifier import Form, InvalidResultError, verify


@dataclass(frozen=True)
class Pass:
    """A pass: a function from graph to graph, the forms it requires, and the forms it ensures."""

    name: str
    run: Callable[[Graph], Graph]
    requires: tuple[Form, ...] = ()
    ensures: tuple[Form, ...] = ()


Observe = Callable[[Pass, Graph], None]
"""Called with each pass and its resulting graph, before the verifier runs."""

PASSES = (
    # ONNX's operators in all their versions become few and simple ones.
    Pass("decompose", decompose, ensures=("decomposed",)),
    # x / sqrt(mean(x^2) + epsilon) becomes one operator, and the same of x minus its mean.
    Pass("match-normalizations", match_normalizations, requires=("decomposed",)),
    # Rotary positions, in all their forms, become one operator.
    Pass("match-rotary", match_rotary, requires=("decomposed",)),
    # Products read 8-bit integers instead of the results of DequantizeLinear.
    Pass("fuse-qdq", fuse_qdq, requires=("decomposed",)),
    # Slices and Concats between convolutions of one dimension work on images of one row.
    Pass("rows-as-images", rows_as_images, requires=("decomposed",)),
    # Images around convolutions are stored with their channels last.
    Pass("assign-layouts", assign_layouts, requires=("decomposed",), ensures=("channels last",)),
    # softmax(f(Q K^T)) V becomes one operator for the passes below.
    Pass("match-attention", match_attention, requires=("decomposed",), ensures=("attention matched",)),
    # A Transpose after a product with weights moves before it, if another Transpose or attention precedes the product.
    Pass("hoist-transposes", hoist_transposes, requires=("decomposed", "attention matched")),
    # Transposes move down until an operator requires their order; most cancel.
    Pass("sink-transposes", sink_transposes, requires=("decomposed", "channels last", "attention matched")),
    # A product of which nodes read only parts becomes a product for each part.
    Pass("split-matmuls", split_matmuls, requires=("decomposed", "attention matched")),
    # Attention reads its operands and writes its answer through views, without data movement.
    Pass("fold-attention-views", fold_attention_views, requires=("attention matched",), ensures=("attention folded",)),
    # With states in int8: caches that attention alone reads become rows of int8 with a scale each.
    Pass("quantise-caches", quantise_caches, requires=("decomposed", "attention folded")),
    # Scatters read their updates through views, without data movement: new rows of a cache are no tensor of their own.
    Pass("fold-update-views", fold_update_views, requires=("decomposed", "attention folded")),
    # Elementwise operators read columns of a product where they are.
    Pass("fold-row-parts", fold_row_parts, requires=("decomposed",)),
)
"""All passes, in order. Fusion (`compiler.passes.fusion`) follows: it groups nodes and does not change the graph."""


def prepare(graph: Graph, observe: Observe = lambda step, graph: None) -> Graph:
    """`graph`, as imported, after all passes.

    Raises:
        InvalidResultError: a pass broke a rule of the verifier.
    """
    return run_passes(graph, PASSES, observe)


def run_passes(
    graph: Graph, passes: Sequence[Pass], observe: Callable[[Pass, Graph], None] = lambda step, graph: None
) -> Graph:
    """`graph` after `passes`, verified after each; `observe` as for `prepare`.

    Raises:
        InvalidResultError: a pass broke a rule, or requires a form that no pass before it ensures.
    """
    forms: dict[Form, None] = {}
    for step in passes:
        if missing := [form for form in step.requires if form not in forms]:
            raise InvalidResultError(f"pass {step.name} requires a graph that is {missing[0]}, which no pass before it ensures")
        graph = step.run(graph)
        observe(step, graph)
        forms |= dict.fromkeys(step.ensures)
        try:
            verify(graph, forms)
        except InvalidResultError as error:
            raise InvalidResultError(f"after pass {step.name}: {error}") from error
    return graph


def check_dump_folder(folder: Path) -> None:
    """Create `folder` if it is missing. Raises UserError if files cannot be written there."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--dump-passes {folder} is not a folder; name one")
    if not folder.parent.is_dir():
        raise UserError(f"--dump-passes {folder}: there is no folder {folder.parent}; create it first")
    if not can_be_written(folder):
        raise UserError(f"--dump-passes {folder} cannot be written; name another folder")
    folder.mkdir(exist_ok=True)


def dump_graph(graph: Graph, folder: Path) -> None:
    """Write `graph` as imported, after each pass, and its fusion groups, into `folder`: a numbered text file for each.

    The input of a pass is the file before its own, so `diff` of two neighbours shows the changes of the pass.

    Raises:
        UserError: a file cannot be written.
        InvalidResultError: a pass broke a rule of the verifier; its result is written first.
    """
    texts = {"imported": graph_text(graph)}
    try:
        made = prepare(graph, lambda step, after: texts.update({step.name: graph_text(after)}))
        texts["fuse"] = "".join(
            f"{group.main.op} {' '.join(node.name for node in group.nodes)} -> {group.output.name}\n"
            for group in fuse(made).groups
        )
    finally:
        for number, (name, text) in enumerate(texts.items()):
            _write(folder / f"{number:02}-{name}.txt", text)


def _write(path: Path, text: str) -> None:
    try:
        with written_whole(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}; name another folder for --dump-passes") from error
