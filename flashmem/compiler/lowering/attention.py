"""Lowering of attention: one launch."""

from __future__ import annotations

from flashmem.base.types import ITEMSIZE
from flashmem.compiler.ir.broadcast import affine, place
from flashmem.compiler.ir.fusion_group import FusionGroup
from flashmem.compiler.ir.strided import Dimension
from flashmem.compiler.lowering.context import MOST_OFFSET, LoweringContext
from flashmem.compiler.lowering.pointwise import PointwiseBody
from flashmem.compiler.operators.attention import Access, Scores
from flashmem.compiler.operators.vector import STORED, scalar_literal
from flashmem.compiler.selection.attention_form import QueryRows, form_of
from flashmem.program.launches import Arg, KernelShape
from flashmem.target.kernel_configs.attention import AttentionConfig
from flashmem.target.kernel_configs.workload import Workload


def lower_attention(context: LoweringContext, group: FusionGroup) -> None:
    """Lower FusedAttention to one launch."""
    node, given = group.main, group.main.attributes
    query, key, value, answer = (given[name] for name in ("query", "key", "value", "answer"))
    batches, rows, keys = given["batches"], given["rows"], given["keys"]
    least = min(query.channels, value.channels)
    side_by_side = key.channel == value.channel == 1
    wide = min(context.descriptor.tile.vector, 1 << (least.bit_length() - 1)) if side_by_side else 1
    scores: Scores = given["scores"]
    operands = [node.input(i) for i in range(3, len(node.inputs))]
    filled = operands.pop() if given["filled"] else None
    dropped = place(operands.pop(), scores.shape, len(scores.shape) - 1) if given["dropped"] else None
    seed, nodes = scores.nodes(operands)
    workload = Workload("attention", "buffer", rows, query.channels, keys, batches)
    config = context.selector.config(workload, [node.op for node in nodes])
    assert isinstance(config, AttentionConfig)
    form = form_of(config, rows, query.channels, value.channels, wide)
    down = form.form == "rows" and form.vector > 1
    epilogue = PointwiseBody(nodes, seed, scores.shape, len(scores.shape) - 1, form.vector, context.storage, down)
    strides: list[int] = []
    tensors = (node.input(0), node.input(1), node.input(2), group.output)
    places = zip((query, key, value, answer), ("query", "key", "key", "query"), map(context.stored, tensors), strict=True)
    vectors = context.descriptor.code.vector_loads and all(context.nbytes(each) < MOST_OFFSET for each in tensors)
    q, k, v, y = (_template_values(access, row, stored, strides, vectors=vectors) for access, row, stored in places)
    kernel = context.kernels.kernel(
        "attention/attention",
        f=form,
        q=q,
        k=k,
        v=v,
        y=y,
        strides=range(len(strides)),
        depth=query.channels,
        channels=value.channels,
        scale=scalar_literal("float32", given["scale"]),
        value_scale=scalar_literal("float32", given["value_scale"]),
        guarded=scores.guarded,
        dropped=dropped.index if dropped else "",
        filled=STORED[filled.dtype] if filled else "",
        attributes=context.attributes(form.local),
        **{**context.vectors(form.vector), **context.epilogue_values(epilogue)},
    )
    pointers = [*(context.operand(node.input(i)) for i in range(3)), context.tensor(group.output)]
    if dropped:
        pointers.append(context.operand(dropped.value))
    if filled:
        pointers.append(context.operand(filled))
    blocks = -(-rows // form.rows)
    items = (form.lanes * blocks, batches) if isinstance(form, QueryRows) else (form.across, form.local[1] * blocks, batches)
    sizes = [ITEMSIZE[context.storage(each)] for each in tensors]
    counts = [rows * query.channels, keys * query.channels, keys * value.channels, rows * value.channels]
    nbytes = batches * sum(size * count for size, count in zip(sizes, counts, strict=True))
    nbytes += batches * keys * ITEMSIZE["float32"] * sum(access.scale is not None for access in (key, value))
    numbers = [batches, rows, keys, batches * rows, query.start, key.start, value.start]
    numbers += [*([filled.size] if filled else []), *strides]
    args: list[Arg | int] = [*pointers, *context.operand_args(epilogue), *numbers]
    context.launch(
        group,
        kernel,
        args,
        items,
        form.local,
        form.described(
            KernelShape(rows=batches * rows, columns=value.channels, depth=keys, run=query.channels, stride=key.channel)
        ),
        macs=batches * rows * keys * (query.channels + value.channels),
        nbytes=nbytes + sum(context.nbytes(operand.value) for operand in epilogue.operands),
    )


def _template_values(access: Access, row: str, stored: str, strides: list[int], *, vectors: bool) -> dict[str, object]:
    """Template values of a matrix operand: offsets as expressions of `batch` and of `row`, and the stride between channels.

    `step` is the stride between rows; empty if rows have several. `stored` is the element type in memory. `scale`: bytes from a
    quantised row to its scale. `aligned`: rows have
    a multiple of four channels and start at a multiple of four elements, and the device reads them by vectors (`vectors`).
    Strides that the expressions name are appended to `strides`. They become kernel arguments, so that models share kernels
    that differ in such sizes only.
    """

    def argument(stride: int) -> str:
        strides.append(stride)
        return f"stride{len(strides) - 1}"

    def offset(dimension: Dimension, index: str) -> str:
        return affine([size for size, _ in dimension], [stride for _, stride in dimension], index, stride_as=argument)

    batch, rows = offset(access.batch, "batch"), offset(access.row, row)
    starts = (access.start, access.channels, *(stride for _, stride in (*access.batch, *access.row)))
    [(_, stride), *more] = access.row or ((1, 0),)
    return {
        "batch": batch,
        "row": rows,
        "step": "" if more else rows.removeprefix(f"{row} * ") if rows.startswith(f"{row} * ") else stride,
        "channel": access.channel,
        "stored": stored,
        "scale": access.scale,
        "aligned": vectors and access.channel == 1 and not any(each % 4 for each in starts),
    }
