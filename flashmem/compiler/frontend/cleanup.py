"""Model cleanup with onnx-ir and onnxscript's optimiser: functions inlined, constants folded, shapes inferred."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
from flashmem.compiler.frontend.layers.comparison import DifferentLayersError
from flashmem.compiler.frontend.layers.equal_layers import find_layers
from flashmem.compiler.frontend.layers.lengthening import lengthen
from flashmem.compiler.frontend.layers.shortening import shortened
from flashmem.compiler.frontend.neutral import RemoveNeutralPass
from flashmem.compiler.frontend.scaled_weights import RecogniseDequantizePass
from flashmem.compiler.frontend.sequences import SequencePass
from flashmem.compiler.ir.limits import DEPTH, nodes_of

_ROUNDS = 8 + DEPTH  # one round resolves a branch with a constant condition, the next sees the nodes inside it

_COMMON = 1 << 16  # bytes of a constant whose copies are found: masks and positions, which exporters repeat in each layer

# For data computed at run time these have no static size, and their definitions are endless loops.
_UNSIZED = {"Range"}


class AtOperator:
    """A rewrite rule that is tried only at nodes of the operator with which its pattern ends, because trying takes long."""

    def __init__(self, rule: Any) -> None:
        self._rule = rule
        self._operator = rule._target_pattern.output_node.op_type

    def try_rewrite(self, model: ir.Model, graph: Any, node: ir.Node, **options: Any) -> Any:
        """What the rule makes of `node`, or None."""
        return self._rule.try_rewrite(model, graph, node, **options) if node.op_type == self._operator else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rule, name)


# Rules that move no weight. Fusing normalisation or padding into a convolution would copy its weights; that happens when they
# are packed. No rule changes a value, including NaN.
_RULES = [
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
_REWRITES = rewriter.RewriteRuleSet([AtOperator(rule) for rule in _RULES])  # type: ignore[misc]


def clean_up(proto: onnx.ModelProto, is_native: Callable[[str], bool]) -> ir.Model:
    """The model `proto`, whose inputs have static shapes, in its simplest form; all constants are initializers.

    Operators that ONNX defines by other operators (Attention, RotaryEmbedding, ...) are replaced by their definition unless
    `is_native`. Of many equal layers four are cleaned up, and the others are copies (`compiler.frontend.layers`).
    """
    layers = find_layers(proto)
    if layers is None:
        return _clean_up(proto, is_native)
    try:
        model = _clean_up(shortened(proto, layers), is_native)
    except Exception:  # what is wrong with the model is said of the whole model
        return _clean_up(proto, is_native)
    try:
        lengthen(model, layers, proto)
    except DifferentLayersError:
        return _clean_up(proto, is_native)
    passes.NameFixPass()(model)
    return model


def _clean_up(proto: onnx.ModelProto, is_native: Callable[[str], bool]) -> ir.Model:
    with _quiet():
        names = [output.name for output in proto.graph.output]
        proto = onnx.inliner.inline_local_functions(proto, convert_version=True)
        _seed(proto)
        model = ir.from_proto(proto)
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
                break  # no definition for this operator set
            model = ir.from_proto(proto)
            _simplify(model, is_native)
        _merge_copies(model)
        _separate_outputs(model.graph)
        passes.RemoveUnusedNodesPass()(model)
        _name_outputs(model.graph, names)
        passes.TopologicalSortPass()(model)
        passes.NameFixPass()(model)
        _name_outputs(model.graph, names)  # again: an output may have the name of an input
    return model


def _simplify(model: ir.Model, is_native: Callable[[str], bool]) -> None:
    """Fold, rewrite and resolve control flow until nothing changes. The limit on unrolled nodes bounds the rounds of a loop."""
    control = ControlFlowPass()
    sequences = SequencePass()
    rounds = 0
    _merge_copies(model)
    while rounds < _ROUNDS:
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
        if is_native("DequantizeLinear"):
            RecogniseDequantizePass()(model)  # before folding, while the integers are constants
        changed = FoldPass(is_native)(model).modified
        unrolled = control(model).modified | sequences(model).modified
        changed |= unrolled
        rounds += not unrolled
        changed |= rewriter.RewritePass(_REWRITES)(model).modified
        changed |= RemoveNeutralPass()(model).modified
        nested = next(model.graph.subgraphs(), None) is not None
        if not nested:  # the pass cannot handle a branch that returns a value from outside
            changed |= passes.IdentityEliminationPass()(model).modified
        passes.RemoveUnusedNodesPass()(model)
        if not changed and (control.choose or not nested):
            return
        control.choose = not changed  # last, because folding may still make the condition constant


def _seed(proto: onnx.ModelProto) -> None:
    """Give every Bernoulli without a seed one of its own, in place, because equal nodes are merged, these too."""
    for node in nodes_of(proto.graph.node, Path()):
        if node.op_type == "Bernoulli" and node.domain == "" and not any(each.name == "seed" for each in node.attribute):
            seed = zlib.crc32(node.output[0].encode()) >> 8  # 24 bits, which a float holds
            node.attribute.append(onnx.helper.make_attribute("seed", float(seed)))


def _merge_copies(model: ir.Model) -> None:
    """Merge equal small constants, and nodes that compute the same: a decoder's layers repeat masks and positions."""
    passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    passes.DeduplicateInitializersPass(size_limit=_COMMON)(model)  # first: nodes are common if they read the same constants
    passes.CommonSubexpressionEliminationPass()(model)


def _separate_outputs(graph: ir.Graph) -> None:
    """Make every output of `graph` a separate value that a node computes, also for inputs, constants and repeated outputs."""
    for node in graph:  # an output cannot become an initializer, and other nodes may read it too
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
        made.type = value.type
        made.shape = value.shape
        graph.append(node)
        graph.outputs[index] = made


def _constant(value: ir.Value) -> ir.TensorProtocol | None:
    """The constant data of `value`, through the copies (Identity) that replace equal constants; None if it is not constant."""
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
    """Silence the optimiser's warnings about everything it skips; the importer reports real problems."""
    loggers = [logging.getLogger(name) for name in ("onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
