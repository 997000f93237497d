"""Probes of extensions: on the drivers here, and on imitations of extensions that no driver here has."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from flashmem.base.child_processes import module_environment, python_module
from flashmem.base.errors import UserError
from flashmem.runtime.opencl import probes, undocumented
from flashmem.runtime.opencl.context import Context
from flashmem.runtime.opencl.discovery import list_devices
from flashmem.runtime.opencl.probes import (
    ARM_IMPORT,
    DMA_BUF,
    HOST_POINTER,
    PROBES,
    QCOM_HOST_POINTER,
    Probe,
    results,
    run_probe,
)

DEVICES = list_devices()
DEVICE = DEVICES[-1]
_P, _SIZE, _FLAGS = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_ulonglong
_READ_ONLY, _COPY_HOST_PTR, _USE_HOST_PTR = 1 << 2, 1 << 5, 1 << 3


def _context(*extensions: str) -> Context:
    return Context(replace(DEVICE, extensions=DEVICE.extensions | set(extensions)))


class Driver:
    """Functions of extensions on top of the driver here, by name; memory is made with `flags`."""

    def __init__(self, flags: int) -> None:
        make = undocumented.library().clCreateBuffer
        make.restype, make.argtypes = _P, (_P, _FLAGS, _SIZE, _P, _P)
        self.seen: list[tuple[int, ...]] = []

        def arm(context: Any, given: int, properties: Any, memory: Any, size: int, error: Any) -> int:
            self.seen.append((given, *properties[:3], size))
            found: int = make(context, flags, size, memory, error)
            return found

        def qualcomm(context: Any, given: int, size: int, pointer: Any, error: Any) -> int:
            words = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_uint))
            self.seen.append((given, size, words[0], words[1], words[2]))
            address = ctypes.cast(pointer, ctypes.POINTER(_P))[2]
            found: int = make(context, flags, size, address, error)
            return found

        self._functions: dict[str, Any] = {
            "clImportMemoryARM": ctypes.CFUNCTYPE(_P, _P, _FLAGS, ctypes.POINTER(ctypes.c_ssize_t), _P, _SIZE, _P)(arm),
            "clCreateBuffer": ctypes.CFUNCTYPE(_P, _P, _FLAGS, _SIZE, _P, _P)(qualcomm),
        }

    def find(self, name: str) -> int | None:
        return ctypes.cast(self._functions[name], _P).value if name in self._functions else None


def test_imported_file_pages_are_read_in_place(tmp_path: Path) -> None:
    driver = Driver(_READ_ONLY | _USE_HOST_PTR)
    found = run_probe(ARM_IMPORT, _context(ARM_IMPORT), tmp_path, driver.find)
    assert found.outcome == "passed" and "file pages" in found.said, found
    assert driver.seen == [(4, 0x40B2, 0x40B3, 0, 1 << 20)] * 3
    assert set(found.facts.values()) == {"in place"} and not list(tmp_path.iterdir())


def test_a_driver_that_copies_imported_memory_fails(tmp_path: Path) -> None:
    found = run_probe(ARM_IMPORT, _context(ARM_IMPORT), tmp_path, Driver(_READ_ONLY | _COPY_HOST_PTR).find)
    assert found.outcome == "failed"
    assert found.facts["file pages, shared, read only"] == "right, but later changes are not seen"
    assert found.facts["file pages, private, writable"] == found.facts["anonymous memory"] == "copied"


def test_caches_that_are_not_coherent_are_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device sees changes of anonymous memory only after a map; those of a file, which is not mapped, never."""
    total, stale = probes._Reader._total, [0, False]

    def late(reader: Any, buffer: Any) -> int:
        stale[1], found = False, stale[0] if stale[1] else total(reader, buffer)
        stale[0] = found
        return found

    def changed(seed: int) -> Any:
        stale[1] = seed == 2  # the host changes the memory now
        return numbers(seed)

    numbers = probes._numbers
    monkeypatch.setattr(probes._Reader, "_total", late)
    monkeypatch.setattr(probes, "_numbers", changed)
    found = run_probe(ARM_IMPORT, _context(ARM_IMPORT), tmp_path, Driver(_READ_ONLY | _USE_HOST_PTR).find)
    assert found.outcome == "passed"
    assert list(found.facts.values()) == [probes.UNSEEN, probes.IN_PLACE_WHEN_MAPPED, probes.IN_PLACE_WHEN_MAPPED]


