"""Buffer assignment: Slices inside their sources, parts inside Concats, outputs over operands; no read sees other data."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import helper, numpy_helper

import flashmem
from flashmem.base.types import ITEMSIZE
from flashmem.bundle.kernel_bounds import check_bounds
from flashmem.compiler.frontend.importer import import_model
from flashmem.compiler.ir.fusion_group import FusionGroup
from flashmem.compiler.ir.graph import Graph, Value
from flashmem.compiler.lowering.context import LoweringContext
from flashmem.compiler.lowering.generated import Generated
from flashmem.compiler.memory import buffers as places
from flashmem.compiler.memory.aliases import unreshaped
from flashmem.compiler.operators import why_unsupported
from flashmem.compiler.passes.fusion import fuse
from flashmem.compiler.passes.pipeline import prepare
from flashmem.compiler.stages.pipeline import generate
from flashmem.program.program import Launch, Program
from flashmem.target.descriptor import load_descriptor
from tests.support.compared import PLACES, require_right
from tests.support.inputs import KINDS
from tests.support.rounding import HALF_EPS, evaluated

Array = NDArray[Any]


def _half(array: Array) -> Array:
    """The nearest halves, in float32."""
    with np.errstate(over="ignore"):
        return array.astype(np.float16).astype(np.float32)


class Net:
    """A random model of data movement and computation, on matrices whose rows are sometimes multiples of the alignment."""

    def __init__(self, seed: int, *, size: int = 14) -> None:
        self.random = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.columns = self.random.choice((128, 256, 64, 100))
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.values: dict[str, tuple[int, ...]] = {}
        for i in range(self.random.choice((1, 2))):
            self.values[f"x{i}"] = (self.random.choice((4, 6, 8)), self.columns)
        self.inputs = dict(self.values)
        while len(self.values) < size:
            self._step()
        made = [name for name in self.values if name not in self.inputs]
        read = {name for node in self.nodes for name in node.input}
        self.outputs = [name for name in made if name not in read or self.random.random() < 0.1]

    def _constant(self, data: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(data), name))
        return name

    def _add(self, op: str, inputs: Sequence[str], *shapes: tuple[int, ...], **attributes: Any) -> None:
        names = [f"v{len(self.values) + i}" for i in range(len(shapes))]
        self.nodes.append(helper.make_node(op, list(inputs), names, f"n{len(self.nodes)}", **attributes))
        self.values.update(zip(names, shapes, strict=True))

    def _step(self) -> None:
        draw = self.random
        name = draw.choice(list(self.values)[-6:] if draw.random() < 0.8 else list(self.values))
        rows, columns = self.values[name]
        match draw.choice(
            ("slice", "slice", "split", "concat", "concat", "unary", "binary", "binary", "matmul", "reshape", "rows")
        ):
            case "slice":
                axis = draw.choice((0, 0, 0, 1))
                size = (rows, columns)[axis]
                start = draw.randrange(size)
                end = draw.randint(start + 1, size)
                ends = [self._constant(np.array([n], np.int64)) for n in (start, end, axis)]
                self._add("Slice", [name, *ends], (end - start, columns) if axis == 0 else (rows, end - start))
            case "split" if rows > 1:
                first = draw.randrange(1, rows)
                sizes = self._constant(np.array([first, rows - first], np.int64))
                self._add("Split", [name, sizes], (first, columns), (rows - first, columns), axis=0)
            case "concat":
                alike = [other for other, shape in self.values.items() if shape[1] == columns]
                chosen = [draw.choice(alike[-5:]) for _ in range(draw.choice((1, 2)))] + [name]
                total = sum(self.values[each][0] for each in chosen)
                if total <= 64:
                    draw.shuffle(chosen)
                    self._add("Concat", chosen, (total, columns), axis=0)
            case "unary":
                self._add(draw.choice(("Relu", "Tanh", "Neg")), [name], (rows, columns))
            case "binary":
                alike = [other for other, shape in self.values.items() if shape == (rows, columns)]
                self._add(draw.choice(("Add", "Sub", "Max")), [name, draw.choice(alike)], (rows, columns))
            case "matmul":
                weight = self._constant(_half(self.numbers.standard_normal((columns, self.columns)) / columns**0.5))
                self._add("MatMul", [name, weight], (rows, self.columns))
            case "reshape" if columns % 2 == 0:
                shape = (rows * 2, columns // 2) if draw.random() < 0.5 or rows % 2 else (rows // 2, columns * 2)
                self._add("Reshape", [name, self._constant(np.array(shape, np.int64))], shape)
            case "rows":
                self._add("Softmax", [name], (rows, columns), axis=draw.choice((0, -1)))

    def proto(self) -> onnx.ModelProto:
        """The model."""

        def ports(names: Sequence[str]) -> list[onnx.ValueInfoProto]:
            return [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, self.values[name]) for name in names]

        graph = helper.make_graph(self.nodes, "net", ports(list(self.inputs)), ports(self.outputs), self.constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)

    def feeds(self, kind: str = "normal") -> dict[str, Array]:
        """Inputs of a kind of `KINDS`: halves, where they are in the range of halves."""
        drawn = {name: KINDS[kind](self.numbers, shape).astype(np.float32) for name, shape in self.inputs.items()}
        halves = {name: _half(array) for name, array in drawn.items()}
        return halves if all(np.isfinite(array).all() and array.any() for array in halves.values()) else drawn


def _graph(net: Net, folder: Path) -> Graph:
    onnx.save(net.proto(), folder / "net.onnx")
    return prepare(import_model(folder / "net.onnx", {}, why_unsupported))


class _Elements:
    """The identity of each value's elements: numbers that data movement keeps, and that no other elements share."""

    def __init__(self, graph: Graph) -> None:
        self.of: dict[Value, Array] = {}
        self._next = 1
        for port in graph.inputs:
            self.new(port.value)
        for node in graph.nodes:
            read = [self.of[value] for value in node.inputs if value is not None and value in self.of]
            output, attributes = node.outputs[0], node.attributes
            if node.op == "Reshape":
                self.of[output] = read[0].reshape(output.shape)
            elif node.op == "Slice":
                chosen = zip(attributes["starts"], attributes["steps"], output.shape, strict=True)
                self.of[output] = read[0][np.ix_(*(start + step * np.arange(size) for start, step, size in chosen))]
            elif node.op == "Concat":
                self.of[output] = np.concatenate(read, attributes["axis"])
            else:
                for value in node.outputs:
                    self.new(value)

    def new(self, value: Value) -> None:
        """Assign new numbers."""
        self.of[value] = np.arange(self._next, self._next + value.size).reshape(value.shape)
        self._next += value.size


