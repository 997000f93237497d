"""Child processes: import paths, output, exit, and the messages when one fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flashmem import Session
from flashmem.base.errors import RunError, UserError
from flashmem.bundle import chat_templates
from flashmem.bundle.language import Template
from flashmem.cli.commands import compiling
from flashmem.profiler import sessions
from flashmem.request.request import BundleRequest
from flashmem.runtime.kernels import builds
from flashmem.runtime.kernels.builds import build_jobs
from flashmem.runtime.kernels.cache import CachedKernels, kernel_key
from flashmem.runtime.kernels.cache_files import ProgramCache
from flashmem.runtime.kernels.pool import ChildPool
from flashmem.runtime.kernels.required import RequiredKernel
from flashmem.runtime.kernels.work_folder import WorkFolder
from flashmem.runtime.opencl.context import Context
from flashmem.runtime.opencl.discovery import list_devices
from flashmem.tools.doctor import selftest, surroundings
from flashmem.tools.sweep import points
from tests.support.mini_bundle import MiniModel, write_mini_bundle

CPUS = [device.descriptor_name for device in list_devices() if device.kind == "cpu"]


@pytest.fixture
def model(tmp_path: Path) -> MiniModel:
    return write_mini_bundle(tmp_path / "m.flashmem")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHMEM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("POCL_CACHE_DIR", str(tmp_path / "pocl"))


STARTS: dict[str, Callable[[Path], object]] = {
    "kernel_processes": lambda folder: Session(folder / "m.flashmem", build_apart=True).close(),
    "selftest": lambda folder: selftest.run_apart(0, folder),
    "compiling": lambda folder: compiling.compile_apart(folder / "none.onnx", BundleRequest()),
    "points": lambda folder: points._run_apart({"bundle": "none", "plan": {}}),
    "sessions": lambda folder: sessions._open(folder / "none", CPUS[0], folder / "cache"),
    "surroundings": lambda folder: surroundings._refusal("/none.so"),
    "chat_templates": lambda folder: chat_templates.rendered(Template("x", {}), [[]], most_characters=1),
}


@pytest.mark.parametrize("start", STARTS)
def test_nothing_is_imported_from_the_current_folder(
    start: str, model: MiniModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For instance a numpy.py beside a model."""
    told = tmp_path / "told"
    for name in ("numpy", "ctypes", "json", "argparse", "pyopencl"):
        (tmp_path / f"{name}.py").write_text(f"open({str(told)!r}, 'w')\nraise SystemExit(3)\n")
    (tmp_path / "none.onnx").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    with suppress(RunError, SystemExit):  # most find nothing to work on, but only after importing numpy
        STARTS[start](tmp_path)
    assert not told.exists()


