"""Lowering of attention: one launch, or for few queries over many keys two. In half, by tensor cores if the device has them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flashmem.base.types import ITEMSIZE
from flashmem.compiler.configs.config import EstimatedDevice
from flashmem.compiler.configs.listed import configs_of
from flashmem.compiler.configs.workload import Workload
from flashmem.compiler.ir.broadcast import affine, place
from flashmem.compiler.ir.fusion_group import FusionGroup
from flashmem.compiler.ir.graph import Node, Value
from flashmem.compiler.ir.strided import Dimension
from flashmem.compiler.kernels.attention.configs import AttentionConfig, SplitKeysConfig
from flashmem.compiler.kernels.attention.form import KeyBlock, QueryRows, TensorForm, form_of, split_form, tensor_form
from flashmem.compiler.kernels.attention.operators import Access, Band, Scores
from flashmem.compiler.kernels.attention.tensor_cores import TensorAttention
from flashmem.compiler.lowering.context import MOST_OFFSET, LoweringContext
from flashmem.compiler.lowering.pointwise import PointwiseBody
from flashmem.compiler.lowering.registry import lowers
from flashmem.compiler.operators.vector import STORED, scalar_literal
from flashmem.program.launches import Arg, KernelShape


@dataclass(frozen=True)
class _Attention:
    """An attention: what its lowerings share.

    `values`: template variables of every form. `last`: arguments that follow the answer's. `nbytes`: of operands and answer.
    """

    group: FusionGroup
    workload: Workload
    accesses: tuple[Access, Access, Access, Access]
    scores: Scores
    seed: Value
    nodes: tuple[Node, ...]
    values: dict[str, Any]
    dropped: list[Arg]
    filled: list[Arg]
    ends: list[int]
    nbytes: int

    @property
    def tensors(self) -> tuple[Value, Value, Value, Value]:
        """Queries, keys, values and the answer."""
        node = self.group.main
        return node.input(0), node.input(1), node.input(2), self.group.output

    @property
    def starts(self) -> list[int]:
        """The first elements of queries, keys and values."""
        return [access.start for access in self.accesses[:3]]

    @property
    def scale(self) -> float:
        """The factor of the products of queries and keys."""
        return float(self.group.main.attributes["scale"])

    @property
    def band(self) -> list[int]:
        """The numbers of the band, if scores have one."""
        return self.scores.band.numbers if self.scores.band else []

    @property
    def macs(self) -> int:
        """Multiplications of both products, of scores that are not hidden."""
        w, (query, _, value, _) = self.workload, self.accesses
        pairs = self.scores.band.pairs(w.rows, w.columns) if self.scores.band else w.rows * w.columns
        return w.batches * pairs * (query.channels + value.channels)

    @property
    def shape(self) -> KernelShape:
        """The sizes of its launch, before those of a config."""
        w, (query, key, value, _) = self.workload, self.accesses
        return KernelShape(
            rows=w.batches * w.rows, columns=value.channels, depth=w.columns, run=query.channels, stride=key.channel
        )

    def body(
        self, context: LoweringContext, vector: int, *, down: bool = False, behind: PointwiseBody | None = None
    ) -> PointwiseBody:
        """The operators on scores, for vectors of `vector` of them, of queries with `down`.

        Its parameters follow those of the body `behind`.
        """
        shape = self.scores.shape
        before = (len(behind.operands), len(behind.numbers)) if behind else (0, 0)
        return PointwiseBody(self.nodes, self.seed, shape, len(shape) - 1, vector, context.storage, down, behind=before)


@lowers("attention")
def lower_attention(context: LoweringContext, group: FusionGroup) -> None:
    """Lower FusedAttention: to two launches where a config of the device splits keys and fits, else to one."""
    attention = _attention(context, group)
    split = _splitting(context, attention)
    tensor = None if split else _by_tensor_cores(context, attention)
    if split is not None:
        _launch_split(context, attention, split)
    elif tensor is not None:
        _launch_tensor(context, attention, tensor)
    else:
        _launch_whole(context, attention)


def _attention(context: LoweringContext, group: FusionGroup) -> _Attention:
    node = group.main
    given = group.main.attributes
    query, key, value, answer = (given[name] for name in ("query", "key", "value", "answer"))
    batches = given["batches"]
    rows = given["rows"]
    keys = given["keys"]
    scores: Scores = given["scores"]
    operands = [node.input(i) for i in range(3, len(node.inputs))]
    filled = operands.pop() if given["filled"] else None
    dropped = place(operands.pop(), scores.shape, len(scores.shape) - 1) if given["dropped"] else None
    seed, nodes = scores.nodes(operands)
    tensors = (node.input(0), node.input(1), node.input(2), group.output)
    sizes = [ITEMSIZE[context.storage(each)] for each in tensors]
    counts = [rows * query.channels, keys * query.channels, keys * value.channels, rows * value.channels]
    nbytes = batches * sum(size * count for size, count in zip(sizes, counts, strict=True))
    nbytes += batches * keys * ITEMSIZE["float32"] * sum(access.scale is not None for access in (key, value))
    values = {
        "depth": query.channels,
        "channels": value.channels,
        "scale": scalar_literal("float32", given["scale"]),
        "value_scale": scalar_literal("float32", given["value_scale"]),
        "guarded": scores.guarded,
        "dropped": dropped.index if dropped else "",
        "filled": STORED[filled.dtype] if filled else "",
        "by_query": given["filled"] == "queries",
        "band": scores.band or Band(None, None),
    }
    return _Attention(
        group,
        Workload("attention", "buffer", rows, query.channels, keys, batches),
        (query, key, value, answer),
        scores,
        seed,
        nodes,
        values,
        [context.operand(dropped.value)] if dropped else [],
        [context.operand(filled)] if filled else [],
        [filled.size] if filled else [],
        nbytes,
    )


def _splitting(context: LoweringContext, attention: _Attention) -> SplitKeysConfig | None:
    """The device's first config that splits the keys of such an attention. It has no rival where it fits."""
    for each in configs_of(context.descriptor, "attention"):
        if isinstance(each, SplitKeysConfig) and each.fits(attention.workload):
            return each
    return None


