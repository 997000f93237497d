"""One call in a thread of its own: its result, its error, and no thread afterwards."""

from __future__ import annotations

import threading

import pytest

from flashmem.base.apart import Apart


def test_a_call_in_a_thread_returns_its_result_to_any_who_ask() -> None:
    goes = threading.Event()
    call = Apart("flashmem-test", lambda first, second: (goes.wait(20), first + second)[1], 2, 3)
    assert not call.done and "flashmem-test" in [thread.name for thread in threading.enumerate()]
    goes.set()
    assert [call.result(), call.result()] == [5, 5] and call.done
    assert "flashmem-test" not in [thread.name for thread in threading.enumerate()]


def test_its_error_is_raised_where_the_result_is_asked_for() -> None:
    call = Apart("flashmem-test", int, "no number")
    for _ in range(2):
        with pytest.raises(ValueError, match="no number"):
            call.result()
