"""Function bodies of ONNX operators: their definitions in simpler operators.

ONNX's schemas contain function bodies, some of them specific to the types of a node's inputs. Each node gets its body as a
function of the model, which onnx then inlines. (Its inliner can also read bodies from schemas, but fails with an assertion if a
node omits an optional input.)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import onnx
import onnx.inliner

_DOMAIN = "flashmem.definitions"


def has_definition(op: str, opset: int) -> bool:
    """Whether ONNX defines `op` by other operators in an operator set."""
    try:
        schema = onnx.defs.get_schema(op, opset)
    except onnx.defs.SchemaError:
        return False
    return bool(schema.has_function or schema.has_context_dependent_function)  # type: ignore[attr-defined]


def write_out(proto: onnx.ModelProto, ops: Collection[str]) -> onnx.ModelProto:
    """`proto`, without functions, with the nodes of its graph whose operator is in `ops` replaced by their definitions."""
    opset = next(entry.version for entry in proto.opset_import if entry.domain == "")
    graph = proto.graph
    types = {value.name: value.type for value in (*graph.input, *graph.value_info, *graph.output)}
    for tensor in graph.initializer:
        types[tensor.name] = onnx.helper.make_tensor_type_proto(tensor.data_type, tensor.dims)
    for index, node in enumerate(graph.node):
        if node.op_type not in ops or node.domain != "":
            continue
        _write_out_defaults(node, opset)
        body = _definition(node, opset, types)
        if body is None:
            continue
        node.domain = body.domain = _DOMAIN
        node.op_type = body.name = f"{node.op_type}_{index}"
        proto.functions.append(body)
    if not proto.functions:
        return proto
    proto.opset_import.append(onnx.helper.make_opsetid(_DOMAIN, 1))
    proto = onnx.inliner.inline_local_functions(proto)
    kept = [entry for entry in proto.opset_import if entry.domain != _DOMAIN]
    del proto.opset_import[:]
    proto.opset_import.extend(kept)
    return proto


def _definition(node: onnx.NodeProto, opset: int, types: Mapping[str, onnx.TypeProto]) -> onnx.FunctionProto | None:
    """The definition of `node` in operators of `opset`; None if ONNX has none, or none for that operator set."""
    schema = onnx.defs.get_schema(node.op_type, opset)
    if schema.has_function:  # type: ignore[attr-defined]
        versions = [v for v in schema.function_opset_versions if v <= opset]  # type: ignore[attr-defined]
        data = schema.get_function_with_opset_version(max(versions)) if versions else b""  # type: ignore[attr-defined]
    else:
        versions = [v for v in schema.context_dependent_function_opset_versions if v <= opset]  # type: ignore[attr-defined]
        known = [types[name].SerializeToString() if name in types else b"" for name in node.input]
        data = (
            schema.get_context_dependent_function_with_opset_version(max(versions), node.SerializeToString(), known)  # type: ignore[attr-defined]
            if versions
            else b""
        )
    if not data:
        return None
    body: onnx.FunctionProto = onnx.FunctionProto.FromString(data)
    for entry in body.opset_import:
        if entry.domain == "":
            if not all(_holds(inner, entry.version, opset) for inner in body.node):
                return None
            entry.version = opset
    return body


def _holds(node: onnx.NodeProto, opset: int, other: int) -> bool:
    """Whether `node`, of operator set `opset`, means the same in `other`: newer versions of most operators only add types."""
    try:
        old, new = (onnx.defs.get_schema(node.op_type, version) for version in (opset, other))
    except onnx.defs.SchemaError:
        return False
    if old.since_version == new.since_version:
        return True
    shared = [(old.attributes[name], new.attributes[name]) for name in old.attributes if name in new.attributes]
    return (
        all(attribute.name in new.attributes for attribute in node.attribute)
        and all(one.default_value == two.default_value for one, two in shared)
        and new.min_input <= len(node.input) <= new.max_input
    )


def _write_out_defaults(node: onnx.NodeProto, opset: int) -> None:
    """Add the default attributes of the schema to `node`, because bodies refer to them."""
    given = {attribute.name for attribute in node.attribute}
    for name, attribute in onnx.defs.get_schema(node.op_type, opset).attributes.items():
        if name not in given and attribute.default_value.type:
            node.attribute.append(attribute.default_value)
