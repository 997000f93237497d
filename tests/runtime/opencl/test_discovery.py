"""Listing of devices: a broken driver is named with the call that failed, and the devices of the others are found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashmem.base.child_processes import ending_in_a_sentence
from flashmem.base.errors import NoDeviceError, RunError
from flashmem.runtime.opencl import discovery
from flashmem.runtime.opencl.discovery import cl, device_at, driver_failures, find_device, list_devices
from flashmem.tools.doctor import selftest

OUT_OF_RESOURCES, DEVICE_NOT_FOUND, PLATFORM_NOT_FOUND = -5, -1, -1001


class Refusal(cl.Error):  # type: ignore[misc]
    """What pyopencl raises where a call returns `code`."""

    routine = code = None  # instead of properties of a record that C++ makes

    def __init__(self, routine: str, code: int) -> None:
        Exception.__init__(self, routine)
        self.routine, self.code = routine, code


class Refusing:
    """A device whose driver knows nothing about it."""

    available = True

    @property
    def type(self) -> int:
        raise Refusal("clGetDeviceInfo", OUT_OF_RESOURCES)


def platform(name: str, devices: list[Any] | Exception) -> SimpleNamespace:
    def get_devices() -> list[Any]:
        if isinstance(devices, Exception):
            raise devices
        return devices

    return SimpleNamespace(name=name, get_devices=get_devices)


@pytest.fixture
def platforms(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The platforms that the loader finds in a test; the real ones behind what the test inserts."""
    known = list_devices()
    found = list(cl.get_platforms())
    monkeypatch.setattr(cl, "get_platforms", lambda: found)
    discovery.forget_devices()
    yield found
    monkeypatch.undo()
    discovery.forget_devices()
    assert [device.key for device in list_devices()] == [device.key for device in known]
    assert not driver_failures()


def test_a_broken_driver_is_named_and_the_others_are_used(platforms: list[Any]) -> None:
    names = [device.name for device in list_devices()]
    discovery.forget_devices()
    platforms[:0] = [
        platform("Broken ", Refusal("clGetDeviceIDs", OUT_OF_RESOURCES)),
        platform("Empty", Refusal("clGetDeviceIDs", DEVICE_NOT_FOUND)),
        platform("Silent", [Refusing()]),
    ]
    assert [device.name for device in list_devices()] == names
    said = ("Broken failed: clGetDeviceIDs (OUT_OF_RESOURCES)", "Silent failed: clGetDeviceInfo (OUT_OF_RESOURCES)")
    assert driver_failures() == said
    with pytest.raises(
        NoDeviceError, match=rf"^there is no OpenCL device 7 in this process, only {len(names)}; Broken failed: "
    ):
        device_at(7)
    with pytest.raises(NoDeviceError, match=r"is called 'nothing'; .*; Broken failed: clGetDeviceIDs .*; Silent failed: "):
        find_device("nothing")


def test_no_driver_is_no_failure_and_a_broken_loader_is_one(platforms: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for code, said in ((PLATFORM_NOT_FOUND, ()), (-6, ("the OpenCL loader failed: clGetPlatformIDs (OUT_OF_HOST_MEMORY)",))):

        def refuse(code: int = code) -> None:
            raise Refusal("clGetPlatformIDs", code)

        monkeypatch.setattr(cl, "get_platforms", refuse)
        discovery.forget_devices()
        assert list_devices() == () and driver_failures() == said
        with pytest.raises(NoDeviceError, match=r"^no OpenCL device is here; .*") as refused:
            find_device()
        assert str(refused.value).endswith("".join(said)) and ("failed" in str(refused.value)) == bool(said)


def test_a_child_ends_with_the_sentence(platforms: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An IndexError said nothing about the driver."""
    platforms[:] = [platform("Broken", Refusal("clGetDeviceIDs", OUT_OF_RESOURCES))]
    with pytest.raises(SystemExit) as ended, ending_in_a_sentence():
        list(selftest.tests(0, tmp_path))
    assert str(ended.value) == (
        "there is no OpenCL device 0 in this process, only 0; Broken failed: clGetDeviceIDs (OUT_OF_RESOURCES)"
    )
    with pytest.raises(SystemExit, match=r"^lost$"), ending_in_a_sentence():
        raise RunError("lost")
    with pytest.raises(IndexError), ending_in_a_sentence():
        raise IndexError
