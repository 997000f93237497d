"""Cleaning a model up, with onnx-ir and onnxscript's optimiser: functions inlined, constants folded, shapes inferred."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import onnx
import onnx.inliner
import onnx_ir as ir
import onnx_ir.passes.common as passes
from onnxscript import rewriter
from onnxscript.rewriter.rules import common as rules

from flashmem.compiler.frontend.control_flow import ControlFlowPass
from flashmem.compiler.frontend.definitions import has_definition, write_out
from flashmem.compiler.frontend.folding import FoldPass
from flashmem.compiler.frontend.gemm import ReshapedGemm
from flashmem.compiler.frontend.neutral import RemoveNeutralPass
from flashmem.compiler.frontend.scaled_weights import RecogniseDequantizePass
from flashmem.compiler.frontend.sequences import SequencePass
from flashmem.compiler.ir.limits import DEPTH

_ROUNDS = 8 + DEPTH  # a branch whose condition is constant is taken in one round, what lies inside it is seen in the next

# Of data computed at run time these have no size, and their definitions are loops without an end.
_UNSIZED = {"Range"}

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
        ReshapedGemm.rule(),  # type: ignore[no-untyped-call]
    ]
)


def clean_up(proto: onnx.ModelProto, is_native: Callable[[str], bool]) -> ir.Model:
    """The model `proto`, whose inputs have static shapes, in its simplest form; constants all initializers.

    Operators that ONNX defines by other operators (Attention, RotaryEmbedding, ...) are replaced by their definition unless
    `is_native`.
    """
    with _quiet():
        names = [output.name for output in proto.graph.output]
        model = ir.from_proto(onnx.inliner.inline_local_functions(proto, convert_version=True))
        _simplify(model, is_native)
        opset = model.opset_imports.get("", 0)
        for _ in range(DEPTH):  # a definition may use operators that have definitions
            wanted = {node.op_type for node in model.graph if _is_onnx(node) and not is_native(node.op_type)} - _UNSIZED
            defined = sorted(op for op in wanted if has_definition(op, opset))
            if not defined:
                break
            proto = ir.to_proto(model)
            count = len(proto.graph.node)
            proto = write_out(proto, defined)
            if len(proto.graph.node) == count:
                break  # none that holds in this operator set
            model = ir.from_proto(proto)
            _simplify(model, is_native)
        passes.CommonSubexpressionEliminationPass()(model)
        passes.DeduplicateInitializersPass()(model)
        _separate_outputs(model.graph)
        passes.RemoveUnusedNodesPass()(model)
        _name_outputs(model.graph, names)
        passes.TopologicalSortPass()(model)
        passes.NameFixPass()(model)
        _name_outputs(model.graph, names)  # once more: an output may have the name of an input
    return model


def _simplify(model: ir.Model, is_native: Callable[[str], bool]) -> None:
    """Fold, rewrite and resolve control flow until nothing changes. Rounds in which a loop goes on are bounded by its limit."""
    control, sequences, rounds = ControlFlowPass(), SequencePass(), 0
    while rounds < _ROUNDS:
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
        if is_native("DequantizeLinear"):
            RecogniseDequantizePass()(model)  # first: the integers are constants
        changed = FoldPass(is_native)(model).modified
        unrolled = control(model).modified | sequences(model).modified
        changed |= unrolled
        rounds += not unrolled
        changed |= rewriter.RewritePass(_REWRITES)(model).modified
        changed |= RemoveNeutralPass()(model).modified
        nested = next(model.graph.subgraphs(), None) is not None
        if not nested:  # the pass cannot let a branch give a value from outside
            changed |= passes.IdentityEliminationPass()(model).modified
        passes.RemoveUnusedNodesPass()(model)
        if not changed and (control.choose or not nested):
            return
        control.choose = not changed  # last of all: the condition may still turn out to be constant


def _separate_outputs(graph: ir.Graph) -> None:
    """Make every output of `graph` a value of its own, which a node computes: inputs, constants and repeated ones too."""
    for node in graph:  # what was an output could not become an initializer, and others may read it too
        if node.op_type == "Constant" and node.outputs[0].const_value is not None:
            node.attributes.clear()
            node.attributes.add(ir.AttrTensor("value", node.outputs[0].const_value))
    seen: set[ir.Value] = set()
    for index, value in enumerate(graph.outputs):
        constant = _constant(value)
        if constant is not None:
            node = ir.node("Constant", [], {"value": constant})
        elif value.is_graph_input() or value in seen:
            node = ir.node("Identity", [value])
        else:
            seen.add(value)
            continue
        (made,) = node.outputs
        made.type, made.shape = value.type, value.shape
        graph.append(node)
        graph.outputs[index] = made


def _constant(value: ir.Value) -> ir.TensorProtocol | None:
    """What `value` is, if it is constant; equal ones have become copies of one."""
    producer = value.producer()
    while producer is not None and producer.op_type == "Identity" and producer.inputs[0] is not None:
        value = producer.inputs[0]
        producer = value.producer()
    return value.const_value


def _name_outputs(graph: ir.Graph, names: Sequence[str]) -> None:
    for value, name in zip(graph.outputs, names, strict=True):
        value.name = name


def _is_onnx(node: ir.Node) -> bool:
    return node.domain in ("", "ai.onnx")


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