_HIDING = frozenset({"Where", "Add"})
"""Steps by which a mask hides keys. No product in half changes a sum of at most -1e30 by more than its rounding."""

_MANY = 4
"""Blocks of keys from which masks are looked at before."""


def _by_tensor_cores(context: LoweringContext, attention: _Attention) -> TensorAttention | None:
    """The device's fastest config by its estimate that computes such an attention by tensor cores; None if none does.

    Queries, keys, values and answers are halves, in rows that are read and written in words.
    """
    w, (query, _, value, _) = attention.workload, attention.accesses
    words = zip(attention.tensors, attention.accesses, (2, 8, 8, 4), strict=True)
    if not all(context.stored(each) == "half" and _in_words(access, n) for each, access, n in words):
        return None
    widest = replace(w, depth=max(query.channels, value.channels), storage="float16")
    fitting = [
        each for each in configs_of(context.descriptor, "attention") if isinstance(each, TensorAttention) and each.fits(widest)
    ]
    return min(fitting, key=lambda each: each.cost(w, EstimatedDevice.of(context.descriptor)), default=None)


def _in_words(access: Access, elements: int) -> bool:
    """Whether rows start at a multiple of `elements` elements, and have whole words of so many neighbours."""
    starts = (access.start, access.channels, *(stride for _, stride in (*access.batch, *access.row)))
    return access.scale is None and access.channel == 1 and not any(each % elements for each in starts)


def _skips(attention: _Attention, config: TensorAttention) -> bool:
    """Whether it pays to find out which blocks of keys a mask hides.

    It is the same mask for all batches, only `_HIDING` steps compute with scores, and there are many blocks.
    """
    w = attention.workload
    shape = attention.scores.shape
    made = {attention.seed}
    hiding = False
    if w.rows <= config.queries or w.columns < _MANY * config.keys or w.rows % shape[-2]:
        return False
    for node in attention.nodes:
        if made.intersection(node.inputs):
            if node.op not in _HIDING or (node.op == "Where" and node.input(0) in made):
                return False
            made.update(node.outputs)
            hiding = True
    inside = {attention.seed, *(value for node in attention.nodes for value in node.outputs)}
    operands = {value for node in attention.nodes for value in node.inputs if value is not None} - inside
    return hiding and all(math.prod(value.shape[:-2]) == 1 for value in operands)


