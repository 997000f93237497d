"""Records of what the compiler makes of a golden model for a device: kernels, program, packed weights, plan.

A record is text by stage and by part of the stage, in the order of the compiler, so that the first difference of two records is
the nearest to its cause. A model has two programs on each device: one without limits, and one under a budget with a memory
path, transfer mode, objective and precision that a checksum of the names draws.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from flashmem.base.errors import UserError
from flashmem.base.types import Precision
from flashmem.compiler.adaptive.shape_variants import Variants, plan_variants
from flashmem.compiler.ir.graph import Graph
from flashmem.compiler.lowering.generated import Generated, write_weights
from flashmem.compiler.options import Options
from flashmem.compiler.stages.planned import CompiledVariant
from flashmem.program.kernel_text import kernel_texts
from flashmem.program.program import Program, fixed_bytes
from flashmem.request.request import BundleRequest
from flashmem.target.descriptor import IMPORT_HOST_MEMORY, DeviceDescriptor, descriptor_names, load_descriptor
from tests.golden.models import GoldenModel

Stage = Mapping[str, str]
"""Text of each part of a stage: of a kernel, a launch, a weight."""

Record = dict[str, Stage]

DEVICES = descriptor_names()

_SLOW = ("depthanything-tiny", "llama2-13b")
"""Models whose plan under a budget takes more than ten seconds."""

_DECIDED = (
    "capacities",
    "chunk_bytes",
    "layouts",
    "loader_threads",
    "m_peak",
    "mode",
    "objective",
    "piece_bytes",
    "relaxed",
    "weights",
)
"""The fields of a plan that decide what a run does; the others say how it was found. A hash is of these alone."""

_UNLIKE = ("solve_seconds",)
"""Fields of a plan that differ from one run to the next."""


def record(model: GoldenModel, device: str) -> Record:
    """The record of a model on the device of a descriptor."""
    descriptor = load_descriptor(device)
    with tempfile.TemporaryDirectory() as folder:
        graph = model.graph(Path(folder))
        packs = model.write is not None
        made = _compiled(graph, Options(descriptor, descriptor.modes[descriptor.memory_paths[0]][0]))
        stages = dict(_stages("no limit", made, packs=packs))
        if model.name not in _SLOW and isinstance(made, CompiledVariant):
            drawn, title = _drawn(model.name, descriptor, made.generated.program)
            stages |= _stages(title, _compiled(graph, drawn), packs=packs)
        return stages


def hash_stages(stages: Record) -> dict[str, str]:
    """The name and a short hash of each stage of a program, by the program's title."""
    found: dict[str, str] = {}
    for name, parts in stages.items():
        title, stage = name.split(": ")
        found[title] = f"{found[title]}, " if title in found else ""
        counted = parts if stage != "plan" else {part: text for part, text in parts.items() if part.split()[0] in _DECIDED}
        lines = {part: text.splitlines() for part, text in counted.items()}
        found[title] += f"{stage} {_hash(json.dumps(lines).encode())}"
    return found


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:8]


def _compiled(graph: Graph, options: Options) -> CompiledVariant | UserError:
    """The program and its plan, or why the device or the budget is too small for it."""
    try:
        return plan_variants(Variants.of([options], [graph]), lambda stage, done: None, lambda made, plan: None)[0]
    except UserError as refused:
        return refused


def _drawn(name: str, descriptor: DeviceDescriptor, unlimited: Program) -> tuple[Options, str]:
    """Options under a budget of half the weights, which a checksum draws, and a title that says them."""
    draw = hashlib.sha256(f"{name} {descriptor.name}".encode()).digest()
    if descriptor.kind == "gpu" and draw[0] % 2:
        descriptor = descriptor.with_probed({IMPORT_HOST_MEMORY: "a driver"})
    path = descriptor.memory_paths[draw[1] % len(descriptor.memory_paths)]
    modes = descriptor.modes[path]
    mode = modes[draw[2] % len(modes)]
    objective = ("first", "steady")[draw[3] % 2]
    precision: Precision = ("fp32", "fp32", "fp16")[draw[4] % 3]
    weights = unlimited.weights_bytes // (4 if precision == "fp16" else 2)
    budget = fixed_bytes(unlimited, shares_memory=descriptor.shares_memory) + weights
    request = BundleRequest(budget=budget, objective=objective, precision=precision)
    options = Options(descriptor.on_path(path), mode, request)
    return options, f"{path} {mode} {objective} {precision} in {budget} bytes"


def _stages(title: str, made: CompiledVariant | UserError, *, packs: bool) -> Iterator[tuple[str, Stage]]:
    """The stages of one program and its plan. `packs`: the model has weights."""
    if isinstance(made, UserError):
        yield f"{title}: refusal", {"refusal": str(made)}
        return
    programs = {"": made.generated, **{f" for {name}": each for name, each in made.elsewhere.items()}}
    for where, each in programs.items():
        plain, lane = kernel_texts(each.source.plain), kernel_texts(each.source.lane)
        numbered = _numbering([*plain, *lane])
        yield f"{title}: kernels{where}", {numbered(name): numbered(text) for name, text in plain.items()}
        yield f"{title}: stream lanes{where}", {numbered(name): numbered(text) for name, text in lane.items()}
        yield f"{title}: program{where}", {part: numbered(text) for part, text in _parts(each.program.to_json())}
    if packs:
        yield f"{title}: packed weights", _packed(made.generated)
    plan = {key: value for key, value in made.plan.to_json().items() if key not in _UNLIKE}
    yield f"{title}: plan", dict(_parts(plan))


def _numbering(kernels: Sequence[str]) -> Callable[[str], str]:
    """Replaces the names of kernels, which end in a hash of their text, by numbers, so that equal kernels keep their names."""
    counts: Counter[str] = Counter()
    names: dict[str, str] = {}
    for kernel in dict.fromkeys(kernels):
        family = kernel.rpartition("_")[0]
        counts[family] += 1
        names[kernel] = f"{family}_{counts[family]}"
    named = re.compile("|".join(map(re.escape, names)))
    return lambda text: named.sub(lambda name: names[name[0]], text)


class _Hashes:
    """A weight file of which only a hash of each appended array is kept."""

    def __init__(self) -> None:
        self.size = 0
        self.pieces: list[str] = []

    def append(self, data: NDArray[Any], alignment: int = 1) -> int:
        """Hash `data`; returns the offset that it would have."""
        offset = -(-self.size // alignment) * alignment
        self.size = offset + data.nbytes
        self.pieces.append(f"{data.nbytes} bytes at {offset}: {_hash(data.tobytes())}")
        return offset


def _packed(generated: Generated) -> Stage:
    """The hash of each piece of the weight file, by weight."""
    sink, found = _Hashes(), dict[str, str]()

    def packed(name: str, nbytes: int) -> None:
        found[name] = found.get(name, "") + "".join(f"{piece}\n" for piece in sink.pieces)
        sink.pieces.clear()

    write_weights([generated], sink, packed)
    return found


def _parts(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Each field of JSON data as text; of a list of tables, each table by its name or number."""
    for key, value in data.items():
        if isinstance(value, Sequence) and value and isinstance(value[0], Mapping):
            for number, row in enumerate(value, start=1):
                yield f"{key} {number} {row.get('name', '')}".strip(), _text(row)
        else:
            yield key, _text(value)


def _text(value: object) -> str:
    return json.dumps(_rounded(value))


def _rounded(value: Any) -> Any:
    """`value` with numbers of 9 digits, which are the same whatever vectors a processor sums in."""
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, Mapping):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, Sequence) and not isinstance(value, str) else value
