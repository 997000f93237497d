"""Lowering of reductions, softmax and normalization over a run of neighbouring axes, of LRN, and of determinants."""

from __future__ import annotations

import math
from typing import Any

from flashmem.base.types import DType
from flashmem.compiler.configs.workload import Workload
from flashmem.compiler.ir.fusion_group import FusionGroup
from flashmem.compiler.ir.graph import Value
from flashmem.compiler.kernels.reduction.configs import RowConfig
from flashmem.compiler.kernels.reduction.operators import whole_rows
from flashmem.compiler.lowering.context import LoweringContext
from flashmem.compiler.lowering.pointwise import PointwiseBody
from flashmem.compiler.lowering.registry import lowers
from flashmem.compiler.operators.vector import REGISTER, STORED, Vector, scalar_literal
from flashmem.program.launches import Arg, KernelShape

_JOINED: dict[str, tuple[float, str, str, str]] = {
    "ReduceL1": (0, "|v|", "$a + $b", "$"),
    "ReduceL2": (0, "v * v", "$a + $b", "sqrt($)"),
    "ReduceLogSum": (0, "v", "$a + $b", "log($)"),
    "ReduceMax": (-math.inf, "v", "fm_max($a, $b)", "$"),
    "ReduceMean": (0, "v", "$a + $b", "$ / columns"),
    "ReduceMin": (math.inf, "v", "fm_min($a, $b)", "$"),
    "ReduceProd": (1, "v", "$a * $b", "$"),
    "ReduceSum": (0, "v", "$a + $b", "$"),
    "ReduceSumSquare": (0, "v * v", "$a + $b", "$"),
}
"""Neutral element, contribution of an element v, how two are combined, and the result from the total `$` of `columns` elements.
"""

_LIMITS = {"int": (-(2**31), 2**31 - 1), "uint": (0, 2**32 - 1), "long": (-(2**63), 2**63 - 1), "ulong": (0, 2**64 - 1)}


_SUMMED: dict[DType, DType] = {"int32": "int64", "uint32": "uint64"}
"""The type in which a mean of integers is summed, so that the sum does not overflow."""


def _template_values(context: LoweringContext, group: FusionGroup) -> dict[str, Any]:
    """Template values that depend on the reduction and on the element type."""
    op = group.main.op
    dtype = group.main.input(0).dtype
    epsilon = group.main.attributes.get("epsilon", 0.0)
    computed = _SUMMED.get(dtype, dtype) if op == "ReduceMean" else dtype
    kind = REGISTER[computed]
    neutral, each, join, final = _JOINED.get(op, (0, "", "", ""))
    if kind != "float":
        neutral = _LIMITS[kind][neutral > 0] if math.isinf(neutral) else neutral
        join = join.replace("fm_", "")
    return {
        "op": op,
        "kind": kind,
        "stored": context.stored(group.main.input(0)),
        "made": context.stored(group.output),
        "storage": context.storage(group.main.input(0)),
        "computed": computed,
        "neutral": scalar_literal(computed, neutral),
        "each": each,
        "join": join,
        "final": final.replace("columns", f"({kind})columns"),
        "epsilon": scalar_literal("float32", epsilon),
    }


def _typed(values: dict[str, Any], dtype: DType, vector: int) -> dict[str, Any]:
    """`values` with those that depend on the vector width: types, and how a vector is read and written."""
    kinds = Vector(vector)
    computed = values["computed"]
    absolute = {"float": "fabs(v)", "int": f"convert_{kinds.of(dtype)}(abs(v))", "long": f"convert_{kinds.of(dtype)}(abs(v))"}
    return {
        **values,
        "each": values["each"].replace("|v|", absolute.get(values["kind"], "v")),
        "vector": vector,
        "vec": kinds.of(computed),
        "mask": kinds.named("long" if REGISTER[computed] in ("long", "ulong") else "int"),
        "load_vector": kinds.convert(dtype, computed, kinds.load(values["storage"], "x", "AT")),
        "stored_value": Vector(1).to_stored(dtype, Vector(1).convert(computed, dtype, "VALUE")),
        "stored_vector": kinds.to_stored(dtype, kinds.convert(computed, dtype, "VALUE")),
    }


