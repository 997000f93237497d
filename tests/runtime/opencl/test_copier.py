"""Events of copies."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np
import pytest

from flashmem.runtime.opencl import copier
from flashmem.runtime.opencl.context import Context
from flashmem.runtime.opencl.copier import Copier, CopyEvent
from flashmem.runtime.opencl.discovery import find_device
from flashmem.runtime.opencl.shared_memory import address_of

NBYTES = 4096
REFERENCES = 0x11D2  # CL_EVENT_REFERENCE_COUNT


def references(event: CopyEvent) -> Any:
    """A function that returns the number of references to the event, of which it holds one."""
    library, handle, count = event._library, ctypes.c_void_p(event.int_ptr), ctypes.c_uint()
    library.clRetainEvent(handle)

    def ask() -> int:
        assert not library.clGetEventInfo(handle, REFERENCES, ctypes.c_size_t(4), ctypes.byref(count), None)
        return count.value

    return ask


@pytest.mark.parametrize("ahead", [False, True])
def test_an_event_is_released_by_no_function_of_python(ahead: bool) -> None:
    """An interrupt that arrived in one would be lost."""
    context, data, called = Context(find_device("pocl")), np.zeros(NBYTES, np.uint8), list[str]()
    queue, buffer = Copier(context, ahead=ahead), context.buffer(NBYTES)
    copy = queue.prepare(buffer, 0, NBYTES)
    event: CopyEvent | None = copy(address_of(data))
    assert event is not None
    event.wait()
    ask = references(event)
    before = ask()
    sys.setprofile(lambda frame, what, argument: called.append(what))
    event = None
    sys.setprofile(None)
    assert ask() == before - 1 and "call" not in called


def test_what_is_known_of_events_that_are_gone_is_forgotten() -> None:
    context, data = Context(find_device("pocl")), np.zeros(16, np.uint8)
    queue, buffer = Copier(context), context.buffer(16)
    copy = queue.prepare(buffer, 0, 16)
    for _ in range(4000):
        copy(address_of(data)).wait()
    assert len(copier._RELEASES) <= 2 * copier._left + 1 < 4000
