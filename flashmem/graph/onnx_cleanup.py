"""Cleaning a model up, with onnx-ir and onnxscript's optimiser: functions inlined, constants folded, shapes inferred.

What is folded is decided here, by one rule: a result is computed now if keeping it is cheap. Masks and shape arithmetic
disappear, a slice of a large table shrinks to the part that is used; but no transposed, converted or otherwise plain copy of
a weight is ever made, since a weight must stay where it can be streamed from.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import onnx
import onnx.inliner
import onnx_ir as ir
import onnx_ir.passes.common as passes
from onnxscript import rewriter
from onnxscript.optimizer._constant_folding import FoldConstantsPass
from onnxscript.rewriter.rules import common as rules

from flashmem.graph.onnx_neutral import RemoveNeutralPass
from flashmem.graph.onnx_sizes import set_size

DERIVED_LIMIT = 16 << 20
"""What is computed from weights (a part of one, arithmetic on one) is kept in memory if it has at most this many bytes."""

COMPUTED_LIMIT = 64 << 20
"""A folded result of at most this many bytes is kept if nothing it was computed from lies in a file: masks, position tables."""

_COPIES = {"Cast", "Concat", "Expand", "Flatten", "Identity", "Pad", "Reshape", "Squeeze", "Tile", "Transpose", "Unsqueeze"}

_ROUNDS = 8

# Rules that move no weight: fusing normalisation or padding into a convolution would copy its weights, and is done
# where they are packed. None of them changes a value, NaN included.
_REWRITES = rewriter.RewriteRuleSet(
    [
        rules.no_op_cast_rule,
        rules.no_op_expand_rule,
        rules.no_op_transpose_rule,
        rules.transpose_transpose_rule,
        rules.reshape_reshape_rule,
        rules.unsqueeze_unsqueeze_rule,
        rules.squeeze_reshape_1d_rule,
        rules.collapse_slice_rule,
        rules.collapse_slice2_rule,
        rules.dropout_inference_rule,
        rules.dropout_zero_rule,
        rules.no_op_static_scatter_nd_rule,
        rules.one_reshape_matmul_reshape_rule,
        rules.two_reshapes_matmul_reshape_rule,
    ]
)


def clean_up(proto: onnx.ModelProto, is_native: Callable[[str], bool]) -> ir.Model:
    """The model `proto`, whose inputs have static shapes, in its simplest form; constants all initializers.

    Operators that ONNX defines by other operators (Attention, RotaryEmbedding, ...) are replaced by their definition unless
    `is_native`.
    """
    with _quiet():
        model = ir.from_proto(proto)
        passes.InlinePass()(model)
        _simplify(model)
        wanted = {node.op_type for node in model.graph if _is_onnx(node) and not is_native(node.op_type)}
        defined = sorted(op for op in wanted if _has_definition(op, model.opset_imports.get("", 0)))
        if defined:
            proto = ir.to_proto(model)
            _write_out_defaults(proto, defined)
            proto = onnx.inliner.inline_selected_functions(proto, [("", op) for op in defined], inline_schema_functions=True)
            model = ir.from_proto(proto)
            _simplify(model)
        for last in (passes.CommonSubexpressionEliminationPass(), passes.DeduplicateInitializersPass(), passes.OutputFixPass()):
            last(model)
        passes.RemoveUnusedNodesPass()(model)
        passes.TopologicalSortPass()(model)
        passes.NameFixPass()(model)
        if any(value.shape is None or not value.shape.is_static() for node in model.graph for value in node.outputs):
            passes.ShapeInferencePass(strict_mode=False)(model)
    return model


def _simplify(model: ir.Model) -> None:
    for _ in range(_ROUNDS):
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
        changed = _Folding()(model).modified
        changed |= rewriter.RewritePass(_REWRITES)(model).modified
        changed |= RemoveNeutralPass()(model).modified
        changed |= passes.IdentityEliminationPass()(model).modified
        passes.RemoveUnusedNodesPass()(model)
        if not changed:
            return


class _Folding(FoldConstantsPass):
    """Shape inference and folding, node by node; the sizes that the inference would get wrong are set before it."""

    def __init__(self) -> None:
        super().__init__(shape_inference=True, input_size_limit=0, output_size_limit=COMPUTED_LIMIT, should_fold=_should_fold)

    def visit_node(self, node: ir.Node, root: ir.Graph | ir.Function) -> None:
        set_size(node)
        super().visit_node(node, root)


def _should_fold(node: ir.Node) -> bool:
    """Whether the outputs of `node`, all of whose inputs are constants, are to be computed now."""
    if node.op_type.startswith(("Quantize", "Dequantize", "Resize", "Upsample")):
        return False  # the reference that folds has other sizes and ties than runtimes have
    made = sum(_nbytes(value) for value in node.outputs)
    largest = max((_nbytes(value) for value in node.inputs if value is not None and _is_weight(value)), default=0)
    if largest == 0:
        return made <= COMPUTED_LIMIT
    is_copy = node.op_type in _COPIES and 2 * made > largest
    return made <= DERIVED_LIMIT and not is_copy


def _is_weight(value: ir.Value) -> bool:
    """Whether `value` is in a file and worth streaming; integers and booleans are indices and masks."""
    tensor = value.const_value
    return isinstance(tensor, ir.ExternalTensor) and tensor.dtype.is_floating_point()


def _nbytes(value: ir.Value) -> int:
    if value.shape is None or value.dtype is None or not value.shape.is_static():
        # Unknown before it is computed (Range, NonZero): such results are index lists, and small.
        return 0
    return int(math.prod(value.shape.numpy()) * value.dtype.itemsize)


def _is_onnx(node: ir.Node) -> bool:
    return node.domain in ("", "ai.onnx")


def _has_definition(op: str, opset: int) -> bool:
    try:
        schema = onnx.defs.get_schema(op, opset)
    except onnx.defs.SchemaError:
        return False
    return bool(schema.has_function or schema.has_context_dependent_function)  # type: ignore[attr-defined]


def _write_out_defaults(proto: onnx.ModelProto, ops: Collection[str]) -> None:
    """Give nodes of `ops` the attributes they leave to their schema: ONNX's inliner drops what a definition says of those."""
    opset = next(entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx"))
    for node in proto.graph.node:
        if node.op_type in ops and node.domain in ("", "ai.onnx"):
            given = {attribute.name for attribute in node.attribute}
            schema = onnx.defs.get_schema(node.op_type, opset)
            for name, attribute in schema.attributes.items():
                if name not in given and attribute.default_value.type:
                    node.attribute.append(attribute.default_value)


@contextmanager
def _quiet() -> Iterator[None]:
    """The optimiser warns of everything it leaves alone; what matters is reported by the importer."""
    loggers = [logging.getLogger(name) for name in ("onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
