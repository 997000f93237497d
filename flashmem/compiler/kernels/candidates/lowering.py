"""Lowering of Candidates: the best elements of each chunk of a row, then of the row."""

from __future__ import annotations

from flashmem.compiler.ir.fusion_group import FusionGroup
from flashmem.compiler.ir.graph import Value
from flashmem.compiler.lowering.context import LoweringContext
from flashmem.compiler.lowering.registry import lowers
from flashmem.compiler.operators.vector import Vector
from flashmem.program.launches import Arg, KernelShape

_CHUNKS = 8
"""Chunks that keep the cores of a CPU busy, where rows are long. A heap takes longer for more and shorter ones."""

_CHUNK = {"cpu": (1024, 1 << 15), "gpu": (512, 512)}
"""The fewest and the most elements of a chunk."""

_BLOCK = 1024
"""Elements that a CPU sums before it adds them to others, so that the sum is exact enough (`bundle.language.SUM_ERROR`)."""


@lowers("candidates")
def lower_candidates(context: LoweringContext, group: FusionGroup) -> None:
    """Lower Candidates to two launches, for any number of rows."""
    node = group.main
    on_cpu = context.descriptor.kind == "cpu"
    x = node.input(0)
    temperature = node.input(1)
    kept = node.attributes["k"]
    depth = x.shape[-1]
    rows = x.size // depth
    alike = rows // temperature.size  # rows with the same temperature
    least, most = _CHUNK[context.descriptor.kind]
    chunk = max(least, min(most, -(-depth // _CHUNKS)))
    chunks = -(-depth // chunk)
    lanes = 1 if on_cpu else context.descriptor.tile.lanes
    best = Value(f"{group.output.name}.best", (rows, chunks, kept + 2), "int32")
    local = (lanes, 1)
    values = {"attributes": context.attributes(local), "stored": context.stored(x), "kept": kept}
    source = [context.operand(x), context.operand(temperature)]
    if on_cpu:
        vector = Vector(context.descriptor.tile.vector)
        kernel = context.kernels.kernel(
            "selection/candidates_by_heap",
            kind="float",
            symbol=">",
            nan_first=False,
            contiguous=vector.width > 1,
            vector=vector.width,
            block=_BLOCK,
            load=vector.load(context.storage(x), "a", "next"),
            **values,
        )
        numbers = [rows, alike, depth, chunks, chunk]
    else:
        kernel = context.kernels.kernel("selection/candidates_by_rank", lanes=lanes, chunk=chunk, **values)
        numbers = [rows, alike, depth, chunks]
    shape = KernelShape(rows=rows * chunks, columns=kept, depth=chunk, run=chunk)
    nbytes = context.nbytes(x) + context.nbytes(best)
    args: list[Arg | int] = [*source, context.tensor(best), *numbers]
    context.launch(group, kernel, args, (chunks * lanes, rows), local, shape, nbytes=nbytes, part="[chunks]")
    kernel = context.kernels.kernel("selection/join_candidates", lanes=lanes, chunks=chunks, **values)
    shape = KernelShape(rows=rows, columns=kept, depth=chunks, run=kept)
    nbytes = context.nbytes(best) + context.nbytes(group.output)
    args = [*source, context.tensor(best), context.tensor(group.output), rows, alike, depth, chunk]
    context.launch(group, kernel, args, (lanes, rows), local, shape, nbytes=nbytes, part="[row]")