def _over(context: LoweringContext, group: FusionGroup, epilogue: PointwiseBody) -> dict[str, Any]:
    """Template values of the epilogue; the operand that the kernel overwrites may be the input itself, `a`."""
    values = context.epilogue_values(epilogue)
    return {**values, "over": "a"} if context.buffers.overwritten.get(group.main) is group.main.input(0) else values


@lowers("reduction")
def lower_reduction(context: LoweringContext, group: FusionGroup) -> None:
    """Lower a reduction: by rows if the reduced axes are the last ones, otherwise by columns."""
    node = group.main
    x = node.input(0)
    axes = node.attributes["axes"]
    outer = math.prod(x.shape[: axes[0]])
    depth = math.prod(x.shape[axes[0] : axes[-1] + 1])
    values = _template_values(context, group)
    if whole_rows(node):
        _lower_rows(context, group, values, outer, depth)
    else:
        pointers = [context.operand(x), context.tensor(group.output)]
        _lower_columns(context, group, values, pointers, outer, depth, math.prod(x.shape[axes[-1] + 1 :]))


def _config(context: LoweringContext, group: FusionGroup, rows: int, depth: int) -> RowConfig:
    """The config of a reduction: how work-items share a row, or a group."""
    config = context.selector.config(Workload("reduce_rows", "buffer", rows, depth, 1), [node.op for node in group.nodes])
    assert isinstance(config, RowConfig)
    return config


def _prologue(context: LoweringContext, group: FusionGroup, body: PointwiseBody) -> dict[str, Any]:
    """Template values of a prologue: its function, the call that computes a vector, and the type in which it is kept, or "".

    A kept value is the one that its readers load: rounded, if it is stored in half.
    """
    if not group.prologue:
        return {"prologue": "", "computed_vector": "", "rounded_vector": "", "kept": ""}
    kind = context.storage(body.result)
    return {
        "prologue": body.function("KERNEL_NAME_prologue"),
        "computed_vector": f"KERNEL_NAME_prologue({', '.join(['row', 'AT', *body.names()])})",
        "rounded_vector": Vector(body.vector).rounded("v") if group.keeps and kind == "float16" else "",
        "kept": STORED[kind] if group.keeps else "",
    }


