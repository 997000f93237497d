"""Kernels are built when a model is compiled, and the first run builds nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

import flashmem
from flashmem import Bundle, Session
from flashmem.base.errors import BundleError, RunError, UserError
from flashmem.bundle.manifest import BINARIES
from flashmem.cli.commands.bundles import check_bundle
from flashmem.program.kernel_text import kernel_texts
from flashmem.runtime.kernels import ahead_of_time as kernel_builder
from flashmem.runtime.kernels import builds
from flashmem.runtime.kernels.required import SMALL_GRID
from flashmem.runtime.opencl.context import Context
from flashmem.runtime.request.options import find_device
from tests.support.caches import kernels_built_as_for_users
from tests.support.compared import PLACES
from tests.support.paths import DATA

pytestmark = pytest.mark.build_apart

IDS = ["-".join(place) for place in PLACES]
DEVICES = list(dict.fromkeys(device for device, _ in PLACES))

_WHAT_POCL_COMPILES = """
import json, os, sys
from pathlib import Path
import numpy as np
from flashmem import Session

def compiled():
    return {str(path): path.stat().st_mtime_ns for path in Path(os.environ["POCL_CACHE_DIR"]).rglob("*.so")}

with Session(sys.argv[1], device="pocl") as session:
    before = compiled()
    session.run(None, dict(np.load(sys.argv[2])))
    print(json.dumps([len(before), before == compiled()]))
print(compiled() == before)
"""


def write_model(path: Path, rows: int, width: int) -> dict[str, np.ndarray[Any, Any]]:
    """Write a product, a transposition of activations, and an elementwise operator over a large grid; returns inputs."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((width, 2 * width), np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["product"]),
        helper.make_node("Transpose", ["product"], ["turned"], perm=[1, 0]),
        helper.make_node("Sigmoid", ["turned"], ["y"]),
        helper.make_node("Abs", ["many"], ["z"]),
    ]
    many = 16 * (SMALL_GRID + 1) * rows // 40
    inputs = [("x", [rows, width]), ("many", [many])]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs],
        [
            helper.make_tensor_value_info("y", TensorProto.FLOAT, [2 * width, rows]),
            helper.make_tensor_value_info("z", TensorProto.FLOAT, [many]),
        ],
        [numpy_helper.from_array(weight, "w")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return {"x": rng.standard_normal((rows, width), np.float32), "many": rng.standard_normal(many, np.float32)}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache for all tests of this file."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def cache(kept: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASHMEM_CACHE_DIR", str(kept))
    return kept


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new cache for one test."""
    monkeypatch.setenv("FLASHMEM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache/programs"


@pytest.fixture
def nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("a kernel is built")

    monkeypatch.setattr(Context, "build", refuse)


@pytest.mark.parametrize(("device", "path"), PLACES, ids=IDS)
def test_a_run_after_compile_builds_nothing(
    device: str, path: Any, cache: Path, tmp_path: Path, nothing_is_built: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = write_model(tmp_path / "m.onnx", 40, 32)
    bundle = flashmem.compile(tmp_path / "m.onnx", tmp_path / "m.flashmem", device=device, memory_path=path)
    with Session(bundle, device=device) as session:
        y, _ = session.run(None, inputs)
    assert y.shape == (64, 40)
    if device == "pocl":  # it compiles outside clBuildProgram, which its folder shows
        np.savez(tmp_path / "inputs.npz", **inputs)
        (tmp_path / "pocl").mkdir()
        done = subprocess.run(
            [sys.executable, "-c", _WHAT_POCL_COMPILES, str(bundle.path), str(tmp_path / "inputs.npz")],
            env={**os.environ, "POCL_CACHE_DIR": str(tmp_path / "pocl")}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        first, last = done.stdout.splitlines()
        there, same = json.loads(first)
        assert there > 0 and same and last == "True"
    # A network with other sizes has the same kernels.
    write_model(tmp_path / "n.onnx", 80, 64)
    monkeypatch.setattr(builds.BuildJob, "run", refuse_to_build)
    flashmem.compile(tmp_path / "n.onnx", tmp_path / "n.flashmem", device=device, memory_path=path)


def refuse_to_build(job: Any, worker: Any) -> None:
    """In place of `BuildJob.run`."""
    raise AssertionError("a kernel is built")


@pytest.mark.parametrize("device", DEVICES)
def test_only_the_lanes_that_the_plan_uses_are_built(device: str, cache: Path, tmp_path: Path, nothing_is_built: None) -> None:
    inputs = write_model(tmp_path / "m.onnx", 40, 32)
    bundle = flashmem.compile(
        tmp_path / "m.onnx", tmp_path / "m.flashmem", device=device, mode="interleave", strategy="always-next"
    )
    with kernel_builder.KernelBuilder(device) as kernels:
        built = kernels.finish(bundle)
    assert built is not None and built.built == 0
    texts = kernel_texts(bundle.source.plain) | kernel_texts(bundle.source.lane)
    assert len(built.keys) < len(texts) + len(bundle.source.kernels)
    with Session(bundle, device=device) as session:
        assert session.mode == "interleave"
        session.run(None, inputs)


def test_nothing_is_built_where_that_is_not_asked_for_or_the_device_is_elsewhere(
    empty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(builds.BuildJob, "run", refuse_to_build)
    write_model(tmp_path / "m.onnx", 40, 32)
    flashmem.compile(tmp_path / "m.onnx", tmp_path / "m.flashmem", device=DEVICES[0], build=False)
    flashmem.compile(tmp_path / "m.onnx", tmp_path / "m.flashmem", device="adreno750")
    assert not empty.exists()
    assert capfd.readouterr() == ("", "")
    with pytest.raises(UserError, match="no device adreno750 is here"):
        flashmem.compile(tmp_path / "m.onnx", tmp_path / "m.flashmem", device="adreno750", with_binaries=True)
    with pytest.raises(UserError, match="leave out either --no-build or --with-binaries"):
        flashmem.compile(tmp_path / "m.onnx", tmp_path / "m.flashmem", build=False, with_binaries=True)


def test_a_kernel_that_is_refused_is_an_error_of_compile(empty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = kernel_builder.required_kernels

    def spoiled(*given: Any) -> Any:
        plain, lane = wanted(*given)
        return tuple(replace(each, text=each.text + "}") for each in plain), lane

    write_model(tmp_path / "m.onnx", 40, 32)
    monkeypatch.setattr(kernel_builder, "required_kernels", spoiled)
    with pytest.raises(RunError, match=r"the kernel .* cannot be built: .*; compile with --no-build"):
        flashmem.compile(tmp_path / "m.onnx", tmp_path / "m.flashmem", device=DEVICES[0])
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RunError, match="the driver ended the process that built the kernel"):
        flashmem.compile(tmp_path / "m.onnx", tmp_path / "m.flashmem", device=DEVICES[0])
    monkeypatch.setattr(sys, "executable", "/no/python")
    with pytest.raises(RunError, match="no process that works on kernels can be started"):
        flashmem.compile(tmp_path / "m.onnx", tmp_path / "m.flashmem", device=DEVICES[0])
    assert not list(empty.glob("*.bin"))


def children_of(process: int) -> list[str]:
    """Ids of the child processes of a process, from all of its threads."""
    found = list[str]()
    for thread in Path(f"/proc/{process}/task").iterdir():
        with suppress(OSError):  # the thread has ended
            found += (thread / "children").read_text().split()
    return found


def test_an_interrupt_ends_those_who_build(tmp_path: Path) -> None:
    """Ctrl-C reaches only the command: it ends its children, and no partial file remains."""
    model = DATA / "resnet-tiny.onnx"
    environment = {**os.environ, "FLASHMEM_CACHE_DIR": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "flashmem", "compile", str(model), "-o", str(tmp_path / "m.flashmem")]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "build kernels" in line:
                break
        while not (children := children_of(process.pid)):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        *steps, last = process.stderr.read().splitlines()
    assert last == "flashmem: interrupted" and all(step.startswith("flashmem: compiling ") for step in steps)
    assert process.returncode == 130
    assert not any(Path(f"/proc/{child}").exists() for child in children)
    assert not list(tmp_path.glob("flashmem-build-*"))
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.suffix != ".bin"]


@pytest.fixture(scope="module", params=DEVICES)
def carrying(request: pytest.FixtureRequest, kept: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A bundle with binaries, its device, inputs, and the expected answers."""
    folder = tmp_path_factory.mktemp("carrying")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHMEM_CACHE_DIR", str(kept))
        inputs = write_model(folder / "m.onnx", 40, 32)
        kernels_built_as_for_users(patch)
        bundle = flashmem.compile(folder / "m.onnx", folder / "m.flashmem", device=request.param, with_binaries=True)
        with Session(bundle, device=request.param) as session:
            yield bundle, request.param, inputs, session.run(None, inputs)


