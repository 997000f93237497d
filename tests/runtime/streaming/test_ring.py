"""The staging ring: no piece is written while a copy reads it."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from flashmem.base.errors import RunError
from flashmem.runtime.memory.ledger import Ledger
from flashmem.runtime.opencl.context import Context
from flashmem.runtime.opencl.discovery import find_device
from flashmem.runtime.streaming import ring
from flashmem.runtime.streaming.ring import MappedRing, PinnedRing


def pinned_ring(pieces: int) -> tuple[PinnedRing, Ledger]:
    ledger = Ledger(Context(find_device("pocl")), None)
    return PinnedRing(ledger, pieces * 4096, pieces), ledger


def copy_of(waited: list[str], name: str, *, ended: bool) -> Any:
    return SimpleNamespace(wait=lambda *, ended=False: waited.append(name), ended=ended)


def test_free_pieces_come_first_and_then_the_one_whose_copy_began_first_once_it_has_ended() -> None:
    ring, ledger = pinned_ring(3)
    waited: list[str] = []
    pieces = [piece for _ in range(3) if (piece := ring.take()) is not None]
    assert len({piece.ctypes.data for piece in pieces}) == 3 and {piece.nbytes for piece in pieces} == {ring.piece_bytes}
    assert ring.take() is None and ring.oldest is None
    first, second = copy_of(waited, "first", ended=False), copy_of(waited, "second", ended=True)
    ring.give_back(pieces[0], first)
    ring.give_back(pieces[1], second)
    ring.give_back(pieces[2], None)
    assert ring.take() is pieces[2] and not waited
    assert ring.take() is None and ring.oldest is first
    first.ended = True
    assert ring.take() is pieces[0] and waited == ["first"]
    ring.give_back(pieces[0], None)
    ring.give_back(pieces[2], copy_of(waited, "third", ended=False))
    assert ring.open
    ring.close()
    assert waited == ["first", "second", "third"] and not ring.open
    ledger.close()
    assert ledger.total == 0


def test_a_copy_that_failed_is_told_to_who_takes_its_piece() -> None:
    def fail(*, ended: bool = False) -> None:
        raise RunError("the copy failed")

    ring, ledger = pinned_ring(1)
    piece = ring.take()
    assert piece is not None
    ring.give_back(piece, SimpleNamespace(wait=fail, ended=True))  # type: ignore[arg-type]
    with pytest.raises(RunError, match="the copy failed"):
        ring.take()
    ring.close()
    ledger.close()


def test_a_ring_of_no_bytes_has_no_memory() -> None:
    ring, ledger = pinned_ring(1)
    ring.close()
    empty = PinnedRing(ledger, 0, 3)
    assert not empty.open and empty.take() is None
    mapped = MappedRing(Context(find_device("pocl")).queue(), ledger, 0, 2)
    assert not mapped.open
    mapped.close()
    ledger.close()


def test_threads_never_hold_the_same_piece_of_a_mapped_ring() -> None:
    context = Context(find_device("pocl"))
    ledger = Ledger(context, None)
    ring = MappedRing(context.queue(), ledger, 3 * 4096, 3)
    held, lock, clashes = set[int](), threading.Lock(), list[int]()

    def work() -> None:
        for turn in range(300):
            piece = ring.take()
            with lock:
                if piece.ctypes.data in held:
                    clashes.append(turn)
                held.add(piece.ctypes.data)
            with lock:
                held.discard(piece.ctypes.data)
            ring.give_back(piece)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not clashes
    ring.close()
    ledger.close()
    assert ledger.total == 0


def test_a_ring_whose_memory_was_refused_is_closed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(nbytes: int) -> Any:
        raise MemoryError("no pages are left")

    monkeypatch.setattr(ring, "large_pages", refused)
    made, ledger = pinned_ring(2)
    with pytest.raises(MemoryError):
        made.take()
    made.close()
    assert not made.open
    ledger.close()


def test_a_ring_waits_for_all_copies_although_one_has_failed() -> None:
    def fail() -> None:
        raise RunError("the copy failed")

    (made, ledger), waited = pinned_ring(2), list[str]()
    pieces = [piece for _ in range(2) if (piece := made.take()) is not None]
    made.give_back(pieces[0], SimpleNamespace(wait=fail))  # type: ignore[arg-type]
    made.give_back(pieces[1], copy_of(waited, "second", ended=False))
    with pytest.raises(RunError, match="the copy failed"):
        made.close()
    assert waited == ["second"] and not made.open
    ledger.close()