def test_a_driver_that_refuses_or_lacks_the_function_fails(tmp_path: Path) -> None:
    refusing = run_probe(ARM_IMPORT, _context(ARM_IMPORT), tmp_path, Driver(1 << 40).find)
    assert refusing.outcome == "failed" and "OpenCL failed to import host memory: INVALID_VALUE" in refusing.said
    lacking = run_probe(ARM_IMPORT, _context(ARM_IMPORT), tmp_path, lambda name: None)
    assert lacking == Probe(ARM_IMPORT, "failed", "the driver lacks clImportMemoryARM", driver=DEVICE.driver)


def test_a_dma_buf_is_given_as_qualcomm_specifies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of a file takes the place of the heap, which this machine lacks."""

    def allocate() -> int:
        descriptor = os.memfd_create("heap")
        os.ftruncate(descriptor, probes.BYTES)
        return descriptor

    monkeypatch.setattr(probes, "_allocate_dma_buf", allocate)
    monkeypatch.setattr(probes.fcntl, "ioctl", lambda *request: 0)
    context = _context(QCOM_HOST_POINTER, "cl_qcom_dmabuf_host_ptr")
    driver = Driver(_READ_ONLY | _USE_HOST_PTR)
    assert run_probe(QCOM_HOST_POINTER, context, tmp_path, driver.find).outcome == "passed"
    [(flags, size, kind, policy, descriptor)] = driver.seen
    assert (flags, size, kind, policy) == (4 | 8 | 1 << 29, 1 << 20, 0x411D, 0x40A5) and descriptor > 2
    wrong = Driver(1 << 40)
    assert run_probe(QCOM_HOST_POINTER, context, tmp_path, wrong.find).outcome == "failed"
    without = run_probe(QCOM_HOST_POINTER, _context(QCOM_HOST_POINTER), tmp_path)
    assert without.outcome == "failed" and "cl_qcom_dmabuf_host_ptr" in without.said


@pytest.mark.skipif(Path("/dev/dma_heap/system").exists(), reason="the heap is here")
def test_no_heap_is_said(tmp_path: Path) -> None:
    context = _context(QCOM_HOST_POINTER, "cl_qcom_dmabuf_host_ptr")
    found = run_probe(QCOM_HOST_POINTER, context, tmp_path, Driver(4).find)
    assert found.outcome == "failed" and "/dev/dma_heap/system" in found.said


@pytest.mark.parametrize("number", range(len(DEVICES)))
@pytest.mark.parametrize("extension", PROBES)
def test_probes_run_in_their_own_process(number: int, extension: str, tmp_path: Path) -> None:
    command = python_module("flashmem.runtime.opencl.probes", extension, str(number), str(tmp_path))
    done = subprocess.run(command, env=module_environment(), capture_output=True, text=True, check=True)
    found = results({extension: json.loads(done.stdout)})[extension]
    reported = extension == HOST_POINTER or extension in DEVICES[number].extensions
    assert found.extension == extension and (found.outcome != "absent") == reported
    assert found.driver == DEVICES[number].driver
    if extension == HOST_POINTER and DEVICES[number].kind == "cpu":
        assert found.outcome == "passed"
    if extension == "cl_khr_command_buffer" and reported:
        assert found.outcome == "passed" and found.facts["launches"] == 16


def test_results_are_read_back_or_refused() -> None:
    probe = Probe(DMA_BUF, "failed", "no", {"a": 1.0})
    assert results({DMA_BUF: asdict(probe)}) == {DMA_BUF: probe}
    for bad in ([1], {"a": 1}, {"a": {"outcome": "passed"}}, {"a": {**asdict(probe), "outcome": "good"}}, 3):
        with pytest.raises(UserError):
            results(bad)
    with pytest.raises(UserError, match="no probe of 'x'"):
        run_probe("x", _context(), Path())
