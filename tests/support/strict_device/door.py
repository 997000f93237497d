"""Installs the strict device in flashmem: the only module here that depends on the program."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from flashmem.runtime.opencl import binding, discovery, undocumented
from flashmem.runtime.opencl import context as opencl
from tests.support.strict_device.calls import StrictOpenCL
from tests.support.strict_device.library import StrictLibrary
from tests.support.strict_device.profiles import Profile


@functools.cache
def base_device() -> Any:
    """The underlying device: PoCL, or another CPU with images. The first call must be before any strict device is installed."""
    found = [each for each in discovery.list_devices() if each.kind == "cpu" and each.has_images]
    if not found:
        pytest.skip("no CPU device with images is here")
    return min(found, key=lambda each: each.descriptor_name != "pocl").handle


@contextmanager
def strict(profile: Profile) -> Iterator[StrictOpenCL]:
    """In the body, the only OpenCL device is a strict one."""
    instead = StrictOpenCL(profile, base_device(), by_event=True)  # flashmem's own rule (docs/research/opencl-notes.md)
    library = StrictLibrary(instead)
    with pytest.MonkeyPatch.context() as patch:
        for module in (binding, undocumented, discovery, opencl):
            patch.setattr(module, "cl", instead)
        patch.setattr(undocumented, "library", lambda *, locked=False: library)
        discovery.forget_devices()
        try:
            yield instead
        finally:
            discovery.forget_devices()
