"""Import of an ONNX file as a `Graph`: opened without reading weights, shapes bound, constants folded, types converted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from flashmem.base.errors import DefectError, UnsupportedModelError, UserError, defect
from flashmem.base.types import DType, States
from flashmem.compiler.frontend import contrib
from flashmem.compiler.frontend.cleanup import clean_up
from flashmem.compiler.frontend.contrib.packed import BlocksTensor
from flashmem.compiler.frontend.editing import REASON
from flashmem.compiler.frontend.external_data import embed_small, resolve_external_data
from flashmem.compiler.frontend.fixed_inputs import fix_inputs
from flashmem.compiler.frontend.function_attributes import bind_attributes
from flashmem.compiler.frontend.language.model import Rewrite, unchanged
from flashmem.compiler.frontend.mapped_file import LARGE, load_mapped
from flashmem.compiler.frontend.selected_rows import Known, follow
from flashmem.compiler.frontend.shapes import bind_shapes
from flashmem.compiler.frontend.states import named_states, with_states
from flashmem.compiler.frontend.validation import check_structure, printable, tidy
from flashmem.compiler.ir.blocks.constant import BlockConstant
from flashmem.compiler.ir.graph import ArrayConstant, Constant, FileConstant, Graph, GraphPort, NibbleConstant, Node, Value
from flashmem.compiler.ir.limits import check_size, nodes_of
from flashmem.compiler.kernels.selection.operators import SHAPED_BY_DATA
from flashmem.compiler.operators import is_native
from flashmem.compiler.operators.quantization import linear_constant
from flashmem.compiler.operators.registry import NEWEST_OPSET

OPSETS = range(7, min(NEWEST_OPSET, onnx.defs.onnx_opset_version()) + 1)
"""Supported versions of the ONNX operator set, limited to those of the installed onnx."""

NAMED = 3
REASONS = 6
"""The most nodes of a reason, and the most reasons, that a message has. `UnsupportedModelError.nodes` has all."""

Supported = Callable[[Node], str | None]
"""Returns the reason why a node cannot run, or None if it can."""

_DTYPES: dict[ir.DataType, DType] = {
    ir.DataType.FLOAT: "float32",
    ir.DataType.FLOAT16: "float32",
    ir.DataType.BFLOAT16: "float32",
    ir.DataType.DOUBLE: "float32",
    ir.DataType.BOOL: "bool",
    ir.DataType.INT8: "int8",
    ir.DataType.INT16: "int16",
    ir.DataType.INT32: "int32",
    ir.DataType.INT64: "int64",
    ir.DataType.UINT8: "uint8",
    ir.DataType.UINT16: "uint16",
    ir.DataType.UINT32: "uint32",
    ir.DataType.UINT64: "uint64",
}

_FOLDED = {"ConstantOfShape", "Range"}
"""Operators that run only as constants, when their inputs are known."""

_NIBBLES: dict[ir.DataType, DType] = {ir.DataType.INT4: "int8", ir.DataType.UINT4: "uint8"}
"""Element types of constants only, and the types they are read as."""


def import_model(
    path: str | Path,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    supported: Supported | None = None,
    states: States | None = None,
    constants: Mapping[str, Any] | None = None,
    rewrite: Rewrite = unchanged,
) -> Graph:
    """Import the model at `path` with every shape static, in execution order; weights stay in their files.

    `shapes` gives sizes to open dimensions: input name to shape. If some operators prevent the import, `supported` checks the
    others too, so that one error has them all. `states` pairs inputs and outputs (`flashmem.compiler.frontend.states`), and
    `constants` fixes inputs (`flashmem.compiler.frontend.fixed_inputs`). `rewrite` changes the model before shapes are bound.

    Raises MissingFileError for a missing model or data file, UnsupportedModelError for operators, UserError for every other
    problem of the file, the shapes or the states.
    """
    path = Path(path)
    proto = load_mapped(path)
    tidy(proto, path)
    contrib.mark(proto)
    _check_opset(proto, path)
    check_size(proto, path)
    if proto.graph.sparse_initializer:
        raise UserError(f"{path} has sparse weights, which are not supported: export it with dense ones")
    resolve_external_data(proto, path)
    embed_small(proto, path, LARGE)
    check_structure(proto, path)
    bind_attributes(proto, path)
    rewrite(proto)
    bind_shapes(proto, fix_inputs(proto, constants or {}, shapes or {}, path), path)
    inputs, outputs = ([value.name for value in values] for values in (proto.graph.input, proto.graph.output))
    pairs = () if states is None else named_states(inputs, outputs, states)
    contrib.mark_states(proto, [past for past, _ in pairs])
    try:
        model = clean_up(proto, is_native)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except (MemoryError, OSError):
        raise
    except Exception as error:
        raise _blamed(error, proto, path) from error
    return with_states(_Importer(model, path, supported).graph(), pairs)


def collect_unsupported(graph: Graph, supported: Supported) -> None:
    """Raise one UnsupportedModelError for all nodes of `graph` for which `supported` returns a reason."""
    _refuse([(node.name, reason) for node in graph.nodes if (reason := supported(node)) is not None])


def _refuse(offenders: list[tuple[str, str]]) -> None:
    if not offenders:
        return
    by_reason: dict[str, list[str]] = {}
    for name, reason in offenders:
        by_reason.setdefault(reason, []).append(_printable(name))
    listed = _cut([f"{reason} ({_cut(names, NAMED, ', ')})" for reason, names in by_reason.items()], REASONS, "; ")
    count = "1 node" if len(offenders) == 1 else f"{len(offenders)} nodes"
    raise UnsupportedModelError(f"the model has {count} that flashmem cannot run: {listed}", tuple(offenders))


def _cut(texts: Sequence[str], most: int, separator: str) -> str:
    """The first `most` of `texts`, and how many more there are."""
    more = len(texts) - most
    return separator.join([*texts[:most], *([f"{more} more"] if more > 0 else [])])


def _check_opset(model: onnx.ModelProto, path: Path) -> None:
    """Raise UserError for unsupported operator sets. A model that only calls functions gets the newest set of these."""
    versions = {opset.version for opset in model.opset_import if opset.domain == ""}
    inner = {opset.version for function in model.functions for opset in function.opset_import if opset.domain == ""}
    if not versions:
        if any(node.domain == "" for node in nodes_of(model.graph.node, path)):
            raise UserError(f"{path} does not say which version of the ONNX operator set it uses")
        model.opset_import.append(onnx.helper.make_opsetid("", max(inner, default=OPSETS[-1])))
    for version in sorted(versions | inner):
        if version not in OPSETS:
            older = "export it again, or convert it with onnx.version_converter"
            newer = f"install a newer onnx than {onnx.__version__}"
            raise UserError(
                f"{path} uses ONNX operator set {version}, but {OPSETS[0]} to {OPSETS[-1]} are supported: "
                f"{newer if OPSETS[-1] < version <= NEWEST_OPSET else older}"
            )


def _blamed(error: Exception, model: onnx.ModelProto, path: Path) -> UserError | DefectError:
    """The error to raise for `error`, which ended the cleanup of `model`.

    For an invalid model, the libraries raise any kind of error. But only ONNX's own rules say that a model is invalid; if they
    do not, flashmem is at fault.
    """
    if isinstance(cause := _innermost(error), UserError):
        return UserError(f"{path}: {cause}")
    try:
        onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    except Exception as denied:
        return UserError(f"{path} is not a valid ONNX model: {printable(shorten(str(denied), 300, placeholder=' ...'))}")
    return defect(f"reading {path}", error)


def _innermost(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


class _Importer:
    """Converts a cleaned-up onnx-ir model to a `Graph`."""

    def __init__(self, model: ir.Model, path: Path, supported: Supported | None) -> None:
        self.model = model
        self.path = path
        self.supported = supported
        self.values: dict[ir.Value, Value] = {}
        self.shapeless: set[ir.Value] = set()
        self.arrays: dict[tuple[str, tuple[int, ...], bytes], Value] = {}
        self.names: Counter[str] = Counter()
        self.widened: set[str] = set()
        self.selected: Known = {}
        self.counts: dict[ir.Value, Value] = {}  # of the boxes that a NonMaxSuppression selects

    def graph(self) -> Graph:
        source = self.model.graph
        inputs = [self._port(value) for value in source.inputs]
        used = {value for node in source for value in node.inputs if value is not None} | set(source.outputs)
        for value in source.initializers.values():
            if value in used:
                self._constant(value)
        nodes: list[Node] = []
        offenders: list[tuple[str, str]] = []
        followers: list[tuple[str, str]] = []  # refused only because another node is
        for node in source:
            if node.op_type == "Constant" and not node.inputs:  # an output of the model
                (output,) = node.outputs
                output.const_value = node.attributes["value"].as_tensor()
                self._constant(output)
                continue
            made, reason, is_shaped = self._node(node)
            if reason is None:
                reason = follow(node, self.selected)
            if made.op == "NonMaxSuppression":
                count = Value(f"{made.outputs[0].name}.count", (1,), "int32")
                made.attributes["count"] = self.counts[node.outputs[0]] = count
            # If the inputs of a node have no shape, only an unknown operator can be reported, unless it would be folded.
            is_judged = is_shaped or not (is_native(made.op) or made.op in _FOLDED)
            if reason is None and self.supported is not None and is_judged:
                reason = self.supported(made)
            if reason is None and node.inputs and (folded := linear_constant(made, self._bits(node))) is not None:
                self.values[node.outputs[0]] = folded
                continue
            if reason is not None:
                (followers if not is_shaped and reason.endswith(contrib.WITHOUT_SHAPES) else offenders).append(
                    (made.name, reason)
                )
            nodes.append(made)
        if self.shapeless or any(_never(node) for node in source):
            _refuse(offenders or followers)
        if self.shapeless:
            names = _cut(sorted(_printable(str(value.name)) for value in self.shapeless), NAMED, ", ")
            raise UserError(f"{self.path}: no static shape can be inferred for {names}")
        outputs = [self._port(value) for value in source.outputs]
        opset = self.model.opset_imports.get("", OPSETS[-1])
        widened = tuple(sorted(self.widened))
        return Graph(source.name or self.path.stem, inputs, outputs, nodes, opset, widened)

    def _port(self, value: ir.Value) -> GraphPort:
        made = self._value(value)
        if value in self.shapeless:
            raise UserError(f"{self.path}: no static shape can be inferred for {value.name}")
        assert value.name is not None and value.dtype is not None
        rows = self.selected.get(value) if made.size else None
        count = None if rows is None else (rows.axis, self.counts[rows.of])
        return GraphPort(value.name, np.dtype(value.dtype.numpy()).name, made, count)

    def _value(self, value: ir.Value) -> Value:
        known = self.values.get(value)
        if known is not None:
            return known
        shape: tuple[int, ...] = ()
        if value.shape is not None and value.shape.is_static():
            shape = tuple(value.shape.numpy())
        elif value.name:  # without a name it is an unused optional output
            self.shapeless.add(value)
        made = self.values[value] = Value(value.name or "", shape, self._dtype(value) if value.name else "float32")
        return made

    def _dtype(self, value: ir.Value) -> DType:
        if value.dtype is None:
            return "float32"  # it has no shape either, and is refused for that
        if value.dtype not in _DTYPES:
            raise UserError(
                f"{self.path}: {value.name!r} has element type {value.dtype.name.lower()}, which is not supported: "
                f"export the model with floats of 16 to 64 bits, integers of 8 to 64 bits (4 as constants), and booleans"
            )
        if _DTYPES[value.dtype] == "float32" and value.dtype != ir.DataType.FLOAT:
            self.widened.add(np.dtype(value.dtype.numpy()).name)
        return _DTYPES[value.dtype]

    def _constant(self, value: ir.Value) -> None:
        tensor = value.const_value
        assert tensor is not None and value.name is not None
        value.dtype = tensor.dtype
        shape = tuple(tensor.shape.numpy())
        dtype = _NIBBLES[value.dtype] if value.dtype in _NIBBLES else self._dtype(value)
        made = Value(value.name, shape, dtype, self._data(tensor, shape))
        if isinstance(made.constant, ArrayConstant):  # the layers of a transformer contain equal masks
            data = made.constant.data
            made = self.arrays.setdefault((data.dtype.str, shape, sha256(data.tobytes()).digest()), made)
        self.values[value] = made

    def _data(self, tensor: ir.TensorProtocol, shape: tuple[int, ...]) -> Constant:
        if isinstance(tensor, BlocksTensor):
            return BlockConstant(self._data(tensor.source, tuple(tensor.source.shape.numpy())), tensor.format)
        narrow = _NIBBLES.get(tensor.dtype)
        if isinstance(tensor, ir.ExternalTensor) and tensor.nbytes >= LARGE:
            if narrow is not None:
                packed = FileConstant(str(tensor.path), tensor.offset or 0, (-(-tensor.size // 2),), np.dtype(np.uint8))
                return NibbleConstant(packed, shape, np.dtype(narrow))
            return FileConstant(str(tensor.path), tensor.offset or 0, shape, np.dtype(tensor.dtype.numpy()).newbyteorder("<"))
        # A copy, because a folded result may be a view of a whole mapped table.
        return ArrayConstant(np.array(tensor.numpy(), narrow))

    def _bits(self, node: ir.Node) -> int:
        """Bits of an element of the first input of `node`."""
        first = node.inputs[0]
        if first is None or first.dtype is None:
            return 0
        return 4 if first.dtype in _NIBBLES else int(8 * first.dtype.itemsize)

    def _node(self, node: ir.Node) -> tuple[Node, str | None, bool]:
        """The node, the reason why it cannot run, and whether the shapes of its inputs are known."""
        inputs = [None if value is None else self._read(value, node) for value in node.inputs]
        blameless = all(value not in self.shapeless for value in node.inputs if value is not None)
        named = list(node.outputs)
        while len(named) > 1 and not named[-1].name:
            named.pop()
        reason = _never(node)
        outputs = [self._value(value) if reason is None else self._unshaped(value) for value in named]
        remedy = SHAPED_BY_DATA.get(node.op_type)
        is_late = remedy is not None and not is_native(node.op_type)  # for inputs of every shape
        if reason is None and (blameless or is_late) and any(value in self.shapeless for value in named):
            reason = f"{_op(node)} is not supported: the shape of its output depends on data"
            reason += f"; {remedy}" if remedy else ", or its inputs are wrong"
        made = Node(_op(node), self._name(node), inputs, outputs, _attributes(node))
        for output in outputs:
            output.producer = made
        return made, reason, blameless

    def _read(self, value: ir.Value, node: ir.Node) -> Value:
        if value.producer() is None and not value.is_graph_input() and value.const_value is None:
            raise UserError(f"{self.path}: {_op(node)} node {node.name!r} reads {value.name!r}, which nothing computes")
        return self._value(value)

    def _unshaped(self, value: ir.Value) -> Value:
        """The output of a node that is refused anyway, of any type."""
        self.shapeless.add(value)
        return self.values.setdefault(value, Value(value.name or "", (), "float32"))

    def _name(self, node: ir.Node) -> str:
        name = node.name or f"{node.op_type}_{node.outputs[0].name}"
        self.names[name] += 1
        return name if self.names[name] == 1 else f"{name}#{self.names[name]}"


def _printable(name: str) -> str:
    return name if name.isprintable() else repr(name)


def _op(node: ir.Node) -> str:
    return _printable(node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}")


def _never(node: ir.Node) -> str | None:
    """Why a `Graph` cannot express `node`, or None."""
    if node.domain not in ("", "ai.onnx") or not onnx.defs.has(node.op_type):
        return contrib.why_not(node) or f"{_op(node)} is not an ONNX operator"
    if REASON in node.meta:
        return str(node.meta[REASON])
    if any(attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for attribute in node.attributes.values()):
        return f"{node.op_type} (control flow that depends on data) is not supported"
    types: Iterator[object] = (value.type for value in node.outputs if value.type is not None)
    if not all(isinstance(kind, ir.TensorType) for kind in types):
        return f"{node.op_type}, whose output is not a tensor, is not supported"
    return None


def _attributes(node: ir.Node) -> dict[str, Any]:
    """ONNX attributes as numbers, strings, tuples of them, and arrays."""
    kept: dict[str, Any] = {}
    for name, attribute in node.attributes.items():
        match attribute.type:
            case ir.AttributeType.INT | ir.AttributeType.FLOAT | ir.AttributeType.STRING:
                kept[name] = attribute.value
            case ir.AttributeType.INTS | ir.AttributeType.FLOATS | ir.AttributeType.STRINGS:
                kept[name] = tuple(attribute.value)
            case ir.AttributeType.TENSOR:
                kept[name] = attribute.as_tensor().numpy()
    return kept