def _checked(graph: Graph, precision: Any, monkeypatch: pytest.MonkeyPatch) -> Generated:
    """A program whose launches are simulated on a memory that records which element each byte belongs to."""
    begins: list[tuple[FusionGroup, int]] = []
    names: dict[Value, str] = {}
    tensor = LoweringContext.tensor

    def recorded(context: LoweringContext, value: Value) -> Any:
        arg = tensor(context, value)
        names[value] = str(arg.value)
        return arg

    def begun(context: LoweringContext, group: FusionGroup) -> None:
        begins.append((group, len(context.launches)))
        lower_group(context, group)

    from flashmem.compiler.lowering import program as module

    lower_group = module.lower_group
    with monkeypatch.context() as patched:
        patched.setattr(LoweringContext, "tensor", recorded)
        patched.setattr(module, "lower_group", begun)
        made = generate(fuse(graph), load_descriptor("pocl"), precision=precision)
    _play(graph, made.program, begins, names)
    return made


class _Memory:
    """The arena of a program. For each byte, the number of the element that it belongs to."""

    def __init__(self, graph: Graph, program: Program) -> None:
        self.tensors = {t.name: t for t in program.tensors}
        self.elements = _Elements(graph)
        self.bytes = np.zeros(program.arena_bytes, np.int64)

    def place(self, value: Value, name: str) -> tuple[slice, Array]:
        """The place of the value, and the elements that its bytes belong to."""
        stored = self.tensors[name]
        size = ITEMSIZE[stored.dtype]
        whose = (self.elements.of[value].reshape(-1, 1) * 8 + np.arange(size)).reshape(-1)
        return slice(stored.offset, stored.offset + whose.size), whose

    def expect(self, value: Value, name: str, about: str) -> None:
        where, whose = self.place(value, name)
        assert np.array_equal(self.bytes[where], whose), f"{about} finds something else where {value.name} should be"

    def fill(self, value: Value, name: str) -> None:
        where, whose = self.place(value, name)
        self.bytes[where] = whose

    def copy_part(self, value: Value, name: str, axis: int, begin: int, end: int) -> None:
        """Fill the part of `value` from `begin` to `end` along `axis`."""
        region = np.zeros(value.shape, bool)
        np.moveaxis(region, axis, 0)[begin:end] = True
        where, whose = self.place(value, name)
        chosen = np.repeat(region.reshape(-1), whose.size // value.size)
        self.bytes[where] = np.where(chosen, whose, self.bytes[where])


def _play(graph: Graph, program: Program, begins: Sequence[tuple[FusionGroup, int]], names: Mapping[Value, str]) -> None:
    memory = _Memory(graph, program)
    for port, given_port in zip(program.inputs, graph.inputs, strict=True):
        if port.tensor is not None:
            memory.fill(given_port.value, port.tensor)
    ends = [start for _, start in begins[1:]] + [len(program.launches)]
    for (group, start), end in zip(begins, ends, strict=True):
        launches = program.launches[start:end]
        if group.output not in memory.elements.of:
            memory.elements.of[group.output] = memory.elements.of[group.main.input(0)].reshape(group.output.shape)
        asked = {str(arg.value) for launch in launches for arg in launch.args if arg.kind == "tensor"}
        if group.main.op == "Concat":
            _play_concatenation(memory, group, launches, asked, names)
            continue
        for value in group.read():
            if value.constant is None and unreshaped(value).constant is None:
                memory.expect(value, names[value], f"group {group.main.name}")
                assert names[value] in asked
        for value in group.written:
            assert names[value] in asked
            memory.fill(value, names[value])
    for result, port in zip(program.outputs, graph.outputs, strict=True):
        if result.tensor is not None:
            memory.expect(port.value, result.tensor, "the host")
    used = {name for name in (port.tensor for port in program.outputs) if name is not None}
    spans = sorted((memory.tensors[name].offset, memory.tensors[name].offset + memory.tensors[name].nbytes) for name in used)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans)), "results share memory"


