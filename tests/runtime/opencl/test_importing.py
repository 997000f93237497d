"""Imports of host memory: the call by its specification, on an artificial library."""

from __future__ import annotations

import ctypes
import mmap
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flashmem.base.errors import RunError
from flashmem.runtime.opencl import binding, importing
from flashmem.runtime.opencl.importing import HostImports

PAGE = mmap.PAGESIZE


class Library:
    """clImportMemoryARM as a C function that records its arguments and returns `code`."""

    def __init__(self, code: int = 0) -> None:
        p = ctypes.c_void_p
        self.code = code
        self.calls: list[tuple[Any, ...]] = []
        self._kept = ctypes.CFUNCTYPE(p, p, ctypes.c_ulonglong, p, p, ctypes.c_size_t, p)(self._import)

    def find(self, name: str) -> int | None:
        return ctypes.cast(self._kept, ctypes.c_void_p).value if name == "clImportMemoryARM" else None

    def _import(self, context: int, flags: int, properties: int, memory: int, size: int, error: int) -> int:
        self.calls.append((context, flags, tuple((ctypes.c_ssize_t * 3).from_address(properties)), memory, size))
        ctypes.c_int.from_address(error).value = self.code
        return 0 if self.code else 77


def imports(library: Library, monkeypatch: pytest.MonkeyPatch) -> HostImports:
    monkeypatch.setattr(importing, "functions_of", lambda platform: library.find)
    buffers = SimpleNamespace(from_int_ptr=lambda handle, retain: (handle, retain))
    monkeypatch.setattr(
        binding, "cl", SimpleNamespace(Buffer=buffers, **{k: getattr(binding.cl, k) for k in ("mem_flags", "status_code")})
    )
    context: Any = SimpleNamespace(
        device=SimpleNamespace(handle=SimpleNamespace(platform=None)), handle=SimpleNamespace(int_ptr=5)
    )
    return HostImports(context)


def test_whole_pages_are_imported_for_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    data = np.frombuffer(mmap.mmap(-1, 4 * PAGE), np.uint8)
    assert imports(library, monkeypatch).buffer(data[PAGE : 2 * PAGE + 100]) == (77, False)  # the handle is ours
    read_only = 1 << 2  # CL_MEM_READ_ONLY
    assert library.calls == [(5, read_only, (0x40B2, 0x40B3, 0), data.ctypes.data + PAGE, 2 * PAGE)]


def test_what_cannot_be_imported_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    data = np.frombuffer(mmap.mmap(-1, 2 * PAGE), np.uint8)
    library = Library(code=-59)
    with pytest.raises(RunError, match="OpenCL failed to import 4096 bytes of the weight file: INVALID_OPERATION"):
        imports(library, monkeypatch).buffer(data[:PAGE])
    with pytest.raises(RunError, match="does not start on a page"):
        imports(library, monkeypatch).buffer(data[64:PAGE])
    library.find = lambda name: None  # type: ignore[method-assign]
    with pytest.raises(RunError, match="the driver lacks clImportMemoryARM"):
        imports(library, monkeypatch)