_BUILD = """
import sys, time
from types import SimpleNamespace
from flashmem.runtime.kernels.builds import build_jobs
from flashmem.runtime.kernels.pool import ChildPool
from flashmem.runtime.kernels.required import RequiredKernel
from flashmem.runtime.opencl.discovery import find_device
from flashmem.runtime.kernels import children
start = children._start
def started(*given):
    child = start(*given)
    print(child.pid, flush=True)
    return child
children._start = started
text = "__kernel void f(__global float* a) { a[get_global_id(0)] = 1; }"
device, program = find_device("cpu"), SimpleNamespace(build_options=(), tensors=())
pool = ChildPool(device)
pool.submit(build_jobs({"ab" * 32: RequiredKernel("f", text, ())}, program, device, lambda key, binary: None))
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children with their parent")
def test_a_child_whose_build_does_not_end_ends_with_its_parent(tmp_path: Path) -> None:
    """The parent is stopped, so that it does not see the end of its stdin, as in a build that does not end."""
    command = [sys.executable, "-c", _BUILD.replace('"cpu"', repr(CPUS[0]))]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        while "kernels.worker" not in Path(f"/proc/{child}/cmdline").read_text() or not _has_opencl(child):
            time.sleep(0.02)  # it has only just been forked; it asks to be ended before it starts a driver
        os.kill(child, signal.SIGSTOP)
        parent.kill()
    try:
        _wait_for(lambda: not _lives(child))
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    (left,) = tmp_path.glob("flashmem-build-*")
    os.utime(left, (0, 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(tmp_path))
        first = WorkFolder()
        assert not left.exists(), "who builds next removes what was left"
        os.utime(first.name, (0, 0))
        second = WorkFolder()
    assert Path(first.name).exists(), "what somebody holds stays"
    first.remove()
    second.remove()
    assert not list(tmp_path.glob("flashmem-build-*"))


def _has_opencl(process: int) -> bool:
    return "OpenCL" in Path(f"/proc/{process}/maps").read_text()


def _lives(process: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def _wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def _build(
    monkeypatch: pytest.MonkeyPatch, program: str, keep: Callable[[str, bytes], None] = lambda key, binary: None
) -> list[subprocess.Popen[bytes]]:
    """Let a child that runs `program` build a kernel; returns the children."""
    children: list[subprocess.Popen[bytes]] = []

    def start(module: str, device: Any, folder: Path, errors: Path) -> subprocess.Popen[bytes]:
        with errors.open("wb") as stderr:
            pipe = subprocess.PIPE
            children.append(subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, stderr=stderr))
        return children[-1]

    monkeypatch.setattr("flashmem.runtime.kernels.children._start", start)
    device: Any = SimpleNamespace(compiles_at_launch=False)
    given: Any = SimpleNamespace(build_options=())
    pool = ChildPool(device)
    try:
        pool.submit(build_jobs({"key": RequiredKernel("f", "", ())}, given, device, keep))
        while pool.step():
            pass
        pool.check("do something else")
    finally:
        pool.close()
    return children


def test_a_build_that_takes_too_long_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builds, "LONGEST", 0.2)
    with pytest.raises(RunError, match=r"^the kernel f was not built within 0 s; do something else$"):
        _build(monkeypatch, "import time\nwhile True: time.sleep(60)")


def test_what_a_driver_said_as_it_ended_the_process_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = r"^the driver ended the process that built the kernel f \(Assertion failed\); do something else$"
    with pytest.raises(RunError, match=expected):
        _build(monkeypatch, "import os, sys\nprint('Assertion failed', file=sys.stderr, flush=True)\nos.abort()")


def test_whatever_goes_wrong_beside_a_child_is_told_to_who_waits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A UserError, or a warning that is an error for the user, in the thread that feeds a child."""
    (tmp_path / "binary").write_bytes(b"binary")
    answer = f'input()\nprint(\'{{"file": "{tmp_path / "binary"}"}}\', flush=True)\ninput()'

    def refuse(key: str, binary: bytes) -> None:
        assert binary == b"binary"
        raise UserError("the disk is full")

    with pytest.raises(RunError, match=r"^kernels cannot be built: UserError: the disk is full; do something else$"):
        _build(monkeypatch, answer, refuse)
    kept: list[str] = []
    _build(monkeypatch, answer, lambda key, binary: kept.append(key))
    assert kept == ["key"]


def test_kernels_that_cannot_be_built_for_want_of_a_folder_are_one_sentence_each_time(tmp_path: Path) -> None:
    context = Context(list_devices()[0])
    wanted = RequiredKernel("f", "__kernel void f(__global float* a) { a[0] = 1; }", ())

    def build(missing: Any) -> Any:
        raise UserError("no temporary folder can be written")

    cache = ProgramCache(tmp_path)
    cache.write(kernel_key(context.device, wanted, ()), b"no program of any driver")
    kernels = CachedKernels(cache, context, (), [wanted], build=build)
    for _ in range(2):
        with pytest.raises(UserError, match="no temporary folder"):
            kernels.kernel("f", [])


_SILENT = """
import sys
import numpy as np
from flashmem import Session
with Session(sys.argv[1], device=sys.argv[2], build_apart=sys.argv[4] == "apart") as session:
    session.run(None, dict(np.load(sys.argv[3])))
"""


@pytest.mark.parametrize("device", CPUS)
@pytest.mark.parametrize("where", ["here", "apart"])
def test_what_the_compiler_counts_reaches_nobody(device: str, where: str, tmp_path: Path) -> None:
    """A line such as `3 warnings generated.`, on descriptor 2, at the first run of a model."""
    model = write_mini_bundle(tmp_path / "w.flashmem", warned=True)
    np.savez(tmp_path / "inputs.npz", **model.inputs())
    (tmp_path / "pocl").mkdir()
    command = [sys.executable, "-c", _SILENT, str(model.path), device, str(tmp_path / "inputs.npz"), where]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
