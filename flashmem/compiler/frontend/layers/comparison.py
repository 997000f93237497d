"""Two layers of a shortened model that was cleaned up: whether they became the same nodes, and how these are connected."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import onnx
import onnx_ir as ir

from flashmem.compiler.frontend.contrib.packed import stored
from flashmem.compiler.frontend.layers.equal_layers import EqualLayers
from flashmem.compiler.frontend.layers.shortening import KEPT

Place = tuple[int, int]
"""A node of a layer, by its number there, and an output of it."""


class DifferentLayersError(Exception):
    """Two layers that were equal became different ones."""


@dataclass
class Wiring:
    """What the nodes of layer 1 read.

    Attributes:
        inside: what the layer computes itself, and where.
        before: what the layer before computes, and where.
        own: weights and inputs of the layer, and their names in the file.
    """

    inside: dict[ir.Value, Place] = field(default_factory=dict)
    before: dict[ir.Value, Place] = field(default_factory=dict)
    own: dict[ir.Value, str] = field(default_factory=dict)


class Comparison:
    """The nodes of a cleaned-up model, by the layers on whose weights and inputs they depend, compared."""

    def __init__(self, graph: ir.Graph, layers: EqualLayers, source: onnx.ModelProto) -> None:
        self.graph = graph
        self.layers = layers
        self.tensors = {tensor.name: tensor for tensor in source.graph.initializer}
        self.origins = dict(self._origins())
        kept = enumerate((1, 2, layers.count - 1), start=1)
        levels = {name: level for level, layer in kept for name in layers.owned[layer]}
        self.levels = {value: levels[name] for value, name in self.origins.items() if name in levels}
        self.nodes: list[list[ir.Node]] = [[] for _ in range(KEPT)]
        for node in graph:
            level = max((self.levels.get(value, 0) for value in node.inputs if value is not None), default=0)
            self.nodes[level].append(node)
            self.levels.update(dict.fromkeys(node.outputs, level))

    def _origins(self) -> Iterator[tuple[ir.Value, str]]:
        """Inputs and weights as the file has them, and their names there. External weights may have another type or shape."""
        places = {place: name for name, tensor in self.tensors.items() if (place := place_of(tensor)) is not None}
        yield from ((value, value.name) for value in self.graph.inputs if value.name is not None)
        for name, value in self.graph.initializers.items():
            tensor = value.const_value
            if (part := stored(tensor)) is not None:
                origin = places.get((str(part.path), part.offset or 0, part.nbytes))
                if origin is not None:
                    yield value, origin
            elif tensor is not None and name in self.tensors and _is_from(self.tensors[name], tensor):
                yield value, name

    @cached_property
    def places(self) -> dict[ir.Value, Place]:
        """Where layer 1 computes its values."""
        return {value: (index, at) for index, node in enumerate(self.nodes[1]) for at, value in enumerate(node.outputs)}

    def wiring(self) -> Wiring:
        """How the nodes of layer 1 are connected, which those of layer 2 are too.

        Raises:
            DifferentLayersError: they are not, or something was made of weights that differ between other layers.
        """
        first, second, last = self.nodes[1:]
        if len(first) != len(second) or not first:
            raise DifferentLayersError
        wiring = Wiring()
        twins = dict[ir.Value, ir.Value]()
        for one, other in zip(first, second, strict=True):
            if not _are_alike(one, other):
                raise DifferentLayersError
            for a, b in zip(one.inputs, other.inputs, strict=True):
                if not self._connect(wiring, twins, a, b):
                    raise DifferentLayersError
            twins.update(zip(one.outputs, other.outputs, strict=True))
        if any(value in self.places for node in last for value in node.inputs if value is not None):
            raise DifferentLayersError  # what follows reads layer 1
        self._check_outputs(twins)
        self._check_weights()
        return wiring

    def _connect(self, wiring: Wiring, twins: dict[ir.Value, ir.Value], a: ir.Value | None, b: ir.Value | None) -> bool:
        """Add to `wiring` what a node of layer 1 reads; whether its twin in layer 2 reads `b` in the same way."""
        if a is None or b is None:
            return a is b
        if a in self.places:
            wiring.inside[a] = self.places[a]
            return twins.get(a) is b
        if self.levels.get(a) == 1:
            names = dict(zip(self.layers.owned[1], self.layers.owned[2], strict=True))
            wiring.own[a] = self.origins[a]
            return self.levels.get(b) == 2 and names[self.origins[a]] == self.origins.get(b) and _are_read_alike(a, b)
        if b in self.places:
            return wiring.before.setdefault(a, self.places[b]) == self.places[b]
        return a is b

    def _check_outputs(self, twins: dict[ir.Value, ir.Value]) -> None:
        """Raise DifferentLayersError unless the outputs of the model that layers 1 and 2 compute correspond."""
        names = self.layers.names_in(2)
        outputs = {value.name: value for value in self.graph.outputs if value.name is not None}
        computed = {name for name, value in outputs.items() if value in self.places}
        if computed != {name for name in self.layers.made[1] if name in outputs}:
            raise DifferentLayersError
        if any(twins[outputs[name]] is not outputs.get(names[name]) for name in computed):
            raise DifferentLayersError

    def _check_weights(self) -> None:
        """Raise DifferentLayersError if something was made of weights that differ between layers."""
        read = {value for node in (*self.nodes[1], *self.nodes[2]) for value in node.inputs if value is not None}
        kept = {name for value, name in self.origins.items() if value in read}
        for names in zip(*self.layers.owned[1:], strict=True):
            is_input = names[0] not in self.tensors
            if is_input or kept.issuperset(names[:2]):
                continue
            if len({_content(self.tensors[name]) for name in names}) > 1:
                raise DifferentLayersError


def place_of(tensor: onnx.TensorProto) -> tuple[str, int, int] | None:
    """File, offset and length of external data."""
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return None
    entries = {entry.key: entry.value for entry in tensor.external_data}
    return entries["location"], int(entries["offset"]), int(entries["length"])


def _is_from(known: onnx.TensorProto, tensor: ir.TensorProtocol) -> bool:
    """Whether a tensor of the result, in memory, is one of the file."""
    if known.data_location == onnx.TensorProto.EXTERNAL:
        return False
    wanted = ir.serde.deserialize_tensor(known)
    is_like = tensor.dtype == wanted.dtype and tensor.shape == wanted.shape
    return is_like and (tensor.dtype == ir.DataType.STRING or tensor.tobytes() == wanted.tobytes())


def _content(tensor: onnx.TensorProto) -> bytes:
    bare = onnx.TensorProto()
    bare.CopyFrom(tensor)
    bare.ClearField("name")
    bare.ClearField("doc_string")
    content: bytes = bare.SerializeToString(deterministic=True)
    return content


def _are_read_alike(one: ir.Value, other: ir.Value) -> bool:
    return one.type == other.type and one.shape == other.shape and type(one.const_value) is type(other.const_value)


def _are_alike(one: ir.Node, other: ir.Node) -> bool:
    """Whether two nodes are of one kind, and their results too."""
    if (one.op_identifier(), one.version, len(one.inputs)) != (other.op_identifier(), other.version, len(other.inputs)):
        return False
    if one.meta or other.meta or one.metadata_props != other.metadata_props or {*one.attributes} != {*other.attributes}:
        return False
    results = [[(value.type, value.shape, not value.name) for value in node.outputs] for node in (one, other)]
    return results[0] == results[1] and all(_are_equal(each, other.attributes[name]) for name, each in one.attributes.items())


def _are_equal(one: ir.Attr, other: ir.Attr) -> bool:
    if one.type != other.type or one.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) or one.is_ref():
        return False
    if one.type == ir.AttributeType.TENSOR:
        a = one.as_tensor()
        b = other.as_tensor()
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return bool(one.value == other.value)
