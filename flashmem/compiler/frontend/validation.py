"""Validation of the model against ONNX's own rules, before any other step trusts it.

onnx's checker verifies names, order, attributes and numbers of inputs. Types and shapes are inferred strictly, node by node,
while constants are folded (compiler/frontend/folding.py). No data is read: the checker gets a copy without data.
"""

from __future__ import annotations

import re
from pathlib import Path

import onnx
import onnx_ir as ir
from onnx import checker

from flashmem.base.errors import UserError
from flashmem.compiler.frontend.external_data import tensors
from flashmem.compiler.ir.limits import nodes_of

_CONTEXT = re.compile(r" ==> Context: Bad node spec for node\. Name: (?P<name>.*?) OpType: (?P<op>\S+)")
_UNSORTED = re.compile(r"Nodes in a graph .* input '(?P<input>.*)' of node: name: (?P<name>.*) OpType: (?P<op>\S+) is not")


def tidy(model: onnx.ModelProto, path: Path) -> None:
    """Write ONNX's own domain, "ai.onnx", as "" everywhere in `model`, and name nodes without a name, in place.

    Raises UserError for subgraphs that are nested too deeply.
    """
    for owner in (model, *model.functions):
        for entry in owner.opset_import:
            entry.domain = _plain(entry.domain)
    for function in model.functions:
        function.domain = _plain(function.domain)
    for nodes in (model.graph.node, *(function.node for function in model.functions)):
        for node in nodes_of(nodes, path):
            node.domain = _plain(node.domain)
            node.name = node.name or f"{node.op_type}_{next(filter(None, node.output), '')}"


def check_structure(model: onnx.ModelProto, path: Path) -> None:
    """Raise UserError for a tidy model that ONNX's checker refuses; sort nodes that are out of order, in place.

    This function accepts operators that ONNX does not have; callers check later whether they can run.
    """
    try:
        try:
            _check(model)
        except checker.ValidationError as error:
            if "topologically sorted" not in str(error):
                raise
            _sort(model.graph)
            _check(model)
    except checker.ValidationError as error:
        raise UserError(f"{path} is not a valid ONNX model: {_sentence(error)}") from None


def printable(name: str) -> str:
    """`name` in a form that can be printed in a message."""
    return name if name.isprintable() else repr(name)


def _check(model: onnx.ModelProto) -> None:
    light = onnx.ModelProto()
    light.CopyFrom(model)
    for tensor in tensors(light):  # their data was checked when the file was opened
        bare = onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=[0])
        tensor.CopyFrom(bare)
    graph = light.graph
    graph.name = graph.name or "graph"
    for value in (*graph.input, *graph.output):
        # The caller gives shapes, and missing types of outputs are inferred.
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.shape.SetInParent()
    for value in graph.output:
        if not value.type.WhichOneof("value"):
            value.type.CopyFrom(onnx.helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, ()))
    checker.check_graph(graph, _context(light, light))
    for function in light.functions:
        checker.check_function(function, _context(light, function))


def _context(model: onnx.ModelProto, owner: onnx.ModelProto | onnx.FunctionProto) -> checker.C.CheckerContext:
    """The checker's context for `owner`, `model` or one of its functions; unknown operators get a separate domain."""
    domains = {entry.domain: entry.version for entry in owner.opset_import}
    for node in nodes_of(owner.graph.node if isinstance(owner, onnx.ModelProto) else owner.node, Path()):
        if node.domain == "" and not onnx.defs.has(node.op_type):
            node.domain = "unknown"
        if node.domain not in domains:
            domains[node.domain] = 1
            owner.opset_import.append(onnx.helper.make_opsetid(node.domain, 1))  # the checker requires it of a function
    context = checker.C.CheckerContext()
    # Before version 4 weights had to be inputs as well. They are constants here.
    context.ir_version = min(max(model.ir_version, 4), onnx.IR_VERSION)
    context.opset_imports = domains
    return context


def _sort(graph: onnx.GraphProto) -> None:
    """Sort the nodes of `graph` topologically if possible; those of subgraphs keep their order."""
    try:
        model = ir.serde.deserialize_graph(graph)
        for index, node in enumerate(model):
            node.metadata_props["index"] = str(index)
        model.sort()
    except (ValueError, ir.serde.SerdeError):
        return  # a cycle, or another error: the checker names a node of it
    order = [graph.node[int(node.metadata_props["index"])] for node in model]
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in order]
    del graph.node[:]
    graph.node.extend(nodes)


def _sentence(error: Exception) -> str:
    """The error of onnx's checker in one line, which begins with the node."""
    text = " ".join(str(error).split())
    if found := _UNSORTED.search(text):
        return f"{printable(found['op'])} node {found['name']!r} reads {found['input']!r}, which nothing computes before it"
    if found := _CONTEXT.search(text):
        return printable(f"{found['op']} node {found['name']!r}: {text[: found.start()].rstrip('. ')}")
    return printable(text)


def _plain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain
