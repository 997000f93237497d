"""The program cache: a second process compiles nothing, and any doubt is a miss."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmem import Session
from flashmem.base.errors import RunError
from flashmem.runtime.kernels.cache import CachedKernels, kernel_key
from flashmem.runtime.kernels.cache_files import ProgramCache, packed_entries, unpacked_entries
from flashmem.runtime.kernels.required import KernelLaunch, RequiredKernel
from flashmem.runtime.opencl import context as opencl
from flashmem.runtime.opencl import undocumented
from flashmem.runtime.opencl.context import Context
from flashmem.runtime.opencl.discovery import list_devices
from tests.support.mini_bundle import write_mini_bundle

pytestmark = pytest.mark.build_apart

KEY = "ab" * 32
SOURCE = "__kernel void f(__global float* a) { a[get_global_id(0)] = get_global_id(0); }"
WANTED = RequiredKernel("f", SOURCE, (KernelLaunch(((64,), (1,)), ()),))

_RUN_BUNDLE = """
import json, sys, time
import numpy as np
from flashmem import Session
from flashmem.runtime.opencl.discovery import find_device
from flashmem.runtime.engine.report import process_peak_rss
find_device(sys.argv[2])
before = process_peak_rss()
with Session(sys.argv[1], device=sys.argv[2], mode=sys.argv[3], build_apart=sys.argv[5] == "apart") as session:
    session.run(None, dict(np.load(sys.argv[4])))
    after = process_peak_rss()
print(json.dumps({"grown": after - before, "init": session.last_run.latency.init}))
"""


CPUS = [device.descriptor_name for device in list_devices() if device.kind == "cpu"]


# Each device in one of two modes: kernels with a copy stream are built by the same processes as others.
@pytest.mark.parametrize(("device", "mode"), [(device, ("interleave", "map")[at % 2]) for at, device in enumerate(CPUS)])
def test_no_process_that_answers_holds_a_compiler_and_the_second_does_not_build(device: str, mode: str, tmp_path: Path) -> None:
    """Peak memory (VmHWM) shows a compilation, which uses LLVM's memory. PoCL's own cache is empty for all processes."""
    model = write_mini_bundle(tmp_path / "m.flashmem")
    np.savez(tmp_path / "inputs.npz", **model.inputs())

    def run(name: str, where: str = "apart") -> dict[str, float]:
        cache = tmp_path / f"cache-{where}"
        environment = {**os.environ, "FLASHMEM_CACHE_DIR": str(cache), "POCL_CACHE_DIR": str(tmp_path / name)}
        (tmp_path / name).mkdir()
        arguments = [str(tmp_path / "m.flashmem"), device, mode, str(tmp_path / "inputs.npz"), where]
        done = subprocess.run(
            [sys.executable, "-c", _RUN_BUNDLE, *arguments], env=environment, capture_output=True, text=True, check=True
        )
        result: dict[str, float] = json.loads(done.stdout)
        return result

    assert run("itself", "here")["grown"] > 64 << 20
    first, second = run("first"), run("second")
    assert max(first["grown"], second["grown"]) < 20 << 20
    assert second["init"] < first["init"] / 2


def test_a_session_fills_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When it opens; or when it closes, if it builds the kernels itself."""
    monkeypatch.setenv("FLASHMEM_CACHE_DIR", str(tmp_path / "cache"))
    model = write_mini_bundle(tmp_path / "m.flashmem")
    with Session(model.path, mode="map", build_apart=False):
        pass
    assert not (tmp_path / "cache").exists()  # before a kernel has run, some drivers would give a part of a program
    with Session(model.path, mode="map", build_apart=False) as session:
        session.run(None, model.inputs())
    assert len(list((tmp_path / "cache/programs").glob("*.bin"))) == 1  # one program of three kernels
    monkeypatch.setenv("FLASHMEM_CACHE_DIR", str(tmp_path / "cache"))
    shutil.rmtree(tmp_path / "cache")
    Session(model.path, mode="map").close()
    assert len(list((tmp_path / "cache/programs").glob("*.bin"))) == 3  # one for each kernel
    assert len(list((tmp_path / "cache/programs").iterdir())) == 3  # no temporary file remains


