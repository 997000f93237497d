"""Attributes of a model's own functions, bound before onnx inlines the functions.

onnx's inliner knows the attributes that a call gives, but not the defaults that a function declares. Here each call gets a copy
of its function in which every reference to an attribute is replaced: by the value of the call, else by the function's default.
A reference without a value is removed, so that the default of the operator, or of the function, that it was given to counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import onnx

from flashmem.base.errors import UserError
from flashmem.compiler.ir.limits import NODES, function_key, nodes_of


def bind_attributes(model: onnx.ModelProto, path: Path) -> None:
    """Replace the functions of `model` by copies without attributes, one for each combination of values, in place.

    The model passed `check_size`, so that no function calls itself. Raises UserError if the graphs among the attributes make it
    too large after all.
    """
    if any(function.attribute or function.attribute_proto for function in model.functions):
        binder = _Binder(model.functions, path)
        binder.bind_calls(model.graph.node)
        del model.functions[:]
        model.functions.extend(binder.bound.values())


class _Binder:
    def __init__(self, functions: Iterable[onnx.FunctionProto], path: Path) -> None:
        self.path = path
        self.nodes = 0
        self.functions = {function_key(each.domain, each.name, each): each for each in functions}
        self.bound: dict[tuple[object, ...], onnx.FunctionProto] = {}

    def bind_calls(self, nodes: Iterable[onnx.NodeProto]) -> None:
        """Make calls among `nodes` and in their subgraphs, which refer to no attribute, calls of functions without any."""
        for node in nodes_of(nodes, self.path):
            key = function_key(node.domain, node.op_type, node)
            if key not in self.functions:
                continue
            values = {each.name: each for each in (*self.functions[key].attribute_proto, *node.attribute)}
            written = (values[name].SerializeToString(deterministic=True) for name in sorted(values))
            combination = (key, *written)
            if combination not in self.bound:
                self.bound[combination] = self._copy(self.functions[key], values, str(len(self.bound)))
            node.overload = self.bound[combination].overload
            del node.attribute[:]

    def _copy(
        self, function: onnx.FunctionProto, values: Mapping[str, onnx.AttributeProto], overload: str
    ) -> onnx.FunctionProto:
        """`function` with `values` for its attributes, as an overload of its own."""
        made = onnx.FunctionProto()
        made.CopyFrom(function)
        made.overload = overload
        del made.attribute[:]
        del made.attribute_proto[:]
        for node in nodes_of(made.node, self.path):  # after `_bind`, also those of a graph that it put in
            _bind(node, values)
            self.nodes += 1
            if self.nodes > NODES:
                raise UserError(f"{self.path} has more than {NODES} nodes with its functions inlined, the most that are read")
        self.bind_calls(made.node)
        return made


def _bind(node: onnx.NodeProto, values: Mapping[str, onnx.AttributeProto]) -> None:
    """Replace the references to attributes among the attributes of `node`; remove those that have no value."""
    kept = []
    for attribute in node.attribute:
        value = values.get(attribute.ref_attr_name) if attribute.ref_attr_name else attribute
        if value is not None:
            kept.append(onnx.AttributeProto())
            kept[-1].CopyFrom(value)
            kept[-1].name = attribute.name
    del node.attribute[:]
    node.attribute.extend(kept)
