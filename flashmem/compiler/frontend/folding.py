"""Strict type and shape inference, and constant folding within limits, in one walk over the model.

The walk is onnxscript's, which visits every node after its inputs. Before a node is folded, ONNX's own rules infer its types
and shape from everything known so far, including small constants. A contradiction of those rules is refused, and so is a tensor
beyond the limits, before anything of that size is made.

One rule decides which results are folded: a result is computed now if it is cheap to keep. Masks and shape arithmetic
disappear, and a slice of a large table shrinks to the used part. But a weight is never transposed, converted or otherwise
copied, since it must stay in its file to be streamed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx.checker import ValidationError
from onnx.shape_inference import InferenceError, infer_node_outputs

from flashmem.base.errors import UserError
from flashmem.compiler.frontend import contrib, moving_slices
from flashmem.compiler.frontend.contrib.packed import is_in_file
from flashmem.compiler.frontend.definitions import write_out
from flashmem.compiler.frontend.editing import REASON, fit, graph_of
from flashmem.compiler.frontend.onnxscript_folding import FoldConstantsPass, FoldConstantsResult, Replacement
from flashmem.compiler.frontend.selected_rows import Known, follow
from flashmem.compiler.frontend.sequences import SEQUENCES
from flashmem.compiler.frontend.sizes import set_size
from flashmem.compiler.frontend.validation import printable
from flashmem.compiler.ir.limits import CONSTANTS, ELEMENTS, FOLDED, RANK, TABLE

DERIVED_LIMIT = 16 << 20
"""A result computed from weights (a part of one, arithmetic on one) is kept in memory if it has at most this many bytes."""

COMPUTED_LIMIT = 64 << 20
"""A folded result of at most this many bytes is kept if none of its inputs is in a file: masks, position tables."""

_COPIES = {"Cast", "Concat", "Expand", "Flatten", "Identity", "Pad", "Reshape", "Squeeze", "Tile", "Transpose", "Unsqueeze"}

# Operators whose reference implementation visits elements one by one in Python, and the most elements it may visit.
_LOOPS = {"AffineGrid", "AveragePool", "Col2Im", "Conv", "ConvInteger", "ConvTranspose", "DeformConv", "GRU", "GatherElements"}
_LOOPS |= {"GatherND", "GridSample", "LRN", "LSTM", "LpPool", "MaxPool", "MaxRoiPool", "MaxUnpool", "RNN"}
_LOOPS |= {"ReverseSequence", "RoiAlign", "STFT", "ScatterElements", "ScatterND"}
_LOOP_LIMIT = 1 << 16

_CONTRACTIONS = {"Einsum", "Gemm", "MatMul", "MatMulInteger"}
_PRODUCTS_LIMIT = 1 << 32

# Random operators, quantisation, and operators whose reference computes other sizes and ties than runtimes do.
_NEVER = {"Bernoulli", "DequantizeLinear", "DynamicQuantizeLinear", "QLinearConv", "QLinearMatMul", "QuantizeLinear", "Resize"}
_NEVER |= {
    "Multinomial",
    "NonMaxSuppression",
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
    "Upsample",
}

# Lengths that depend on data, never larger than the input.
_SELECTIONS = {"Compress", "NonZero", "Unique"}

# Operators through which onnxscript follows the numbers of shapes, and the most numbers that it may have to follow.
_FOLLOWED = {"Abs", "Add", "Cast", "Gather", "Identity", "Reshape", "Squeeze", "Unsqueeze"}
_JOINED = 1 << 20

# The index of the input that is a shape: its length is the rank of the output.
_SHAPE_INPUT = {"AffineGrid": 1, "CenterCropPad": 1, "ConstantOfShape": 0, "Expand": 1, "MaxUnpool": 2, "Reshape": 1}
_SHAPE_INPUT |= {"Resize": 3, "Tile": 1}

_KNOWN_INTEGERS = 1024
_KNOWN_OTHERS = 20  # the most elements of a constant that inference reads

_NARROW = {ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
_EXACT = _COPIES | {"Abs", "Equal", "Gather", "Greater", "Less", "Neg", "Not", "Shape", "Size", "Slice", "Split", "Where"}

_GRAPHS = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
_PLAIN = tuple(ir.AttributeType[name] for name in ("INT", "FLOAT", "STRING", "INTS", "FLOATS", "STRINGS"))
"""Types of attributes that can be compared."""


class FoldPass(FoldConstantsPass):
    """Infers every node strictly, then folds it if all its inputs are constants, it is cheap to keep and fast to compute.

    Raises UserError (possibly as the cause of another error) for a node that contradicts ONNX's rules or exceeds a limit; its
    text does not name the file.
    """

    def __init__(self, is_native: Callable[[str], bool]) -> None:
        super().__init__(shape_inference=False, input_size_limit=0, output_size_limit=COMPUTED_LIMIT, should_fold=self._folds)
        self.is_native = is_native
        self.made = 0
        self.counted = 0

    def call(self, model: ir.Model) -> FoldConstantsResult:
        """Walk over the model once."""
        self.model = model
        self.opset_imports = dict(model.opset_imports)
        self.made = self.counted = 0
        self.selected: Known = {}
        for value in (value for graph in model.graphs() for value in graph.initializers.values()):
            if value.const_value is not None:  # its declaration as an output may contradict this
                value.shape, value.type = ir.Shape(value.const_value.shape.numpy()), ir.TensorType(value.const_value.dtype)
                check_size(value)
        for value in model.graph.inputs:
            check_size(value)
        check_concatenations(model.graph)
        return super().call(model)

    def process_node(self, node: ir.Node, is_function: bool) -> Replacement | None:
        """The replacement of `node`, or None."""
        opset = self.opset_imports.get("", 0)
        expansion = contrib.expand(node, opset) or moving_slices.expand(node, opset)
        if expansion is not None:  # the walk visits the new nodes next
            return Replacement(*expansion)
        if node.op_type == "Constant":  # Constants that onnxscript makes may be of a newer operator set
            if len(node.attributes) != 1:
                raise UserError(f"{describe(node)} needs one value, but has {len(node.attributes)}")
        elif not any(attribute.type in _GRAPHS for attribute in node.attributes.values()):
            try:
                infer(node, self.opset_imports)
            except UserError:
                if node.graph is self.model.graph:
                    raise
                return None  # an If does not select a branch for another shape; a selected branch returns in the main graph
        if node.op_type == "If":
            for name in ("then_branch", "else_branch"):
                fit(node, len(graph_of(node, name).outputs) == len(node.outputs))
        if (reason := follow(node, self.selected)) is not None:
            node.meta[REASON] = reason
            return None
        if node.op_type in SEQUENCES:  # onnxscript rewrites them in operators of a newer set
            return None
        replacement = super().process_node(node, is_function)
        if replacement is None and len(node.outputs) > 1:
            replacement = self._several(node)
        return None if replacement is None or _contradicts(node, replacement) else replacement

    def _several(self, node: ir.Node) -> Replacement | None:
        """The constants of a Split of a constant; onnxscript folds only operators with one output."""
        known = [value.const_value for value in node.inputs if value is not None]
        if node.op_type != "Split" or None in known or not self._folds(node) or node.graph is None:
            return None
        axis = node.attributes.get_int("axis", 0) or 0
        sizes = [value.shape.numpy()[axis] for value in node.outputs if value.shape is not None]
        parts = np.split(_data(node.inputs[0]), np.cumsum(sizes)[:-1], axis)  # type: ignore[arg-type]
        nodes = [ir.node("Constant", [], {"value": ir.tensor(np.ascontiguousarray(part))}) for part in parts]
        for inner, old in zip(nodes, node.outputs, strict=True):
            (made,) = inner.outputs
            made.name = old.name
            made.type = old.type
            made.shape = old.shape
            made.const_value = inner.attributes["value"].as_tensor()
        return Replacement([inner.outputs[0] for inner in nodes], nodes)

    def _folds(self, node: ir.Node) -> bool:
        """Whether to compute the outputs of `node` now; all its inputs are constants."""
        if node.op_type in _NEVER or not _is_quick(node) or (self.is_native(node.op_type) and _is_inexact(node)):
            return False
        made = sum(map(_nbytes, node.outputs))
        if any(value.shape is None or not value.shape.is_static() for value in node.outputs):
            if node.op_type not in _SELECTIONS:
                return False
            made = 8 * sum(len(value.shape or ()) * _size(value) for value in node.inputs if value is not None)
        largest = max((_nbytes(value) for value in node.inputs if value is not None and _is_weight(value)), default=0)
        if largest == 0:
            if made > COMPUTED_LIMIT and not self.is_native(node.op_type):
                raise UserError(f"{describe(node)} makes a constant of {made} bytes, but at most {COMPUTED_LIMIT} are folded")
            folds = made <= COMPUTED_LIMIT
        else:
            is_copy = node.op_type in _COPIES and 2 * made > largest
            folds = made <= DERIVED_LIMIT and not is_copy
        if not folds or _overflows(node):
            return False
        self._count(made)
        return True

    def _count(self, made: int) -> None:
        """Count `made` bytes of computed constants. Raises UserError if too many are kept, or were computed in all."""
        self.made += made
        if self.made > FOLDED:
            raise UserError(f"the model computes more than {FOLDED} bytes of constants, the most that are folded")
        if self.made - self.counted < CONSTANTS // 8:
            return
        self.counted = self.made
        tensors = (value.const_value for graph in self.model.graphs() for value in graph.initializers.values())
        kept = sum(tensor.nbytes for tensor in tensors if tensor is not None and not is_in_file(tensor))
        if kept > CONSTANTS:
            raise UserError(f"the constants that the model computes take more than {CONSTANTS} bytes, the most that are kept")


def _contradicts(node: ir.Node, replacement: Replacement) -> bool:
    """Whether a computed constant has another type or shape than its output: an error of ONNX's reference."""
    for old, new in zip(node.outputs, replacement.new_outputs, strict=False):
        tensor = new.const_value
        if tensor is None or old.shape is None or not old.shape.is_static():
            continue
        if tuple(tensor.shape.numpy()) != tuple(old.shape.numpy()) or (old.dtype is not None and tensor.dtype != old.dtype):
            return True
    return False


