"""A system without a thread to spare."""

from __future__ import annotations

import threading

import pytest


def refuse_threads(monkeypatch: pytest.MonkeyPatch, name: str, times: int = 1) -> None:
    """The next threads whose names begin with `name` cannot be started, as many as `times`."""
    start, refused = threading.Thread.start, list[str]()

    def start_or_refuse(thread: threading.Thread) -> None:
        if thread.name.startswith(name) and len(refused) < times:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_refuse)
