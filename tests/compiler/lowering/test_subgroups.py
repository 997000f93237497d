"""Row reductions across work-items, by local memory or subgroup shuffles: correct and with the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashmem
from flashmem.base.types import MemoryPath
from flashmem.compiler.configs.listed import listed_configs, with_configs
from flashmem.compiler.configs.workload import Workload
from flashmem.compiler.kernels.reduction.configs import RowConfig
from flashmem.compiler.selection.configs import choose
from flashmem.compiler.selection.selector import KernelSelector
from flashmem.profiler.descriptor import write_descriptor
from flashmem.profiler.shapes import RowSoftmax
from flashmem.profiler.tuning import Case, TuningRequest, tune
from flashmem.program.kernel_text import kernel_texts
from flashmem.runtime.opencl.context import Context
from flashmem.runtime.opencl.devices import descriptor_for
from flashmem.runtime.opencl.discovery import find_device, list_devices
from flashmem.target.descriptor import SHUFFLES, load_descriptor
from tests.support.compared import PLACES, Nodes, require_right
from tests.support.inputs import KINDS, floats

SHARED = RowConfig("shared", 4, 64)


def shuffled(config: RowConfig) -> RowConfig:
    return replace(config, name=f"{config.name} shuffled", subgroups=True)


SHUFFLING = [device.descriptor_name for device in list_devices() if device.shuffles]
CASES = [(name, path, (SHARED, shuffled(SHARED))) for name, path in PLACES if name in SHUFFLING and path == "buffer"]
CASES += [
    (name, path, (shuffled(replace(SHARED, lanes=16)),)) for name, path in PLACES if name in SHUFFLING and path != "buffer"
]
CASES += [(name, path, (shuffled(SHARED),)) for name, path in PLACES if name not in SHUFFLING and path == "buffer"]
"""Work-items per row: more than a subgroup has, as many, and fewer; and the form without shuffles."""


def model() -> Nodes:
    """Rows narrower than a group, rows of no multiple of it, and rows with NaN."""
    nodes, random = Nodes(opset=21), np.random.default_rng(8)

    def numbers(*shape: int) -> Any:
        return random.standard_normal(shape).astype(np.float32)

    for columns in (5, 37, 1031):
        nodes.node("Softmax", nodes.input(4 * numbers(5, columns)), axis=-1)
    hidden = 4 * numbers(7, 77)
    hidden[0, 5], hidden[1, 7], hidden[2], hidden[3, 9], hidden[4, 70] = -np.inf, np.nan, -0.0, np.inf, -np.nan
    rows, axes = nodes.input(hidden), nodes.constant(np.array([-1]))
    nodes.node("LogSoftmax", rows, axis=-1)
    nodes.node("ReduceMax", rows, axes, keepdims=0)
    wide = nodes.input(numbers(3, 2, 333))
    nodes.node("LayerNormalization", wide, nodes.constant(numbers(333)), nodes.constant(numbers(333)), axis=-1)
    nodes.node("ReduceSum", wide, axes)
    nodes.node("ReduceSum", nodes.input(random.integers(-(2**31), 2**31, (4, 99)).astype(np.int64)), axes, dtypes=("int64",))
    image = nodes.input(numbers(2, 12, 5, 7))
    for op, weights in (("Conv", (12, 12, 1, 1)), ("InstanceNormalization", (3,)), ("Conv", (5, 12, 1, 1))):
        if op == "Conv":  # so that tensors in between are channels-last
            [image] = nodes.node(op, image, nodes.constant(numbers(*weights)))
            continue
        grouped = nodes.node("Reshape", image, nodes.constant(np.array([2, 3, -1])))
        normal = nodes.node(op, *grouped, nodes.constant(numbers(*weights)), nodes.constant(numbers(*weights)))
        [image] = nodes.node("Reshape", *normal, nodes.constant(np.array([2, 12, 5, 7])))
        del nodes.outputs[-4:]
    return nodes


NODES = model()


def feeds_of(kind: str) -> dict[str, Any]:
    """Inputs of the model with floats of a kind. NaN, infinities and -0 stay where they are."""
    made = {}
    for name, data in NODES.feeds.items():
        drawn = floats(*data.shape, kind=kind) if data.dtype == np.float32 else data
        made[name] = np.where(np.isfinite(data) & (data != 0), drawn, data).astype(data.dtype)
    return made


FEEDS = {kind: NODES.feeds if kind == "normal" else feeds_of(kind) for kind in KINDS}


@pytest.mark.parametrize(("device", "path", "configs"), CASES, ids=lambda each: each if isinstance(each, str) else "")
def test_shuffles_give_the_bits_of_local_memory(
    device: str, path: MemoryPath, configs: tuple[RowConfig, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For sums; rsqrt, division and others may differ in the last bits in a kernel that is compiled for subgroups."""
    file = tmp_path / "m.onnx"
    file.write_bytes(NODES.proto().SerializeToString())
    chosen = KernelSelector.config
    answers: dict[RowConfig, dict[str, list[Any]]] = {}
    for config in configs:

        def one(selector: KernelSelector, workload: Workload, *others: Any, taken: RowConfig = config) -> RowConfig:
            return taken if workload.family == "reduce_rows" else chosen(selector, workload, *others)

        monkeypatch.setattr(KernelSelector, "config", one)
        bundle = flashmem.compile(file, tmp_path / config.name, device=device, memory_path=path, build=False)
        sharing = [launch for launch in bundle.program.launches if launch.local_size == (config.lanes, 1)]
        assert {launch.shape.family for launch in sharing} == {"reduce_rows", "normalize_groups"} and len(sharing) == 9
        with_shuffles = [text for text in kernel_texts(bundle.source.plain).values() if "FM_SHUFFLE(" in text]
        assert len(with_shuffles) == 6 * config.subgroups  # one kernel each, except for integers
        for mode in dict.fromkeys((load_descriptor(device).modes[path][0], "interleave")):
            with flashmem.Session(bundle, device=device, mode=mode) as session:
                for kind, feeds in FEEDS.items():
                    answers.setdefault(config, {}).setdefault(kind, []).append(session.run(None, feeds))
    first, *others = answers.values()
    for kind, feeds in FEEDS.items():
        for made in answers.values():
            require_right(NODES.proto(), feeds, made[kind][0], against_runtime=False)
        for number, port in enumerate(NODES.outputs):
            about = f"{port.name}, {kind}"
            for made in answers.values():
                assert len({each[number].tobytes() for each in made[kind]}) == 1, about  # in every transfer mode
            if port.name.startswith("Reduce"):
                assert all(other[kind][0][number].tobytes() == first[kind][0][number].tobytes() for other in others), about