def _is_inexact(node: ir.Node) -> bool:
    """Whether ONNX's reference computes other numbers than runtimes: flashmem's own kernel is better."""
    first = node.inputs[0] if node.inputs else None
    if node.op_type == "LRN":  # the reference of onnx 1.23 computes as many channels as the batch has
        return True
    if first is not None and first.dtype in _NARROW and node.op_type not in _EXACT:
        return True  # the reference rounds after every step; kernels compute in float32
    if node.op_type.startswith("Reduce") and node.op_type not in ("ReduceMax", "ReduceMin"):
        return first is None or first.dtype is None or first.dtype.is_floating_point()
    if node.op_type in ("ArgMax", "ArgMin", "TopK"):  # the reference chooses NaN in ArgMax and ArgMin
        return first is None or first.dtype is None or first.dtype.is_floating_point()
    if node.op_type == "Slice":
        return _starts_before_the_first(node)
    if node.op_type == "Pad":
        return node.attributes.get_string("mode", "constant") != "constant"
    return "Pool" in node.op_type or node.op_type.startswith("Conv") or "Norm" in node.op_type


def _overflows(node: ir.Node) -> bool:
    """Whether a Cast of constants meets floats that its integers cannot hold: numpy's results depend on the processor."""
    first = node.inputs[0] if node.inputs else None
    kind = node.outputs[0].dtype
    if node.op_type not in ("Cast", "CastLike") or first is None or first.dtype is None or kind is None:
        return False
    if not first.dtype.is_floating_point() or not kind.is_integer():
        return False
    data = _data(first).astype(np.float64)
    return not bool(((data > float(kind.min) - 1) & (data < float(kind.max) + 1)).all())


