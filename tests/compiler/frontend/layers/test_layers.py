"""Equal layers are cleaned up once, and the graph is the one that the whole model gives: compared with it, node for node."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from flashmem.compiler.frontend import cleanup
from flashmem.compiler.frontend.decoder.weights import matrix
from flashmem.compiler.frontend.decoder_files import converted
from flashmem.compiler.frontend.importer import import_model
from flashmem.compiler.frontend.layers.equal_layers import EqualLayers, find_layers
from flashmem.compiler.ir.graph import Graph
from flashmem.compiler.ir.text import graph_text
from tests.support.decoders import llama, smollm2
from tests.support.gguf_models import SmallLlama

LAYERS = 8


class Watched:
    """The nodes of the models that were cleaned up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nodes: list[int] = []
        self.monkeypatch, whole = monkeypatch, cleanup._clean_up

        def clean_up(proto: onnx.ModelProto, is_native: Callable[[str], bool]) -> Any:
            self.nodes.append(len(proto.graph.node))
            return whole(proto, is_native)

        monkeypatch.setattr(cleanup, "_clean_up", clean_up)

    def check(self, path: Path, **options: Any) -> list[int]:
        """Compare the graph of the model at `path` with that of all its layers; the nodes that were cleaned up for it."""
        made = import_model(path, **options)
        cleaned = list(self.nodes)
        with self.monkeypatch.context() as patched:
            patched.setattr(cleanup, "find_layers", lambda proto: None)
            whole = import_model(path, **options)
        for one, other in zip(constants(made), constants(whole), strict=True):
            np.testing.assert_array_equal(one, other)
        assert named_by_use(made) == named_by_use(whole)
        return cleaned


def constants(graph: Graph) -> Iterator[Any]:
    """The constants that each node reads."""
    yield from (value.constant.array() for node in graph.nodes for value in node.inputs if value and value.constant)


def named_by_use(graph: Graph) -> str:
    """The text of `graph`, in which constants have the names of those who read them: equal ones may be one or several."""
    for node in graph.nodes:
        for at, value in enumerate(node.inputs):
            if value is not None and value.constant is not None:
                node.inputs[at] = replace(value, name=f"{node.name}.{at}")
    return graph_text(graph)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def saved(model: onnx.ModelProto, folder: Path) -> Path:
    path = folder / "m.onnx"
    onnx.save(model, path)
    return path


@pytest.mark.parametrize("make", [llama, smollm2])
def test_of_eight_layers_four_are_cleaned_up(make: Callable[[int], Any], watched: Watched, tmp_path: Path) -> None:
    model = make(LAYERS).model()
    cleaned = watched.check(saved(model, tmp_path))
    assert len(cleaned) == 1
    assert cleaned[0] < 0.6 * len(model.graph.node)


@pytest.mark.parametrize("formats", [("Q4_0",), ("F16",), ("Q4_0", "Q8_0")])
def test_decoders_of_files_too(formats: tuple[str, ...], watched: Watched, tmp_path: Path) -> None:
    source = SmallLlama(layers=LAYERS * len(formats), formats=formats).write(tmp_path / "m.gguf")
    with converted(source, 32, matrix, 1) as model:
        proto = onnx.load(model.path, load_external_data=False)
        cleaned = watched.check(model.path, shapes={"input_ids": (1, 5)}, states="auto")
    assert cleaned[0] < 0.7 * len(proto.graph.node)


def test_weights_in_files_are_those_of_their_layer(watched: Watched, tmp_path: Path) -> None:
    model = llama(LAYERS).model()
    path = tmp_path / "m.onnx"
    onnx.save(model, path, save_as_external_data=True, location="m.data", size_threshold=64)
    assert watched.check(path)[0] < 0.6 * len(model.graph.node)


def change_data(graph: onnx.GraphProto, layers: EqualLayers, draw: random.Random) -> None:
    """Of a number that cleaning up may fold."""
    floats = [tensor for tensor in graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT and not tensor.dims]
    tensor = draw.choice(floats)
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(1.5), tensor.name))