PROBE = """
__kernel void probe(__global int* width)
{
    width[get_global_id(0)] = FM_SUBGROUP(16) + FM_SHUFFLE(0.0f, 1) + 100 * FM_SUBGROUP_ITEM;
}
"""


@pytest.mark.parametrize("device", list_devices(), ids=lambda device: device.descriptor_name)
def test_a_driver_with_the_extension_shuffles(device: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels' own prelude, used to count the work-items that it would join by shuffles."""
    monkeypatch.setattr(KernelSelector, "config", lambda *asked: shuffled(SHARED))
    (tmp_path / "m.onnx").write_bytes(softmax().proto().SerializeToString())
    bundle = flashmem.compile(tmp_path / "m.onnx", tmp_path / "b", device="generic-gpu", build=False)
    [text] = kernel_texts(bundle.source.plain).values()
    context = Context(device)
    queue, width = context.queue(), context.buffer(4 * 32)
    kernel = context.build(text[: text.index("//@")] + PROBE, bundle.program.build_options).kernel("probe", [width])
    queue.launch_all([queue.prepare(kernel, (32,), (16,))])
    found = np.zeros(32, np.int32)
    queue.read(found, width)
    if not device.shuffles:
        assert (found == 1).all()
    else:
        size = int(found[0])
        assert size in (2, 4, 8, 16)
        np.testing.assert_array_equal(found, size + 100 * (np.arange(32) % 16 % size))


def softmax() -> Nodes:
    nodes = Nodes()
    nodes.node("Softmax", nodes.input(np.zeros((3, 20), np.float32)), axis=-1)
    return nodes


@pytest.mark.parametrize(
    ("name", "wanted"), [("adreno740", True), ("adreno750", True), ("mali-g710", True), ("mali-g715", True), ("nvidia", False)]
)
def test_who_shuffles(name: str, wanted: bool, tmp_path: Path) -> None:
    descriptor = load_descriptor(name)
    assert choose(descriptor, Workload("reduce_rows", "buffer", 128, 768, 1)).subgroups == wanted
    (tmp_path / "m.onnx").write_bytes(softmax().proto().SerializeToString())
    bundle = flashmem.compile(tmp_path / "m.onnx", tmp_path / "b", device=name, build=False)
    assert ("FM_SHUFFLE(" in bundle.source.plain) == wanted
    [launch] = bundle.program.launches
    assert launch.local_size == (descriptor.tile.lanes, 1)


def test_a_driver_without_the_extension_gets_no_such_config(monkeypatch: pytest.MonkeyPatch) -> None:
    device = list_devices()[0]
    listed = replace(with_configs(load_descriptor(device.descriptor_name), [SHARED, shuffled(SHARED)]), instruction_set="")
    monkeypatch.setattr("flashmem.runtime.opencl.devices.load_descriptor", lambda name: listed)
    for extension in (*SHUFFLES, "cl_khr_fp64"):
        here = listed_configs(descriptor_for(replace(device, version="OpenCL 3.0", extensions=frozenset({extension}))))
        assert here == ((SHARED, shuffled(SHARED)) if extension in SHUFFLES else (SHARED,))
    assert not replace(device, version="OpenCL 2.0 x", extensions=frozenset(SHUFFLES)).shuffles
    assert SHARED.code != shuffled(SHARED).code


@pytest.mark.parametrize("device", [list_devices()[0].descriptor_name])
def test_tuning_measures_them(device: str, tmp_path: Path) -> None:
    listed = replace(with_configs(descriptor_for(find_device(device)), [SHARED, shuffled(SHARED)]), tuned="", capacity_model="")
    write_descriptor(tmp_path, listed, "", "device")
    case = Case(RowSoftmax(3, 50), "buffer")
    result = tune(TuningRequest(device, tmp_path, 5.0, ("reduce_rows",)), lambda stage, fraction: None, [case])
    assert {timing.config for timing in result.database.timings} == {"tile", "shared", "shared shuffled"}
    assert all(timing.seconds and timing.workload == case.workload for timing in result.database.timings)
    tuned = load_descriptor(str(result.descriptor))
    assert choose(tuned, case.workload).name == min(result.database.timings, key=lambda timing: timing.seconds or 1.0).config