def _play_concatenation(
    memory: _Memory, group: FusionGroup, launches: Sequence[Launch], asked: set[str], names: Mapping[Value, str]
) -> None:
    output = group.output
    axis = group.main.attributes["axis"]
    at = 0
    for i, part in enumerate(value for value in group.main.inputs if value is not None):
        if any(launch.name.endswith(f"[{i}]") for launch in launches):
            memory.expect(part, names[part], f"the copy of part {i} for {output.name}")
            assert names[part] in asked and names[output] in asked
            memory.copy_part(output, names[output], axis, at, at + part.shape[axis])
        at += part.shape[axis]
    if output in names:  # otherwise only parts of it are read
        memory.expect(output, names[output], f"{output.name}, once made,")


@pytest.mark.parametrize("everywhere", [False, True], ids=["where-needed", "everywhere"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_every_read_sees_the_write_that_the_graph_means(
    precision: str, everywhere: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if everywhere:
        monkeypatch.setattr(places, "where_needed", lambda apart, least: set(range(len(apart))))
    seen = {"views": 0, "over": 0, "parts": 0}

    @settings(max_examples=100, deadline=None)
    @given(st.integers(0, 10**6))
    def check(seed: int) -> None:
        graph = _graph(Net(seed), tmp_path)
        made = _checked(graph, precision, monkeypatch)
        check_bounds(made.program, made.source.plain)
        assert made.program.live_bytes <= made.program.arena_bytes
        launched = {launch.name for launch in made.program.launches}
        seen["views"] += sum(node.op == "Slice" and node.name not in launched for node in graph.nodes)
        seen["over"] += made.source.plain.count("//@ over")
        seen["parts"] += sum(node.op == "Concat" and f"{node.name}[0]" not in launched for node in graph.nodes)

    check()
    assert seen["views"] and seen["parts"] and (seen["over"] or not everywhere), seen


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("place", PLACES, ids="-".join)
def test_answers_are_right(place: tuple[str, str], precision: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For inputs of every kind. In half, each step may round to half; weights and inputs are halves."""
    monkeypatch.setattr(places, "where_needed", lambda apart, least: set(range(len(apart))))
    net, (device, path) = Net(28, size=20), place
    model = net.proto()
    onnx.save(model, tmp_path / "m.onnx")
    wanted: dict[str, Any] = {"device": device, "memory_path": path}
    bundle = flashmem.compile(tmp_path / "m.onnx", tmp_path / "b", precision=precision, build=False, **wanted)
    with flashmem.Session(bundle, device=device) as session:
        for kind in KINDS if precision == "fp32" else ("normal", "around 1e3", "around -1e4", "positive"):
            feeds = net.feeds(kind)
            for _ in range(2):
                answers = session.run(None, feeds)
                if precision == "fp32":
                    require_right(model, feeds, answers)
                    continue
                for port, answer, right in zip(net.outputs, answers, evaluated(model, feeds, eps=HALF_EPS), strict=True):
                    reach = HALF_EPS * np.abs(right.exact) + 2 * right.spread
                    assert (np.abs(answer - right.exact) <= reach).all(), f"{port}, {kind}"


def _moves(op: str, rows: int, precision: Any, tmp_path: Path, *, twice: bool = False) -> list[str]:
    """The copying launches in a model that splits a matrix of 128 columns after `rows` rows, or concatenates it."""
    columns = 128
    nodes = [helper.make_node("Relu", ["x"], ["a"], "a"), helper.make_node("Tanh", ["x"], ["b"], "b")]
    sizes = numpy_helper.from_array(np.array([rows, 8 - rows], np.int64), "sizes")
    if op == "Split":
        nodes.append(helper.make_node("Split", ["a", "sizes"], ["c", "d"], "move", axis=0))
        nodes += [helper.make_node("Exp", [name], [f"{name}.y"], f"{name}.y") for name in "cd"]
        outputs = {"c.y": rows, "d.y": 8 - rows}
    else:
        nodes = nodes if not twice else nodes[:1]
        nodes.append(helper.make_node("Concat", ["a", "a" if twice else "b"], ["c"], "move", axis=0))
        outputs = {"c": 16}
    infos = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, (n, columns)) for name, n in outputs.items()]
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, (8, columns))
    graph = helper.make_graph(nodes, "moves", [x], infos, [sizes] if op == "Split" else [])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), tmp_path / "m.onnx")
    prepared = prepare(import_model(tmp_path / "m.onnx", {}, why_unsupported))
    program = generate(fuse(prepared), load_descriptor("pocl"), precision=precision).program
    return [launch.name for launch in program.launches if launch.shape.family == "movement"]


def test_what_starts_where_a_buffer_may_start_is_not_copied(tmp_path: Path) -> None:
    assert _moves("Split", 4, "fp32", tmp_path) == _moves("Split", 3, "fp32", tmp_path) == []
    assert _moves("Split", 4, "fp16", tmp_path) == []
    assert _moves("Split", 3, "fp16", tmp_path) == ["move.1"]  # 3 rows of 128 halves are not a multiple of 512 bytes
    assert _moves("Concat", 4, "fp32", tmp_path) == []
    assert _moves("Concat", 4, "fp32", tmp_path, twice=True) == ["move[0]", "move[1]"]