def _lower_rows(context: LoweringContext, group: FusionGroup, values: dict[str, Any], outer: int, depth: int) -> None:
    config = _config(context, group, outer, depth)
    lanes = config.lanes
    vector = min(config.vector, 1 << (depth.bit_length() - 1))
    epilogue = context.epilogue(group, vector)
    prologue = context.prologue(group, group.main.attributes["axes"][0], vector, epilogue)
    finishing = _over(context, group, epilogue)
    operands = finishing.pop("operands") + "".join(f", {each}" for each in prologue.parameters())
    local = (lanes, 1)
    kernel = context.kernels.kernel(
        "reduction/reduce_rows",
        attributes=context.attributes(local),
        lanes=lanes,
        subgroups=config.subgroups and values["kind"] == "float",
        operands=operands,
        **_typed(values, group.main.input(0).dtype, vector),
        **finishing,
        **_prologue(context, group, prologue),
    )
    x = group.main.input(0)
    source = [context.tensor(x)] if group.keeps else [] if group.prologue else [context.operand(x)]
    bodies = [*context.operand_args(epilogue), *context.operand_args(prologue)]
    args: list[Arg | int] = [*source, context.tensor(group.output), *bodies, outer, depth]
    shape = KernelShape(rows=outer, columns=group.main.outputs[0].size // outer, depth=depth, run=depth, vector=vector)
    nbytes = sum(map(context.nbytes, (*group.read(), *group.written))) if group.prologue else 0
    context.launch(group, kernel, args, (lanes, outer), local, shape, nbytes=nbytes)


def _lower_columns(
    context: LoweringContext,
    group: FusionGroup,
    values: dict[str, Any],
    pointers: list[Arg],
    outer: int,
    depth: int,
    inner: int,
) -> None:
    vector = context.vector_for(inner)
    epilogue = context.epilogue(group, vector)
    items = (-(-inner // vector), outer)
    local = context.work_group(items)
    kernel = context.kernels.kernel(
        "reduction/reduce_columns",
        attributes=context.attributes(local),
        **_typed(values, group.main.input(0).dtype, vector),
        **_over(context, group, epilogue),
    )
    shape = KernelShape(rows=group.main.outputs[0].size // inner, columns=inner, depth=depth, stride=inner, vector=vector)
    args: list[Arg | int] = [*pointers, *context.operand_args(epilogue), outer, depth, inner]
    context.launch(group, kernel, args, items, local, shape)


@lowers("group_normalization")
def lower_group_normalization(context: LoweringContext, group: FusionGroup) -> None:
    """Lower NormalizeGroups: a group is a run of columns in each of `depth` rows."""
    x = group.main.input(0)
    outer, depth, groups, columns = x.shape
    config = _config(context, group, outer * groups, depth * columns)
    lanes = config.lanes
    even = columns & -columns
    vector = min(even if even >= _LEAST_EVEN else 1 << (columns.bit_length() - 1), config.vector)
    epilogue = context.epilogue(group, vector)
    kinds = Vector(vector)
    kernel = context.kernels.kernel(
        "reduction/normalize_groups",
        attributes=context.attributes((lanes, 1)),
        lanes=lanes,
        subgroups=config.subgroups,
        vector=vector,
        vec=kinds.named("float"),
        mask=kinds.named("int"),
        whole=columns % vector == 0,
        load=kinds.load(context.storage(x), "a", "(size_t)row * columns + col"),
        stored=context.stored(x),
        made=context.stored(group.output),
        epsilon=scalar_literal("float32", group.main.attributes["epsilon"]),
        **_over(context, group, epilogue),
    )
    pointers = [context.operand(x), context.tensor(group.output), *context.operand_args(epilogue)]
    args: list[Arg | int] = [*pointers, outer, depth, groups, columns]
    shape = KernelShape(
        rows=outer * groups, columns=depth * columns, depth=depth * columns, run=columns, stride=groups, vector=vector
    )
    context.launch(group, kernel, args, (lanes, outer * groups), (lanes, 1), shape)


_LEAST_EVEN = 4
"""The narrowest vector that is preferred for a divisor of a run of columns, so that no vector is masked."""


@lowers("lrn")
def lower_lrn(context: LoweringContext, group: FusionGroup) -> None:
    """Lower LRN over windows of channels, for any position of the channel axis."""
    node = group.main
    x = node.input(0)
    axis = node.attributes["axis"]
    size = node.attributes["size"]
    rows = math.prod(x.shape[: axis + 1])
    channels = x.shape[axis]
    columns = math.prod(x.shape[axis + 1 :])
    vector = context.vector_for(columns)
    items = (-(-columns // vector), rows)
    local = context.work_group(items)
    kernel = context.kernels.kernel(
        "reduction/lrn",
        attributes=context.attributes(local),
        alpha=scalar_literal("float32", node.attributes["alpha"] / size),
        beta=scalar_literal("float32", node.attributes["beta"]),
        bias=scalar_literal("float32", node.attributes["bias"]),
        stored=context.stored(x),
        made=context.stored(group.output),
        **context.vectors(vector),
    )
    reach = [min((size - 1) // 2, channels), min(size // 2, channels)]
    args = [context.operand(x), context.tensor(group.output), rows, channels, columns, *reach]
    shape = KernelShape(rows=rows, columns=columns, depth=min(size, channels), run=columns, stride=columns, vector=vector)
    context.launch(group, kernel, args, items, local, shape)


@lowers("determinant")
def lower_determinant(context: LoweringContext, group: FusionGroup) -> None:
    """Lower Det: one work-item eliminates each matrix, in a copy."""
    x = group.main.input(0)
    y = group.output
    size = x.shape[-1]
    count = y.size
    work = context.tensor(Value(f"{x.name}.eliminated", x.shape, x.dtype))
    local = context.work_group((count,))
    kernel = context.kernels.kernel("reduction/determinant", attributes=context.attributes(local))
    shape = KernelShape(rows=count, depth=size**3)
    args: list[Arg | int] = [context.operand(x), work, context.tensor(y), count, size]
    context.launch(group, kernel, args, (count,), local, shape, macs=count * size**3 // 3)