def _starts_before_the_first(node: ir.Node) -> bool:
    """Whether a Slice walks backwards from before the first element: ONNX clamps to it, its reference returns nothing."""
    data, starts, _, axes, steps = [*node.inputs, *[None] * 4][:5]  # before opset 10, all but the data are attributes
    if data is None or data.shape is None or starts is None or steps is None:
        return False
    sizes = np.asarray(data.shape.numpy())[slice(None) if axes is None else _data(axes)]
    return any(start < -size and step < 0 for start, size, step in zip(_data(starts), sizes, _data(steps), strict=False))


def _data(value: ir.Value) -> NDArray[Any]:
    return np.asarray([]) if value.const_value is None else value.const_value.numpy()


def infer(node: ir.Node, opset_imports: dict[str, int]) -> None:
    """Set the types and shapes of the outputs of `node` by ONNX's rules, as far as its inputs are known.

    Raises UserError for a node that contradicts them, and for tensors beyond the limits.
    """
    inputs = [value for value in node.inputs if value is not None]
    if any(value.type is None for value in inputs) or not onnx.defs.has(node.op_type, node.domain):
        return
    _check_shape_input(node)
    _check_split(node)
    _check_axes(node)
    try:
        types = _inferred(node, opset_imports)
    except (InferenceError, ValidationError) as error:
        raise UserError(f"{describe(node)}: {printable(_reason(error))}") from None
    for value in node.outputs:
        if value.name in types:
            _refine(value, types[value.name], node)
    try:
        set_size(node)
    except (ArithmeticError, IndexError, ValueError) as error:
        raise UserError(f"{describe(node)}: its attributes do not fit its input ({error})") from None
    for value in node.outputs:
        check_size(value)
    if node.op_type == "Resize" or (node.op_type == "Pad" and node.attributes.get_string("mode", "constant") != "constant"):
        _check_table(node)