def _launch_mask_blocks(context: LoweringContext, attention: _Attention, form: TensorForm, epilogue: PointwiseBody) -> Arg:
    """Append a launch that finds out what the mask does to each block of queries and keys; returns its answers."""
    w = attention.workload
    group = attention.group
    down = -(-w.rows // form.rows)
    across = -(-w.columns // form.keys)
    found = Value(f"{group.output.name}.masks", (down * across,), "uint8")
    values = {"f": form, "attributes": context.attributes(form.local), **context.epilogue_values(epilogue)}
    kernel = context.kernels.kernel("attention/mask_blocks", **values)
    nbytes = context.nbytes(found) + sum(context.nbytes(operand.value) for operand in epilogue.operands)
    shape = KernelShape(rows=w.rows, columns=w.columns, vector=2)
    args: list[Arg | int] = [context.tensor(found), *context.operand_args(epilogue), w.rows, w.columns]
    context.launch(group, kernel, args, (form.items * across, down), form.local, shape, nbytes=nbytes, part="[masks]")
    return context.tensor(found)


def _launch_tensor(context: LoweringContext, attention: _Attention, config: TensorAttention) -> None:
    """Append one launch on tensor cores."""
    w, (query, _, value, _) = attention.workload, attention.accesses
    form = tensor_form(config, query.channels, value.channels, skips=_skips(attention, config))
    epilogue = attention.body(context, 2)
    values = {**attention.values, **context.epilogue_values(epilogue), "attributes": context.attributes(form.local), "f": form}
    masks = [_launch_mask_blocks(context, attention, form, epilogue)] if form.skips else []
    strides: list[int] = []
    rows = ("query", "key", "key", "query")
    stored = map(context.stored, attention.tensors)
    places = list(zip(attention.accesses, rows, stored, strict=True))
    q, k, v, y = _each_template_values(places, strides, vectors=False)
    scaled = bool(attention.nodes) or attention.scale <= 0
    kernel = context.kernels.kernel(
        "attention/tensor_attention",
        q=q,
        k=k,
        v=v,
        y=y,
        strides=range(len(strides)),
        scaled=scaled,
        factor=scalar_literal("float32", math.log2(math.e) * (1 if scaled else attention.scale)),
        **values,
    )
    pointers = [*map(context.operand, attention.tensors[:3]), context.tensor(attention.group.output), *masks]
    pointers += [*attention.dropped, *attention.filled, *context.operand_args(epilogue)]
    numbers = [w.batches, w.rows, w.columns, w.batches * w.rows, *attention.starts, *attention.ends, *strides, *attention.band]
    context.launch(
        attention.group,
        kernel,
        [*pointers, *numbers],
        (form.items * -(-w.rows // form.rows), w.batches),
        form.local,
        form.described(replace(attention.shape, family="attention")),
        macs=attention.macs,
        nbytes=attention.nbytes + sum(context.nbytes(operand.value) for operand in epilogue.operands),
    )


def _launch_whole(context: LoweringContext, attention: _Attention) -> None:
    """Append one launch, in which a work-group reads all keys."""
    w, (query, key, value, _) = attention.workload, attention.accesses
    least = min(query.channels, value.channels)
    side_by_side = key.channel == value.channel == 1
    wide = min(context.descriptor.tile.vector, 1 << (least.bit_length() - 1)) if side_by_side else 1
    config = context.selector.config(w, [node.op for node in attention.nodes])
    assert isinstance(config, AttentionConfig)
    form = form_of(config, w.rows, query.channels, value.channels, wide)
    epilogue = attention.body(context, form.vector, down=form.form == "rows" and form.vector > 1)
    strides: list[int] = []
    rows = ("query", "key", "key", "query")
    stored = map(context.stored, attention.tensors)
    places = list(zip(attention.accesses, rows, stored, strict=True))
    vectors = context.descriptor.code.vector_loads and all(context.nbytes(each) < MOST_OFFSET for each in attention.tensors)
    q, k, v, y = _each_template_values(places, strides, vectors=vectors)
    for operand, access, each in zip((q, k, v), attention.accesses, attention.tensors, strict=False):
        operand["width"] = _width(access, context.stored(each)) if isinstance(form, KeyBlock) else 1
    kernel = context.kernels.kernel(
        "attention/attention",
        f=form,
        q=q,
        k=k,
        v=v,
        y=y,
        strides=range(len(strides)),
        attributes=context.attributes(form.local),
        **attention.values,
        **{**context.vectors(form.vector), **context.epilogue_values(epilogue)},
    )
    pointers = [*map(context.operand, attention.tensors[:3]), context.tensor(attention.group.output)]
    pointers += [*attention.dropped, *attention.filled, *context.operand_args(epilogue)]
    blocks = -(-w.rows // form.rows)
    down = () if isinstance(form, QueryRows) else (form.local[1] * blocks,)
    across = form.lanes * blocks if isinstance(form, QueryRows) else form.across
    items = (across, *down, w.batches)
    numbers = [w.batches, w.rows, w.columns, w.batches * w.rows, *attention.starts, *attention.ends, *strides, *attention.band]
    context.launch(
        attention.group,
        kernel,
        [*pointers, *numbers],
        items,
        form.local,
        form.described(attention.shape),
        macs=attention.macs,
        nbytes=attention.nbytes + sum(context.nbytes(operand.value) for operand in epilogue.operands),
    )


def _launch_split(context: LoweringContext, attention: _Attention, config: SplitKeysConfig) -> None:
    """Append two launches: sums of each chunk of keys, which are a tensor between them, and the answer from these."""
    w, group, (query, key, value, answer) = attention.workload, attention.group, attention.accesses
    form = split_form(config, w.rows, value.channels)
    chunks = -(-w.columns // form.keys)
    parts = Value(f"{group.output.name}.chunks", (w.batches * w.rows, chunks, 4 * form.quads + 2), "float32")
    epilogue = attention.body(context, 1)
    strides: list[int] = []
    stored = [context.stored(each) for each in attention.tensors]
    places = zip((query, key, value), ("query", "key", "key"), stored, strict=False)
    q, k, v = (_template_values(*each, strides, vectors=False) for each in places)
    widths = (_width(access, each) for access, each in zip((key, value), stored[1:3], strict=True))
    for operand, width in zip((k, v), widths, strict=True):
        operand["width"] = width
    values = {**attention.values, "attributes": context.attributes(form.local), "f": form}
    kernel = context.kernels.kernel(
        "attention/split_keys", q=q, k=k, v=v, strides=range(len(strides)), **values, **context.epilogue_values(epilogue)
    )
    sizes = [w.batches, w.rows, w.columns, w.batches * w.rows, chunks]
    shape = form.described(replace(attention.shape, family="attention"))
    args: list[Arg | int] = [*map(context.operand, attention.tensors[:3]), context.tensor(parts), *attention.filled]
    args += [*context.operand_args(epilogue), *sizes, *attention.starts, *attention.ends, *strides, *attention.band]
    of_operands = sum(context.nbytes(operand.value) for operand in epilogue.operands)
    nbytes = attention.nbytes - context.nbytes(group.output) + context.nbytes(parts) + of_operands
    items = (form.lanes * chunks, -(-w.rows // form.rows), w.batches)
    context.launch(group, kernel, args, items, form.local, shape, macs=attention.macs, nbytes=nbytes, part="[chunks]")
    strides = []
    y = _template_values(answer, "query", stored[3], strides, vectors=False, written=True)
    kernel = context.kernels.kernel("attention/join_chunks", y=y, strides=range(len(strides)), **values)
    args = [context.tensor(parts), context.tensor(group.output), *attention.dropped, *attention.filled]
    args += [*sizes, *attention.ends, *strides]
    shape = KernelShape(rows=w.batches * w.rows, columns=value.channels, depth=chunks, run=value.channels, vector=4)
    nbytes = context.nbytes(parts) + context.nbytes(group.output)
    items = (form.lanes, w.rows, w.batches)
    context.launch(group, kernel, args, items, form.local, shape, nbytes=nbytes, part="[join]")


_WIDEST = {"char": 16, "half": 8, "float": 4}
"""Elements of the widest load, of 16 bytes."""


def _width(access: Access, stored: str) -> int:
    """Elements of the widest aligned load of a row, a power of two of at least four; 1 if rows are not aligned so."""
    divisor = math.gcd(access.start, access.channels, *(stride for _, stride in (*access.batch, *access.row)))
    width = min(divisor & -divisor, _WIDEST[stored])
    return width if access.channel == 1 and width >= 4 else 1


def _each_template_values(
    places: Sequence[tuple[Access, str, str]], strides: list[int], *, vectors: bool
) -> Iterator[dict[str, object]]:
    """Template values of the matrices of an attention, the last of which is written."""
    for access, row, stored in places:
        yield _template_values(access, row, stored, strides, vectors=vectors, written=access is places[-1][0])


def _template_values(
    access: Access, row: str, stored: str, strides: list[int], *, vectors: bool, written: bool = False
) -> dict[str, object]:
    """Template values of a matrix operand: offsets as expressions of `batch` and of `row`, and the stride between channels.

    `step` is the stride between rows; empty if rows have several. `stored` is the element type in memory. `scale`: bytes from a
    quantised row to its scale. `aligned`: rows have
    a multiple of four channels and start at a multiple of four elements, and the device reads them by vectors (`vectors`).
    Strides that the expressions name are appended to `strides`. They become kernel arguments, so that models share kernels
    that differ in such sizes only. The stride between channels is one where the matrix is `written`: NVIDIA's compiler
    (580.159) computes some addresses wrongly where it is a number of the text (docs/research/opencl-notes.md).
    """

    def argument(stride: int) -> str:
        strides.append(stride)
        return f"stride{len(strides) - 1}"

    def offset(dimension: Dimension, index: str) -> str:
        return affine([size for size, _ in dimension], [stride for _, stride in dimension], index, stride_as=argument)

    batch = offset(access.batch, "batch")
    rows = offset(access.row, row)
    starts = (access.start, access.channels, *(stride for _, stride in (*access.batch, *access.row)))
    [(_, stride), *more] = access.row or ((1, 0),)
    return {
        "batch": batch,
        "row": rows,
        "step": "" if more else rows.removeprefix(f"{row} * ") if rows.startswith(f"{row} * ") else stride,
        "channel": argument(access.channel) if written and access.channel != 1 else access.channel,
        "stored": stored,
        "scale": access.scale,
        "aligned": vectors and access.channel == 1 and not any(each % 4 for each in starts),
    }