def answers(bundle: Bundle, device: str, inputs: Any) -> list[Any]:
    with Session(bundle, device=device) as session:
        return session.run(None, inputs)


def test_a_bundle_carries_its_kernels(carrying: Any, empty: Path, nothing_is_built: None) -> None:
    bundle, device, inputs, expected = carrying
    for opened in (bundle, Bundle.open(bundle.path)):
        for got, wanted in zip(answers(opened, device, inputs), expected, strict=True):
            np.testing.assert_array_equal(got, wanted)
    check_bundle(bundle.path, as_json=False)


def test_kernels_for_another_driver_are_not_used(carrying: Any, empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle, device, inputs, expected = carrying
    other = replace(find_device(device), driver_version="another")
    monkeypatch.setattr("flashmem.runtime.request.options.find_device", lambda *_, **__: other)
    loaded: list[bytes] = []
    monkeypatch.setattr(Context, "load", lambda _, binary, options: loaded.append(binary))
    with Session(bundle, device=device, build_apart=False) as session:
        answered = session.run(None, inputs)
    for got, wanted in zip(answered, expected, strict=True):
        np.testing.assert_array_equal(got, wanted)
    assert not loaded


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(at=st.floats(0, 1, exclude_max=True), flipped=st.integers(1, 255), cut=st.booleans())
def test_damaged_kernels_are_not_used(carrying: Any, at: float, flipped: int, cut: bool) -> None:
    bundle = carrying[0]
    path = bundle.files / BINARIES
    content = path.read_bytes()
    place = int(at * len(content))
    try:
        path.write_bytes(content[:place] + (b"" if cut else bytes([content[place] ^ flipped]) + content[place + 1 :]))
        opened = Bundle.open(bundle.path)
        assert opened.binaries is None
        with pytest.raises(BundleError, match="its compiled kernels are not what was written"):
            check_bundle(bundle.path, as_json=False)
    finally:
        path.write_bytes(content)
    assert Bundle.open(bundle.path).binaries == content


def test_without_its_kernels_a_bundle_still_answers(carrying: Any, cache: Path) -> None:
    bundle, device, inputs, expected = carrying
    content = (bundle.files / BINARIES).read_bytes()
    (bundle.files / BINARIES).unlink()
    try:
        opened = Bundle.open(bundle.path)
        assert opened.binaries is None
        for got, wanted in zip(answers(opened, device, inputs), expected, strict=True):
            np.testing.assert_array_equal(got, wanted)
    finally:
        (bundle.files / BINARIES).write_bytes(content)