def check_size(value: ir.Value) -> None:
    """Raise UserError if `value` has too many dimensions or, unless it is a weight, too many elements."""
    if value.shape is None:
        return
    if any(isinstance(size, int) and size < 0 for size in value.shape):
        raise UserError(f"{value.name!r} has a negative size: {list(value.shape)}")
    if len(value.shape) > RANK:
        raise UserError(f"{value.name!r} has {len(value.shape)} dimensions, but at most {RANK} are supported")
    if value.const_value is None and value.shape.is_static() and _size(value) > ELEMENTS:
        raise UserError(f"{value.name!r} has {_size(value)} elements, but at most {ELEMENTS} are supported")


def check_concatenations(graph: ir.Graph) -> None:
    """Raise UserError if shape arithmetic joins more numbers than any shape has, because the walk follows each of them."""
    lengths: dict[ir.Value, int] = {}
    for node in graph.all_nodes():
        known = [lengths.get(value, _known_length(value)) for value in node.inputs if value is not None]
        if node.op_type == "Concat":
            length = sum(known)
        elif node.op_type in _FOLLOWED:
            length = max(known, default=0)
        else:
            length = RANK if node.op_type == "Shape" else 0
        if length > _JOINED:
            raise UserError(f"{describe(node)} joins {length} numbers of shapes, but at most {_JOINED} are followed")
        lengths.update(dict.fromkeys(node.outputs, length))


def _known_length(value: ir.Value) -> int:
    tensor = value.const_value
    return tensor.size if tensor is not None and tensor.dtype == ir.DataType.INT64 and tensor.size <= RANK else 0


def describe(node: ir.Node) -> str:
    """The name of `node` in errors."""
    return f"{printable(node.op_type)} node {(node.name or '')!r}"


_FOUND: dict[Hashable, dict[int, onnx.TypeProto]] = {}
"""Inferred types of outputs, by their index, of what `_question` describes: a network repeats its layers, in each variant."""

_MOST_FOUND = 4096


def _inferred(node: ir.Node, opset_imports: dict[str, int]) -> dict[str, onnx.TypeProto]:
    """The types of the outputs of `node`, by name."""
    question = _question(node, opset_imports)
    if question is None:
        return _infer_anew(node, opset_imports)
    if question not in _FOUND:
        if len(_FOUND) >= _MOST_FOUND:
            _FOUND.clear()
        types = _infer_anew(node, opset_imports)
        _FOUND[question] = {at: types[value.name] for at, value in enumerate(node.outputs) if value.name in types}
    return {str(node.outputs[at].name): kind for at, kind in _FOUND[question].items()}


