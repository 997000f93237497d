"""Kernels are checked when a model is compiled, and a kernel that its driver miscompiles is used as it is right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import flashmem
from flashmem import Bundle, Runtime, Session
from flashmem.base.errors import FlashmemWarning
from flashmem.cli.commands.verify import verify_bundle
from flashmem.runtime.kernels import ahead_of_time, children, pool
from flashmem.runtime.kernels.bundle_checks import check_bundle_kernels, program_checks
from flashmem.runtime.kernels.chains import is_chain
from flashmem.runtime.kernels.device_chains import chained
from flashmem.runtime.kernels.verdicts import UNOPTIMISED, Verdicts
from flashmem.runtime.opencl.discovery import list_devices
from tests.support.caches import launches_chained
from tests.support.mini_bundle import write_mini_bundle
from tests.support.miscompiling_worker import CHAINS, KERNEL

pytestmark = pytest.mark.build_apart
DEVICES = list_devices()


@pytest.fixture(params=DEVICES, ids=lambda device: device.descriptor_name)
def device(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """y = |x|; caches are empty."""
    monkeypatch.setenv("FLASHMEM_CACHE_DIR", str(tmp_path / "cache"))
    ports = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, [3, 37])] for name in "xy"]
    graph = helper.make_graph([helper.make_node("Abs", ["x"], ["y"])], "g", *ports)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


@pytest.fixture
def miscompiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "WORKER", "tests.support.miscompiling_worker")


@pytest.fixture
def never_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children of idle priority wait for minutes on a busy machine."""
    monkeypatch.setattr(children, "_only_when_idle", lambda process: None)


def compiled(model: Path, device: Any) -> Bundle:
    return flashmem.compile(model, model.with_suffix(".flashmem"), device=device.descriptor_name)


def absolute(bundle: Bundle, device: Any) -> bool:
    x = np.linspace(-2, 2, 111, dtype=np.float32).reshape(3, 37)
    with Session(bundle, device=device.descriptor_name, build_apart=False) as session:
        return np.array_equal(session.run(None, {"x": x})[0], np.abs(x))


def test_a_kernel_that_is_wrong_is_built_without_optimisation(model: Path, device: Any, miscompiling: None) -> None:
    with pytest.warns(
        FlashmemWarning, match="miscompiles the kernel .*, which is compiled without optimisation there: .* wrong with signed"
    ):
        bundle = compiled(model, device)
    [finding] = Verdicts(device).wrong.values()
    assert finding.options == (UNOPTIMISED,) and finding.trial
    assert absolute(bundle, device), "the binary in the cache is the right one"


