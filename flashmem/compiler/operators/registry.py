"""Operator registry: one declaration for each operator, with all its properties.

A model's node becomes fusion groups in one of three ways. An *expression* over its operands' elements fuses with its
neighbours; a *rewrite* expresses it by existing operators; or a *kernel* (a lowering of `flashmem.compiler.lowering.registry`,
found by name) runs it. A rewrite may also bring a node into the form that its kernel or expression requires. Constants become
attributes, axes are counted from the front, and shapes are lifted to two dimensions. Forms that only rewrites produce, and no
ONNX file contains, are declared with `onnx=False`.

The importer, decomposition, layout assignment, fusion, code generation, the capacity model and docs/reference/operators.md read
these declarations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from flashmem.base.types import DType, OperatorClass
from flashmem.compiler.ir.builder import Rewriter
from flashmem.compiler.ir.graph import Node, Value
from flashmem.compiler.operators.tiling_interface import AxisRange, TiledNode, TilingRule, at_each_place
from flashmem.compiler.operators.vector import Vector

Types = frozenset[DType]

ANY: Types = frozenset(get_args(DType))
FLOAT: Types = frozenset({"float32"})
"""Also float16, bfloat16 and float64, which are computed in float32."""

BOOL: Types = frozenset({"bool"})
NUMBERS = ANY - BOOL
INTEGERS = NUMBERS - FLOAT
WIDE: Types = frozenset({"float32", "int32", "int64", "uint32", "uint64"})
"""The number types that ONNX multiplies and sums."""

INDEX: Types = frozenset({"int32", "int64"})

NEWEST_OPSET = 28
"""The newest ONNX operator set with which these declarations have been compared."""

Check = Callable[[Node], str | None]
"""Returns the reason why a node cannot run, or None. It receives nodes in ONNX's form, with inferred shapes."""

Rewrite = Callable[[Rewriter, Node, int], None]
"""Rewrites a node of an operator set (the number) to existing forms, which it appends to the rewriter."""

Emit = Callable[[Node, Sequence[str], Vector], str]
"""Returns an expression in registers for a node and the names of its operands. Operands are variables and may be repeated."""

Remap = Callable[[Node], dict[str, Any]]
"""The attributes of a node, in its logical order of dimensions, that change in channels-last layout."""

TensorsOf = Callable[[Node], Iterable[Value | None]]
"""The operands and results of a node that keep float32 when `--precision fp16` stores activations in half."""

Layout = Literal["logical", "channels_last", "either"]


@dataclass(frozen=True)
class Operator:
    """Declaration of an operator. `docs/reference/operators.md` is generated from these fields.

    Attributes:
        name: ONNX's name.
        inputs: the allowed element types of each input; the last entry applies to all further inputs.
        check: returns why a node cannot run.
        rewrite: brings a node into simpler forms, or into the one that `expression` or `kernel` requires.
        expression: its value at one place, from its operands' elements at that place.
        kernel: the lowering that runs it.
        layout: the order of 4D dimensions that it requires: ONNX's, channels-last, or the order of its input (see `remap`).
        remap: for layout "either": its attributes in channels-last order.
        columns: for an operator whose kernel has an epilogue: the first dimension of its output that forms columns in the
            kernel (those before it form rows). None: nothing may be fused after it.
        in_place: operands whose memory its output may use, because the work-item that writes an element is the only one
            that reads it. "epilogue": operands of the epilogue that have its output's shape; "input": also its first input.
            All operands of an expression are read so. Templates state it (`//@ over`).
        epilogue_cast: whether the kernel writes the element type that its epilogue ends in; if not, its epilogue is float32.
        prologue: whether its kernel can compute its first input by elementwise operators, where it would load it, if rows are
            contiguous.
        keep_fp32: its tensors that are never stored in half: indices, scales, statistics, and sums in memory.
        special: whether an element costs a function call or more, rather than an instruction or two.
        operator_class: how much it may stream while it computes (FlashMem Table 5).
        empty: whether it can run on an input without elements when its output has some.
        onnx: whether ONNX has it; if not, only rewrites produce it.
        tiling: the rule for a range of its output (`operators.tiling_interface`). None: only expressions can be tiled.
        family: the module that declares it.
    """

    name: str
    inputs: tuple[Types, ...]
    check: Check = lambda node: None
    rewrite: Rewrite | None = None
    expression: Emit | None = None
    kernel: str = ""
    layout: Layout = "logical"
    remap: Remap = lambda node: {}
    columns: Callable[[Node], int] | None = None
    in_place: Literal["", "epilogue", "input"] = ""
    epilogue_cast: bool = False
    prologue: bool = False
    keep_fp32: TensorsOf = lambda node: ()
    special: bool = False
    operator_class: OperatorClass = "elemental"
    empty: bool = False
    onnx: bool = True
    tiling: TilingRule | None = None
    family: str = ""

    def why_not(self, node: Node) -> str | None:
        """The reason why `node` cannot run, or None if it can."""
        for index, value in enumerate(node.inputs):
            if value is not None and value.dtype not in self.inputs[min(index, len(self.inputs) - 1)]:
                return f"{node.op} of {value.dtype} (input {index}, {value.name}) is not implemented"
        is_read = all(value is None or value.size for value in node.inputs[:1])
        if not is_read and not self.empty and (self.layout == "channels_last" or any(value.size for value in node.outputs)):
            return f"{node.op} of a tensor without elements ({node.input(0).name}) is not implemented"
        return self.check(node) if is_read or self.empty else None

    def tile_of(self, node: Node, span: AxisRange) -> TiledNode | None:
        """The node that computes `span` of the output of `node` (decomposed); None if it cannot be computed separately."""
        if len(node.outputs) > 1:
            return None
        rule = self.tiling or (at_each_place if self.expression is not None else None)
        return None if rule is None else rule(node, span)