@pytest.mark.parametrize("spoil", ["truncated", "flipped", "empty", "garbage", "other key"])
def test_a_spoiled_entry_is_a_miss_and_is_written_anew(spoil: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHMEM_CACHE_DIR", str(tmp_path))
    model = write_mini_bundle(tmp_path / "m.flashmem")
    inputs = model.inputs()
    with Session(model.path, mode="map") as session:
        expected = session.run(None, inputs)
    entry = next((tmp_path / "programs").glob("*.bin"))
    whole = entry.read_bytes()
    middle = len(whole) // 2
    entry.write_bytes(
        {
            "truncated": whole[:-7],
            "flipped": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
            "empty": b"",
            "garbage": b"\x7fELF" * 100,
            "other key": whole.replace(bytes.fromhex(entry.stem), bytes(32)),
        }[spoil]
    )
    assert ProgramCache().read(entry.stem) is None
    with Session(model.path, mode="map") as session:
        for got, wanted in zip(session.run(None, inputs), expected, strict=True):
            np.testing.assert_array_equal(got, wanted)
    assert ProgramCache().read(entry.stem) is not None


def test_a_binary_that_the_driver_refuses_is_a_miss(tmp_path: Path) -> None:
    context, cache = Context(list_devices()[0]), ProgramCache(tmp_path)
    cache.write(kernel_key(context.device, WANTED, ()), b"no program of any driver")
    opened = CachedKernels(cache, context, (), [WANTED])
    assert opened.compiled == 1
    opened.save()
    assert opened.compiled == 0
    assert CachedKernels(cache, context, (), [WANTED]).compiled == 0
    binary = cache.read(kernel_key(context.device, WANTED, ()))
    assert binary is not None
    cache.write(kernel_key(context.device, WANTED, ()), b"no program of any driver")
    built: list[str] = []

    def build(missing: Mapping[str, RequiredKernel]) -> dict[str, bytes]:
        built.extend(missing)
        return dict.fromkeys(missing, binary)

    opened = CachedKernels(cache, context, (), [WANTED], build=build)
    opened.kernel("f", [context.buffer(1024)])
    assert opened.compiled == 0 and built == [kernel_key(context.device, WANTED, ())]


def test_kernels_are_read_while_the_context_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device, cache, make, made = list_devices()[0], ProgramCache(tmp_path), undocumented.make_context, threading.Event()
    CachedKernels(cache, Context(device), (), [WANTED]).save()
    read, reading = list[str](), cache.read

    def note(key: str) -> bytes | None:
        read.append(key)
        return reading(key)

    def make_late(handle: Any) -> Any:
        assert made.wait(20)
        return make(handle)

    monkeypatch.setattr(cache, "read", note)
    monkeypatch.setattr(undocumented, "make_context", make_late)
    context = Context(device, later=True)
    opened, ends = CachedKernels(cache, context, (), [WANTED]), time.monotonic() + 20
    while not read and time.monotonic() < ends:
        time.sleep(0.001)
    assert read == [kernel_key(device, WANTED, ())] and not context.ready
    made.set()
    opened.kernel("f", [context.buffer(1024)])
    assert len(read) == 1 and opened.compiled == 0


def test_without_a_context_no_kernel_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device, cache = list_devices()[0], ProgramCache(tmp_path)
    CachedKernels(cache, Context(device), (), [WANTED]).save()

    def refuse(handle: Any) -> Any:
        raise RunError("the driver is gone")

    monkeypatch.setattr(undocumented, "make_context", refuse)
    opened = CachedKernels(cache, Context(device, later=True), (), [WANTED])
    for _ in range(2):
        with pytest.raises(RunError, match="the driver is gone"):
            opened.kernel("f", [])
    opened.close()
    assert cache.holds(kernel_key(device, WANTED, ()))


def test_two_threads_wait_for_what_one_of_them_builds(tmp_path: Path) -> None:
    """As a session and the thread that prepares its steady kernels may do."""
    context, cache = Context(list_devices()[0]), ProgramCache(tmp_path)
    CachedKernels(cache, context, (), [WANTED]).save()
    key = kernel_key(context.device, WANTED, ())
    binary = cache.read(key)
    assert binary is not None
    cache.write(key, b"no program of any driver")
    built: list[str] = []

    def build(missing: Mapping[str, RequiredKernel]) -> dict[str, bytes]:
        if missing:
            built.extend(missing)
            time.sleep(0.3)
        return dict.fromkeys(missing, binary)

    opened = CachedKernels(cache, context, (), [WANTED], build=build)
    with ThreadPoolExecutor(2) as threads:
        assert len(list(threads.map(lambda _: opened.kernel("f", [context.buffer(1024)]), range(2)))) == 2
    assert built == [key]


@pytest.mark.parametrize("where", ["at the start", "for a refused one"])
def test_a_child_that_dies_is_one_sentence_each_time(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHMEM_CACHE_DIR", str(tmp_path / "cache"))
    model = write_mini_bundle(tmp_path / "m.flashmem")
    if where == "for a refused one":
        Session(model.path, mode="map").close()
        refused = next((tmp_path / "cache/programs").glob("*.bin"))
        ProgramCache().write(refused.stem, b"no program of any driver")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    for _ in range(2):
        with pytest.raises(RunError, match=r"^the driver ended the process that built the kernel \w+; free memory, or compile"):
            Session(model.path, mode="map")
    monkeypatch.undo()
    assert not list(tmp_path.glob("flashmem-build-*"))


_INTERRUPTED = """
import signal, sys, time
from flashmem import Session
from flashmem.runtime.kernels import pool
from flashmem.runtime.kernels import children
signal.signal(signal.SIGINT, signal.default_int_handler)  # who was started in the background ignores it
start = children._start
def started(*given):
    child = start(*given)
    print(child.pid, flush=True)
    return child
children._start = started
step = pool.ChildPool.step
def late(pool, **given):  # however busy the machine is, the interrupt comes before the session has its kernels
    time.sleep(60)
    return step(pool, **given)
pool.ChildPool.step = late
try:
    Session(sys.argv[1], mode="map")
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_an_interrupt_while_a_session_builds_ends_those_who_build(tmp_path: Path) -> None:
    model = write_mini_bundle(tmp_path / "m.flashmem")
    environment = {**os.environ, "FLASHMEM_CACHE_DIR": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", _INTERRUPTED, str(model.path)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = process.stdout.readline().strip()
        process.send_signal(signal.SIGINT)
        assert process.stdout.read().splitlines()[-1] == "interrupted"
    for _ in range(200):  # a signal does not end a process that has just started: its stdin ends
        if not Path(f"/proc/{child}").exists():
            break
        time.sleep(0.1)
    assert not Path(f"/proc/{child}").exists()
    assert not list(tmp_path.glob("flashmem-build-*"))


@pytest.mark.thorough
def test_sessions_that_build_at_once_all_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHMEM_CACHE_DIR", str(tmp_path / "cache"))
    model = write_mini_bundle(tmp_path / "m.flashmem")
    inputs = model.inputs()

    def answer(_: int) -> list[Any]:
        with Session(model.path, mode="map") as session:
            return session.run(None, inputs)

    with ThreadPoolExecutor(2) as threads:
        for got in threads.map(answer, range(2)):
            np.testing.assert_allclose(got[0], model.reference(inputs)[0], rtol=0, atol=2e-5)


def test_the_key_depends_on_everything_that_matters() -> None:
    device = replace(list_devices()[0], platform="Portable Computing Language")
    other = replace(device, driver_version="other")

    def wanted(*sizes: Any, text: str = SOURCE) -> RequiredKernel:
        return RequiredKernel("f", text, tuple(KernelLaunch(size, ()) for size in sizes))

    small, group, large = ((64,), (1,)), ((64,), (2,)), ((1 << 16,), (1,))
    changes = [
        (device, wanted(small), ("-a",)),
        (other, wanted(small), ("-a",)),
        (device, wanted(small), ("-b",)),
        (device, wanted(small), ()),
        (device, wanted(small, text=SOURCE + " "), ("-a",)),
        (device, wanted(group), ("-a",)),
        (device, wanted(large), ("-a",)),
        (device, wanted(small, large), ("-a",)),
        (device, wanted(((64,), None)), ("-a",)),
    ]
    keys = [kernel_key(*change) for change in changes]
    assert len(set(keys)) == len(keys)
    # PoCL's compiled code is one entry, whatever the model; for other drivers the sizes do not matter.
    assert kernel_key(device, wanted(((128,), (1,)), small), ("-a",)) == keys[0]
    intel = replace(device, platform="Intel(R) OpenCL")
    assert kernel_key(intel, wanted(small), ()) == kernel_key(intel, wanted(large, group), ())


@given(st.dictionaries(st.binary(min_size=32, max_size=32).map(bytes.hex), st.binary(min_size=1), max_size=4), st.data())
def test_entries_that_a_bundle_carries_are_whole_or_not_there(entries: dict[str, bytes], data: st.DataObject) -> None:
    content = packed_entries(entries)
    assert unpacked_entries(content) == entries
    at = data.draw(st.integers(0, len(content)))
    assert unpacked_entries(content[:at]).items() <= entries.items()
    spoiled = content[:at] + data.draw(st.binary(min_size=1, max_size=8)) + content[at + 1 :]
    assert all(entries.get(key, binary) == binary for key, binary in unpacked_entries(spoiled).items())


@given(binary=st.binary(min_size=1, max_size=200), at=st.integers(0, 10_000), byte=st.integers(1, 255))
def test_any_change_of_any_byte_is_a_miss(binary: bytes, at: int, byte: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    cache = ProgramCache(tmp_path_factory.mktemp("cache"))
    cache.write(KEY, binary)
    assert cache.read(KEY) == binary
    path = cache.folder / f"{KEY}.bin"
    content = bytearray(path.read_bytes())
    content[at % len(content)] ^= byte
    path.write_bytes(content)
    assert cache.read(KEY) is None
    assert not path.exists()


def test_a_cache_that_cannot_be_written_costs_a_warning_and_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FLASHMEM_CACHE_DIR", str(tmp_path / "file"))
    model = write_mini_bundle(tmp_path / "m.flashmem")
    inputs = model.inputs()
    with pytest.warns(UserWarning, match="the program cache .* cannot be written"):
        session = Session(model.path, mode="map")
    np.testing.assert_allclose(session.run(None, inputs)[0], model.reference(inputs)[0], rtol=0, atol=2e-5)
    session.close()


def test_no_thread_ends_the_silence_of_another() -> None:
    def say() -> None:
        warnings.warn("a compiler said something", opencl.cl.CompilerWarning, stacklevel=1)

    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        with opencl._QUIET:
            thread = threading.Thread(target=opencl._QUIET.__enter__)
            thread.start()
            thread.join()
        say()  # the thread is still inside
        assert not heard
        opencl._QUIET.__exit__()
        say()
        assert len(heard) == 1
