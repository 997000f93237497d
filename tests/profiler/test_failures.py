"""Failures of the profiler: refused launches and loads, kills, damaged files, unusable models."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import onnx
import pytest
from onnx import TensorProto, helper

from flashmem.base.errors import RunError, UserError
from flashmem.planning.capacity.features import launch_features
from flashmem.profiler import measure, run, sessions
from flashmem.profiler.bench import Bench
from flashmem.profiler.cases import Made, elementwise_target, matmul_target
from flashmem.profiler.dataset import Growing, read_dataset
from flashmem.profiler.models import read_models
from flashmem.profiler.rates import MachineRates
from flashmem.runtime.kernels import pool
from flashmem.runtime.opencl.devices import descriptor_for
from flashmem.runtime.opencl.discovery import list_devices
from flashmem.target.descriptor import load_descriptor
from tests.support.command_line import invoke
from tests.support.made_profile import BASIS, law
from tests.support.miscompiling_worker import KERNEL
from tests.support.paths import DATA

POCL = load_descriptor("pocl")


def refuse(*_: object, **__: object) -> NoReturn:
    raise RunError("there is no memory left")


def test_a_load_that_fails_costs_a_launch_that_mode_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device = list_devices()[0]
    descriptor = descriptor_for(device)
    path = descriptor.memory_paths[0]
    default, other, *_ = descriptor.modes[path]
    target = elementwise_target(1 << 20, descriptor.on_path(path))
    with Bench(device, descriptor.on_path(path), tmp_path) as bench:

        def modes() -> set[str]:
            return {row.mode for row in measure._measure_launch(bench, target, (0.5, 2.0), 0, bench.pace)}

        with monkeypatch.context() as patch:
            patch.setattr(bench.loads.transfer(default), "load", refuse)
            assert modes() == {"none", other}
            assert not [thread for thread in threading.enumerate() if thread.name.startswith("flashmem-loader")]
        assert modes() == {"none", default, other}


def test_a_launch_whose_kernel_is_wrong_is_not_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device = list_devices()[0]
    descriptor = descriptor_for(device).on_path("buffer")
    monkeypatch.setenv("FLASHMEM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(pool, "WORKER", "tests.support.miscompiling_worker")
    product, total = matmul_target(5, 12, 40, descriptor), elementwise_target(1 << 10, descriptor)
    monkeypatch.setenv(KERNEL, product.launch.kernel)
    with Bench(device, descriptor, tmp_path) as bench:
        bench.prepare(total)
        with pytest.raises(RunError, match=f"miscompiles it: {product.launch.kernel}: .* are wrong"):
            bench.prepare(product)


def test_a_lane_that_does_not_build_costs_a_launch_that_mode_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device = list_devices()[0]
    descriptor = descriptor_for(device)
    path = descriptor.memory_paths[0]
    target = elementwise_target(1 << 20, descriptor.on_path(path))
    number = descriptor.modes[path][1:].index("interleave")
    with Bench(device, descriptor.on_path(path), tmp_path) as bench:
        build = bench.program
        monkeypatch.setattr(
            bench, "program", lambda text, options: (refuse if text == target.source.lane else build)(text, options)
        )
        rows = measure._measure_launch(bench, target, (0.5,), number, bench.pace)
    assert {row.mode for row in rows} == {"none", descriptor.modes[path][0]}


def test_a_launch_that_needs_too_much_memory_leaves_the_bench_to_others(tmp_path: Path) -> None:
    device = list_devices()[0]
    descriptor = descriptor_for(device)
    descriptor = descriptor.on_path(descriptor.memory_paths[0])
    with Bench(device, descriptor, tmp_path) as bench:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bench.context, "buffer", refuse)
            with pytest.raises(RunError):
                bench.prepare(elementwise_target(1 << 20, descriptor))
        assert bench.prepare(elementwise_target(1 << 10, descriptor)).seconds > 0


def test_a_device_that_refuses_every_launch_is_given_up(tmp_path: Path) -> None:
    bench: Any = SimpleNamespace(supply=Made(POCL.on_path("buffer")), path="buffer", prepare=refuse, pace=refuse)
    growing = Growing(tmp_path / "x.csv", {}, resume=True)
    with pytest.raises(RunError, match="one launch after the other, the last because there is no memory left"):
        measure._measure(measure.ProfileRequest("any", tmp_path), growing, [bench], [], 0.0, lambda what, done: None)
    assert growing.rows == []


def test_a_kill_loses_no_launch_that_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path, rows = tmp_path / "x.csv", law(3)
    Growing(path, {"seed": 0}, resume=True).append(rows[:10])
    text = path.read_text()

    def killed(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    assert Growing(path, {"seed": 0}, resume=True).cases == {rows[0].case, rows[5].case}, "a whole file is left as it is"
    half = text[: text.rindex(",")]
    path.write_text(half)
    with pytest.raises(KeyboardInterrupt):
        Growing(path, {"seed": 0}, resume=True)
    assert path.read_text() == half
    assert [file.name for file in tmp_path.iterdir()] == ["x.csv"]


def test_rates_are_kept_only_if_all_of_them_are_there(tmp_path: Path) -> None:
    file, machine = tmp_path / "rates.json", MachineRates(POCL.rates, {"buffer map": 5e9})
    whole = {"spent": 12.5, **machine.to_dict()}
    older = {**whole, "rates": {key: value for key, value in whole["rates"].items() if key != "layer_seconds"}}
    assert measure._kept_rates(file) is None
    for text in ("", json.dumps(whole)[:100], "[]", "7", json.dumps({"spent": 1}), json.dumps(older)):
        file.write_text(text)
        assert measure._kept_rates(file) is None, text
    file.write_text(json.dumps(whole))
    assert measure._kept_rates(file) == (machine, 12.5)


def test_a_session_that_cannot_be_opened_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"could not open a session to time it: .*nowhere\.flashmem"):
        sessions._open(tmp_path / "nowhere.flashmem", "auto", tmp_path)


@pytest.mark.parametrize(
    ("printed", "seconds"),
    [("0.25 0.01\n", (0.25, 0.01)), ("driver: hello\n0.5 0.1\n\n", (0.5, 0.1)), ("hello\n", None), ("0.5\n", None), ("", None)],
)
def test_what_a_driver_prints_is_not_the_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, printed: str, seconds: tuple[float, float] | None
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 0, printed, ""))
    if seconds is not None:
        assert sessions._open(tmp_path, "auto", tmp_path) == seconds
        return
    with pytest.raises(RunError, match="was to print the seconds"):
        sessions._open(tmp_path, "auto", tmp_path)


def test_a_damaged_dataset_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "x.profile.csv.gz"
    whole = gzip.compress(b"# {}\n" + bytes(range(256)) * 8)
    not_deflated, wrong_sum = whole[:10] + b"\xff" * 40, whole[:-8] + bytes(8)
    for damaged in (b"", whole[:-20], not_deflated, wrong_sum, b"not gzip", gzip.compress(b"\xff\xfe")):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="is not a profile dataset"):
            read_dataset(path)
    with pytest.raises(UserError, match="not of this version"):
        run.basis_of({"basis": {**vars(BASIS), "of a later version": 1}})


def a_model(path: Path, operator: str = "Relu") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    kinds = {"x": TensorProto.FLOAT, "y": TensorProto.INT64 if operator == "NonZero" else TensorProto.FLOAT}
    ports = [helper.make_tensor_value_info(name, kind, (4, 8)) for name, kind in kinds.items()]
    graph = helper.make_graph([helper.make_node(operator, ["x"], ["y"])], "graph", ports[:1], ports[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)
    return path


def test_a_model_is_called_after_its_file_or_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    paths = [a_model(tmp_path / name) for name in ("one/model.onnx", "two/model.onnx", "three.onnx", "conv-small.onnx")]
    monkeypatch.chdir(tmp_path / "two")
    paths[1] = Path("model.onnx")
    found = read_models(paths, POCL.on_path("buffer"))
    assert [[target.case for target in targets] for targets in found] == [["one.0"], ["two.0"], ["three.0"], ["conv-small.0"]]
    assert [targets[0].origin for targets in found] == ["one", "two", "three", "conv-small"]


def test_launches_that_differ_in_their_weights_alone_count_once() -> None:
    (targets,) = read_models([DATA / "gptneo-tiny.onnx"], POCL.on_path("buffer"))
    features = [(target.launch.kernel, launch_features(target.launch, 0, "buffer")) for target in targets]
    assert len(targets) < len(targets[0].program.launches)
    assert {launch.kernel for launch in targets[0].program.launches} == {kernel for kernel, _ in features}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a/x.onnx", "b/x.onnx"], "would both be called 'x'"),
        (["x/model.onnx", "x.onnx"], "would both be called 'x'"),
        (["sample.onnx"], "'sample' is the dataset's name for sampled kernels"),
        (["matmul-7.onnx"], "'matmul-7' is the dataset's name for sampled kernels"),
        (["good.onnx", "NonZero.onnx"], "NonZero.onnx: the model has 1 node that flashmem cannot run"),
        (["good.onnx", "Unique.onnx"], "Unique.onnx: the model has 1 node that flashmem cannot run"),
        (["good.onnx", "dynamic"], "leaves sizes of its inputs open"),
    ],
)
def test_a_model_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, names: list[str], message: str
) -> None:
    monkeypatch.setattr(measure, "Bench", refuse)
    operators = {"NonZero.onnx": "NonZero", "Unique.onnx": "Unique"}
    models = [a_model(tmp_path / name, operators.get(name, "Relu")) for name in names if name != "dynamic"]
    models += [DATA / "gptneo-tiny-dynamic.onnx"] * ("dynamic" in names)
    words = [word for model in models for word in ("--model", str(model))]
    result = invoke("profile", "-o", str(tmp_path / "out"), *words)
    assert result.code == 2 and message in result.err, result.err
    assert "--shape" not in result.err
    assert not (tmp_path / "out").exists()


def test_figures_without_matplotlib_are_refused_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    words = ["profile", "--dataset", str(tmp_path / "nowhere.profile.csv.gz"), "--report", "--figures", str(tmp_path)]
    result = invoke(*words)
    assert result.code == 2 and "`plots` extra" in result.err