REGISTRY: dict[str, Operator] = {}
"""All operators by name. The modules of this package fill it when they are imported."""


def register(family: str, *operators: Operator) -> None:
    """Register the declarations of a module; each operator once."""
    for operator in operators:
        assert operator.name not in REGISTRY, f"{operator.name} is declared twice"
        assert operator.rewrite or operator.expression or operator.kernel, f"{operator.name} does nothing"
        REGISTRY[operator.name] = replace(operator, family=family)


def elementwise(name: str, inputs: Types | tuple[Types, ...], expression: Emit, **fields: Any) -> Operator:
    """An operator that computes each output element from the elements at the same (broadcast) place."""
    types = inputs if isinstance(inputs, tuple) else (inputs,)
    return Operator(name, types, expression=expression, layout="either", **fields)


def each(names: Iterable[str], **fields: Any) -> Iterator[Operator]:
    """One declaration for several operators that differ only in name."""
    return (Operator(name, **fields) for name in names)


def is_native(op: str) -> bool:
    """Whether the ONNX operator `op` is kept, rather than replaced by its definition in simpler ONNX operators."""
    return op in REGISTRY and REGISTRY[op].onnx


def is_elementwise(node: Node) -> bool:
    """Whether `node` maps each output element from the elements at the same (broadcast) place."""
    return REGISTRY[node.op].expression is not None


def why_unsupported(node: Node) -> str | None:
    """The reason why `node` cannot run, or None if it can."""
    if not is_native(node.op):
        return f"operator {node.op} is not implemented"
    return REGISTRY[node.op].why_not(node)


def constant_inputs(*indices: int) -> Check:
    """A check: these inputs, if given, must be constants."""

    def check(node: Node) -> str | None:
        for index in indices:
            value = node.optional(index)
            if value is not None and value.constant is None:
                return f"{node.op} with input {index} ({value.name}) computed at run time is not implemented"
        return None

    return check


def all_of(*checks: Check) -> Check:
    """A check: the first reason that any of `checks` returns."""
    return lambda node: next((reason for check in checks if (reason := check(node)) is not None), None)


def fp32_inputs(*indices: int) -> TensorsOf:
    """For `Operator.keep_fp32`: these inputs, if given."""
    return lambda node: [node.optional(index) for index in indices]


def fp32_outputs(node: Node) -> Iterable[Value | None]:
    """For `Operator.keep_fp32`: the outputs of the node."""
    return node.outputs


def all_fp32(node: Node) -> Iterable[Value | None]:
    """For `Operator.keep_fp32`: all inputs and outputs of the node."""
    return [*node.inputs, *node.outputs]
