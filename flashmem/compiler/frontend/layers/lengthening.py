"""A shortened model that was cleaned up gets its other layers back: copies of the second, with their own names and weights.

A copy is right if cleaning up treats every layer as it treated the two that are compared: both became the same nodes, of which
nothing but weights, inputs and outputs of their own differs (`comparison`). What could tell one layer from another is the data
of its weights. So each weight of its own has to be a weight of the result still, as the file has it. One that is not was folded
into something, and then all layers must have the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as passes

from flashmem.compiler.frontend.contrib.packed import placed_at, stored
from flashmem.compiler.frontend.layers.comparison import Comparison, place_of
from flashmem.compiler.frontend.layers.equal_layers import EqualLayers
from flashmem.compiler.frontend.layers.shortening import KEPT


def lengthen(model: ir.Model, layers: EqualLayers, source: onnx.ModelProto) -> None:
    """Give `model`, which is shortened and cleaned up, the layers that `source` has besides, in place.

    Raises:
        DifferentLayersError: the copies might differ from the layers of `source`; `model` is unchanged.
    """
    compared = Comparison(model.graph, layers, source)
    _Copies(model.graph, layers, source, compared).add()
    passes.TopologicalSortPass()(model)


class _Copies:
    """Writes copies of layer 1."""

    def __init__(self, graph: ir.Graph, layers: EqualLayers, source: onnx.ModelProto, compared: Comparison) -> None:
        self.graph = graph
        self.layers = layers
        self.wiring = compared.wiring()
        _, self.template, self.second, self.last = compared.nodes
        self.tensors = {tensor.name: tensor for tensor in source.graph.initializer}
        self.ports = {value.name: value for value in source.graph.input}
        self.order = [[value.name for value in values] for values in (source.graph.input, source.graph.output)]
        self.inputs = {value.name: value for value in graph.inputs}
        self.outputs = {value.name: value for value in graph.outputs}

    def add(self) -> None:
        """Add the layers between the second and the last one, which reads the last copy afterwards."""
        names = _Names(self.layers.names_in(2))
        for node, like in zip(self.second, self.template, strict=True):  # some have names of the last layer, which followed
            names.give(node, like)
        before: Sequence[ir.Node] = self.second
        for layer in range(KEPT - 1, self.layers.count - 1):
            copies = self._layer(layer, before)
            self.graph.insert_after(before[-1], copies)
            before = copies
        made = {value: (index, at) for index, node in enumerate(self.second) for at, value in enumerate(node.outputs)}
        for node in self.last:
            for at, value in enumerate(node.inputs):
                if value in made:
                    index, output = made[value]
                    node.replace_input_with(at, before[index].outputs[output])
        self._set_ports()

    def _layer(self, layer: int, before: Sequence[ir.Node]) -> list[ir.Node]:
        """The nodes of a layer, behind those of the layer before."""
        names = _Names(self.layers.names_in(layer))
        self.inputs.update({name: self._input(name) for name in self.layers.owned[layer] if name in self.ports})
        own = {value: self._own(value, names) for value in self.wiring.own}
        made: list[ir.Node] = []

        def operand(value: ir.Value | None) -> ir.Value | None:
            if value is None:
                return None
            if value in self.wiring.inside:
                index, at = self.wiring.inside[value]
                return made[index].outputs[at]
            if value in self.wiring.before:
                index, at = self.wiring.before[value]
                return before[index].outputs[at]
            return own.get(value, value)

        for node in self.template:
            copy = _copied(node, [operand(value) for value in node.inputs])
            names.give(copy, node)
            self.outputs.update({value.name: value for value in copy.outputs if value.name in self.order[1]})
            made.append(copy)
        return made

    def _own(self, value: ir.Value, names: _Names) -> ir.Value:
        """What `value` of layer 1, a weight or an input, is in another layer, of which `names` are."""
        name = names.of(self.wiring.own[value])
        if name in self.ports:
            return self.inputs[name]
        known = self.tensors[name]
        template = value.const_value
        tensor: ir.TensorProtocol = ir.serde.deserialize_tensor(known)
        place = place_of(known)
        if template is not None and stored(template) is not None and place is not None:
            tensor = placed_at(place, template, name)
        made = ir.Value(name=names.of(value.name or name), const_value=tensor, type=value.type, shape=value.shape)
        self.graph.register_initializer(made)
        return made

    def _input(self, name: str) -> ir.Value:
        return ir.serde.deserialize_value_info_proto(self.ports[name], None)

    def _set_ports(self) -> None:
        """Put inputs and outputs in the order of the whole model."""
        for ports, known, order in ((self.graph.inputs, self.inputs, 0), (self.graph.outputs, self.outputs, 1)):
            ports.clear()
            ports.extend(known[name] for name in self.order[order])


def _copied(node: ir.Node, operands: Sequence[ir.Value | None]) -> ir.Node:
    """`node` with other operands. Its results are of the same types and shapes."""
    copy = ir.Node(
        node.domain, node.op_type, operands, list(node.attributes.values()), overload=node.overload,
        num_outputs=len(node.outputs), version=node.version, metadata_props=dict(node.metadata_props),
    )  # fmt: skip
    for value, source in zip(copy.outputs, node.outputs, strict=True):
        value.type = source.type
        value.shape = None if source.shape is None else source.shape.copy()
    return copy


class _Names:
    """Names in another layer: those of the file; what was made of one by adding to it is made again."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names

    def give(self, node: ir.Node, like: ir.Node) -> None:
        """Name a node and its outputs as `like` of layer 1 is named."""
        node.name = self.of(like.name or "")
        for value, source in zip(node.outputs, like.outputs, strict=True):
            value.name = self.of(source.name or "")

    def of(self, name: str) -> str:
        """What `name` of layer 1 is in this layer. NameFixPass makes equal names different."""
        beginning = next((each for each in _beginnings(name) if each in self.names), "")
        return self.names.get(beginning, "") + name[len(beginning) :]


def _beginnings(name: str) -> Iterator[str]:
    """`name` and what is before each of its dots, the longest first."""
    while name:
        yield name
        name = name.rpartition(".")[0]