def _question(node: ir.Node, opset_imports: Mapping[str, int]) -> Hashable | None:
    """All on which the types of a node's outputs depend; None if an attribute is neither a number nor a text."""
    attributes = []
    for name, attribute in sorted(node.attributes.items()):
        if attribute.type not in _PLAIN:
            return None
        value = attribute.value
        attributes.append((name, attribute.type, tuple(value) if isinstance(value, list | tuple) else value))
    inputs: list[Hashable] = []
    for value in node.inputs:
        known = None if value is None or not _is_known(value) else value.const_value
        data = None if known is None else (known.dtype, tuple(known.shape.numpy()), known.numpy().tobytes())
        shape = None if value is None or value.shape is None else tuple(map(str, value.shape))
        inputs.append(None if value is None else (repr(value.type), shape, data))
    outputs = tuple(bool(value.name) for value in node.outputs)
    versions = tuple(sorted(opset_imports.items()))
    return node.domain, node.op_type, versions, tuple(attributes), tuple(inputs), outputs


def _infer_anew(node: ir.Node, opset_imports: dict[str, int]) -> dict[str, onnx.TypeProto]:
    schema = _schema(node, opset_imports[node.domain])
    proto = ir.serde.serialize_node(node)
    if node.op_type == "DequantizeLinear":  # minima, which contrib operators add, are beyond ONNX's schema
        del proto.input[len(schema.inputs) :]
    types = {str(value.name): _type_proto(value) for value in node.inputs if value is not None}
    if node.op_type == "Range":  # runtimes accept a tensor of one element as a number, and ONNX's own definitions use it
        for kind in types.values():
            if [dim.dim_value for dim in kind.tensor_type.shape.dim] == [1]:
                del kind.tensor_type.shape.dim[:]
    imports = [onnx.helper.make_opsetid(*entry) for entry in opset_imports.items()]
    if schema.has_type_and_shape_inference_function:
        known = [value for value in node.inputs if value is not None]
        data = {str(value.name): tensor for value in known if (tensor := _known_data(value)) is not None}
        for tensor in data.values() if node.op_type == "Range" else ():
            del tensor.dims[:]
        return infer_node_outputs(schema, proto, types, data, opset_imports=imports)
    defined = schema.has_function or schema.has_context_dependent_function  # type: ignore[attr-defined]
    return _by_definition(proto, types, imports) if defined else {}


def _schema(node: ir.Node, opset: int) -> onnx.defs.OpSchema:
    """The schema of `node`. Replacements of ONNX Runtime's operators may be newer than the model: the first that fits."""
    for version in range(opset, onnx.defs.onnx_opset_version() + 1):
        try:
            schema = onnx.defs.get_schema(node.op_type, version, node.domain)
        except onnx.defs.SchemaError:
            continue
        if node.attributes.keys() <= schema.attributes.keys():
            return schema
    return onnx.defs.get_schema(node.op_type, opset, node.domain)


def _by_definition(
    node: onnx.NodeProto, types: dict[str, onnx.TypeProto], imports: list[onnx.OperatorSetIdProto]
) -> dict[str, onnx.TypeProto]:
    """Output types of an operator that ONNX defines by other operators (GroupNormalization, MeanVarianceNormalization)."""
    inputs = [onnx.helper.make_value_info(name, kind) for name, kind in types.items()]
    outputs = [onnx.helper.make_empty_tensor_value_info(name) for name in node.output if name]
    proto = onnx.helper.make_model(onnx.helper.make_graph([node], "g", inputs, outputs), opset_imports=imports)
    proto = write_out(proto, [node.op_type])
    inferred = onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True, data_prop=True)
    return {value.name: value.type for value in inferred.graph.output}


def _type_proto(value: ir.Value) -> onnx.TypeProto:
    assert value.type is not None
    proto = ir.serde.serialize_type(value.type)
    if value.shape is not None:
        ir.serde.serialize_shape_into(proto, value.shape)
    return proto


def _known_data(value: ir.Value) -> onnx.TensorProto | None:
    """The data of a small constant, which may determine a shape."""
    tensor = value.const_value
    return ir.serde.serialize_tensor(tensor) if tensor is not None and _is_known(value) else None


def _is_known(value: ir.Value) -> bool:
    """Whether `value` is a small constant."""
    tensor = value.const_value
    if tensor is None or tensor.dtype == ir.DataType.STRING:
        return False
    return tensor.size <= (_KNOWN_INTEGERS if tensor.dtype.is_integer() else _KNOWN_OTHERS)