def test_the_next_config_is_in_the_place_of_a_wrong_kernel(
    tmp_path: Path, device: Any, miscompiling: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a product, no build of whose first kernel is right; also where that is known before it is compiled."""
    monkeypatch.setenv("FLASHMEM_CACHE_DIR", str(tmp_path / "cache"))
    weight = np.random.default_rng(0).standard_normal((37, 29)).astype(np.float32)
    ports = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)] for name, shape in (("x", [21, 37]), ("y", [21, 29]))
    ]
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], "g", *ports, [onnx.numpy_helper.from_array(weight, "w")]
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), tmp_path / "m.onnx")
    options: Any = {"device": device.descriptor_name, "memory_path": "buffer"}
    [launch] = flashmem.compile(tmp_path / "m.onnx", tmp_path / "plain.flashmem", build=False, **options).program.launches
    monkeypatch.setenv(KERNEL, launch.kernel)
    with pytest.warns(FlashmemWarning, match=f"miscompiles the kernel {launch.kernel}, and another one is in its place"):
        bundle = flashmem.compile(tmp_path / "m.onnx", tmp_path / "m.flashmem", **options)
    again = flashmem.compile(tmp_path / "m.onnx", tmp_path / "again.flashmem", **options)
    for made in (bundle, again):
        assert launch.kernel not in made.source.kernels
        note = f"{launch.kernel} is left out for a kernel of another config, because the driver miscompiles it: "
        assert any(each.startswith(note) for each in made.plan.notes)
        x = np.linspace(-2, 2, 21 * 37, dtype=np.float32).reshape(21, 37)
        with Session(made, device=device.descriptor_name, build_apart=False) as session:
            want = x.astype(np.float64) @ weight.astype(np.float64)
            np.testing.assert_allclose(session.run(None, {"x": x})[0], want, rtol=0, atol=1e-4)


def test_a_wrong_kernel_is_found_right_when_its_driver_is(
    model: Path, device: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(pool, "WORKER", "tests.support.miscompiling_worker")
        with pytest.warns(FlashmemWarning, match="miscompiles"):
            bundle = compiled(model, device)
    name = device.descriptor_name
    assert verify_bundle(bundle.path, name, again=False, seconds=None, as_json=True)
    assert json.loads(capsys.readouterr().out)["kernels"][0]["wrong"], "known, and not checked again"
    (model.parent / "cache/programs").rename(model.parent / "old")  # of the driver that was wrong
    assert verify_bundle(bundle.path, name, again=True, seconds=None, as_json=True)
    assert not json.loads(capsys.readouterr().out)["kernels"][0]["wrong"]
    assert not Verdicts(device).wrong


def test_a_sample_comes_first_and_whole_launches_as_time_allows(
    model: Path, device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead_of_time, "SHARE", 0.0)
    monkeypatch.setattr("flashmem.runtime.checking.check.ELEMENTS", 1)
    bundle = compiled(model, device)
    [checked] = check_bundle_kernels(bundle, device, seconds=-1.0)
    assert checked.finding.sampled or checked.finding.right, "what is small is compared as a whole"
    [checked] = check_bundle_kernels(bundle, device)
    assert checked.finding.right == (checked.trial.key,)


def test_a_bundle_that_meets_a_driver_is_checked_between_runs(
    model: Path, device: Any, miscompiling: None, never_idle: None
) -> None:
    bundle = flashmem.compile(model, model.with_suffix(".flashmem"), device=device.descriptor_name, build=False)
    x = {"x": np.full((3, 37), -1, np.float32)}
    with Session(bundle, device=device.descriptor_name) as session:
        assert session.run(None, x)[0][0, 0] == -1, "imitated"
        assert session._planned.check is not None
        session._planned.check.wait()
        with pytest.warns(FlashmemWarning, match="miscompiles 1 of this bundle's kernels"):
            session.run(None, x)
    with Session(bundle, device=device.descriptor_name) as session:
        assert session.run(None, x)[0][0, 0] == 1


def test_a_runtime_checks_its_bundles_between_runs(model: Path, device: Any, miscompiling: None, never_idle: None) -> None:
    bundle = flashmem.compile(model, model.with_suffix(".flashmem"), device=device.descriptor_name, build=False)
    x = {"x": np.full((3, 37), -1, np.float32)}
    with Runtime(device=device.descriptor_name) as runtime:
        opened = runtime.open(bundle)
        assert opened.run(None, x)[0][0, 0] == -1, "imitated"
        runtime.prepared()  # so that the check has begun
        assert opened.loaded.check is not None
        opened.loaded.check.wait()
        with pytest.warns(FlashmemWarning, match="miscompiles 1 of this bundle's kernels"):
            opened.run(None, x)
        runtime.open(bundle).close()
    with Runtime(device=device.descriptor_name) as runtime:
        assert runtime.open(bundle).run(None, x)[0][0, 0] == 1


@pytest.mark.parametrize("again", [False, True], ids=["sample", "whole"])
def test_the_parts_of_a_wrong_chain_are_used(again: bool, device: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parts, which have the same text, are right; and a driver that is right has the chain again."""
    monkeypatch.setenv("FLASHMEM_CACHE_DIR", str(tmp_path / "cache"))
    launches_chained(monkeypatch)
    bundle = write_mini_bundle(tmp_path / "m.flashmem").open()

    def chains_used() -> int:
        program, _ = chained(bundle.program, bundle.source, bundle.descriptor, device)
        return sum(is_chain(each.launch) for each in program.steady)

    assert chains_used() == 1
    with monkeypatch.context() as patch:
        patch.setattr(pool, "WORKER", "tests.support.miscompiling_worker")
        patch.setenv(CHAINS, "1")
        if again:
            checked = check_bundle_kernels(bundle, device)
            assert [bool(each.finding.wrong) for each in checked] == [bool(each.trial.parts) for each in checked]
            assert "bytes of the whole arena are not what its parts write" in checked[-1].finding.wrong
        else:
            sampled = [job for checks in program_checks(bundle, device) for job in checks.samples()]
            checking = pool.ChildPool(device)
            checking.submit(sampled)
            while checking.step():
                pass
            checking.close()
            assert [bool(job.wrong) for job in sampled] == [bool(job.trials[0].parts) for job in sampled]
    assert chains_used() == 0
    assert verify_bundle(bundle.path, device.descriptor_name, again=False, seconds=None, as_json=True), "what is used is right"
    assert not any(each.finding.wrong for each in check_bundle_kernels(bundle, device, again=True))
    assert chains_used() == 1


def test_a_session_imports_no_interpreter() -> None:
    """Children check, and what they import takes a tenth of a second."""
    asked = "import sys, flashmem.runtime.session; print([name for name in sys.modules if 'interpreter' in name])"
    assert subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_nothing_is_checked_twice(model: Path, device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = compiled(model, device)
    check_bundle_kernels(bundle, device)
    monkeypatch.setattr(pool, "WORKER", "tests.no_such_module")
    [checked] = check_bundle_kernels(bundle, device)
    assert checked.known and not checked.finding.wrong
    assert compiled(model, device).path == bundle.path