def repeat_data(graph: onnx.GraphProto, layers: EqualLayers, draw: random.Random) -> None:
    """Two layers have weights of equal data."""
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    one, other = draw.sample(range(1, LAYERS), 2)
    names = [pair for pair in zip(layers.owned[one], layers.owned[other], strict=True) if pair[0] in tensors]
    name, source = draw.choice(names)
    tensors[name].CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensors[source]), name))


def share_weight(graph: onnx.GraphProto, layers: EqualLayers, draw: random.Random) -> None:
    """Two layers read one weight."""
    one, other = draw.sample(range(1, LAYERS), 2)
    place = draw.randrange(len(layers.owned[1]))
    for node in graph.node:
        node.input[:] = [layers.owned[one][place] if name == layers.owned[other][place] else name for name in node.input]


def change_attribute(graph: onnx.GraphProto, layers: EqualLayers, draw: random.Random) -> None:
    """A softmax counts its axis from the front."""
    draw.choice([node for node in graph.node if node.op_type == "Softmax"]).attribute[0].i = 3


def change_operator(graph: onnx.GraphProto, layers: EqualLayers, draw: random.Random) -> None:
    """Another activation."""
    draw.choice([node for node in graph.node if node.op_type == "Sigmoid"]).op_type = "Tanh"


def add_skip(graph: onnx.GraphProto, layers: EqualLayers, draw: random.Random) -> None:
    """A sum reads hidden states of an earlier layer."""
    states = {node.input[0] for node in graph.node if node.op_type == "Pow"}
    sums = [node for node in graph.node if node.op_type == "Add" and node.output[0] in states]
    late = draw.randrange(1, len(sums))
    sums[late].input[0] = sums[draw.randrange(late)].output[0]


def add_output(graph: onnx.GraphProto, layers: EqualLayers, draw: random.Random) -> None:
    """An output of a layer in the middle."""
    node = draw.choice([node for node in graph.node if node.op_type == "MatMul"])
    graph.output.append(onnx.helper.make_tensor_value_info(node.output[0], onnx.TensorProto.FLOAT, None))


Change = Callable[[onnx.GraphProto, EqualLayers, random.Random], None]
CHANGES: tuple[Change, ...] = (change_data, repeat_data, share_weight, change_attribute, change_operator, add_skip, add_output)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("change", CHANGES)
def test_what_one_layer_has_alone_is_kept(change: Change, seed: int, watched: Watched, tmp_path: Path) -> None:
    model = (llama if seed % 2 else smollm2)(LAYERS).model()
    layers = find_layers(model)
    assert layers is not None
    change(model.graph, layers, random.Random(seed))
    watched.check(saved(model, tmp_path))


def test_a_number_that_is_folded_differs_in_one_layer(watched: Watched, tmp_path: Path) -> None:
    """Cleaning up makes one constant of equal numbers: here of those of the layers that are kept."""
    model = llama(LAYERS).model()
    powers = [node.input[1] for node in model.graph.node if node.op_type == "Pow"]
    tensor = next(each for each in model.graph.initializer if each.name == powers[9])
    tensor.CopyFrom(numpy_helper.from_array(np.array(3, np.float32), tensor.name))
    assert len(watched.check(saved(model, tmp_path))) == 2


def test_a_shape_that_is_folded_differs_in_one_layer(watched: Watched, tmp_path: Path) -> None:
    model = llama(LAYERS).model()
    sizes = [node.input[1] for node in model.graph.node if node.op_type == "Reshape"]
    by_name = {tensor.name: tensor for tensor in model.graph.initializer}
    splits = [by_name[name] for name in sizes if by_name[name].dims == [4]]
    wanted = numpy_helper.to_array(splits[15]).copy()
    wanted[0] = -1  # the same shape, written in another way
    splits[15].CopyFrom(numpy_helper.from_array(wanted, splits[15].name))
    watched.check(saved(model, tmp_path))