def _refine(value: ir.Value, inferred: onnx.TypeProto, node: ir.Node) -> None:
    """Set the inferred type of `value`, an output of `node`, and its shape if it is known."""
    kind = ir.serde.deserialize_type_proto_for_type(inferred)
    if kind is None:
        return
    if value.type is not None and value.type != kind and value.is_graph_output():
        raise UserError(f"output {value.name!r} is declared as {_name(value.type)}, but {describe(node)} makes {_name(kind)}")
    value.type = kind
    shape = ir.serde.deserialize_type_proto_for_shape(inferred)
    if shape is None:
        return
    known = value.shape
    if known is not None and len(known) == len(shape):
        shape = ir.Shape(new if isinstance(new, int) else old for new, old in zip(shape, known, strict=True))
    value.shape = shape


def _name(kind: ir.TypeProtocol) -> str:
    return str(kind.dtype.name).lower() if isinstance(kind, ir.TensorType) else str(kind)


def _check_shape_input(node: ir.Node) -> None:
    index = _SHAPE_INPUT.get(node.op_type)
    value = node.inputs[index] if index is not None and index < len(node.inputs) else None
    length = value.shape[0] if value is not None and value.shape is not None and len(value.shape) == 1 else 0
    if isinstance(length, int) and length > RANK:
        raise UserError(f"{describe(node)} makes a tensor of {length} dimensions, but at most {RANK} are supported")


def _check_split(node: ir.Node) -> None:
    """Check `num_outputs` of a Split, because inference trusts it."""
    parts = node.attributes.get("num_outputs")
    if node.op_type == "Split" and parts is not None and parts.value != len(node.outputs):
        raise UserError(f"{describe(node)} has {len(node.outputs)} outputs, but its num_outputs is {parts.value}")


def _check_axes(node: ir.Node) -> None:
    """Check axes, because inference uses them before it checks them, and onnx aborts the process if they are out of range."""
    value = node.inputs[0] if node.inputs else None
    rank = RANK if value is None or value.shape is None else len(value.shape)
    for name in ("axis", "axes"):
        attribute = node.attributes.get(name)
        if attribute is None or attribute.type not in (ir.AttributeType.INT, ir.AttributeType.INTS):
            continue
        axes = [attribute.value] if attribute.type == ir.AttributeType.INT else list(attribute.value)
        more = len(axes) if node.op_type == "Unsqueeze" else 0
        lowest = -rank - more - (node.op_type == "OneHot")
        for axis in axes:
            if not lowest <= axis <= rank + more:
                raise UserError(f"{describe(node)} has {name} {axis}, but its input has {rank} dimensions")


def _check_table(node: ir.Node) -> None:
    """Raise UserError for an axis that is too long for a table of its positions."""
    shape = node.outputs[0].shape
    largest = max((size for size in shape or () if isinstance(size, int)), default=0)
    if largest > TABLE:
        raise UserError(f"{describe(node)} makes an axis of {largest} elements, but at most {TABLE} are supported")


def _is_quick(node: ir.Node) -> bool:
    """Whether the reference implementation of `node` is fast enough."""
    read = [_size(value) for value in node.inputs if value is not None]
    made = [_size(value) for value in node.outputs]
    if node.op_type in _CONTRACTIONS:
        return math.prod(read) <= _PRODUCTS_LIMIT
    return node.op_type not in _LOOPS or sum(read) + sum(made) <= _LOOP_LIMIT


def _is_weight(value: ir.Value) -> bool:
    """Whether `value` is in a file and worth streaming; integers and booleans are indices and masks."""
    tensor = value.const_value
    return tensor is not None and is_in_file(tensor) and tensor.dtype.is_floating_point()


def _size(value: ir.Value) -> int:
    """Number of elements of `value`, or 0 if it is unknown."""
    if value.shape is None or not value.shape.is_static():
        return 0
    return math.prod(value.shape.numpy())


def _nbytes(value: ir.Value) -> int:
    return 0 if value.dtype is None else int(_size(value) * value.dtype.itemsize)


def _reason(error: Exception) -> str:
    """onnx's error message, in one line."""
    return re.sub(r"\[(Type|Shape)InferenceError\] |Inference error\(s\): ", "", " ".join(str(error).split()))
