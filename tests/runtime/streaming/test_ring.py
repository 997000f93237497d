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
from flashmem.runtime.streaming.ring import Ring


def ring_of(pieces: int, *, apart: bool) -> tuple[Ring, Ledger]:
    context = Context(find_device("pocl"))
    ledger = Ledger(context, None)
    return Ring(context.queue(), ledger, pieces * 4096, pieces, own_memory=apart), ledger


def copy_of(waited: list[str], name: str) -> Any:
    return SimpleNamespace(wait=lambda: waited.append(name))


@pytest.mark.parametrize("apart", [False, True])
def test_free_pieces_come_first_and_then_the_one_whose_copy_began_first(apart: bool) -> None:
    ring, ledger = ring_of(3, apart=apart)
    waited: list[str] = []
    pieces = [ring.take() for _ in range(3)]
    assert len({piece.ctypes.data for piece in pieces}) == 3 and {piece.nbytes for piece in pieces} == {ring.piece_bytes}
    ring.give_back(pieces[0], copy_of(waited, "first"))
    ring.give_back(pieces[1], copy_of(waited, "second"))
    ring.give_back(pieces[2], None)
    assert ring.take() is pieces[2] and not waited
    assert ring.take() is pieces[0] and waited == ["first"]
    ring.give_back(pieces[0], None)
    ring.give_back(pieces[2], copy_of(waited, "third"))
    assert ring.open
    ring.close()
    assert waited == ["first", "second", "third"] and not ring.open
    ledger.close()
    assert ledger.total == 0


def test_a_copy_that_failed_is_told_to_who_takes_its_piece() -> None:
    def fail() -> None:
        raise RunError("the copy failed")

    ring, ledger = ring_of(1, apart=True)
    ring.give_back(ring.take(), SimpleNamespace(wait=fail))  # type: ignore[arg-type]
    with pytest.raises(RunError, match="the copy failed"):
        ring.take()
    ring.close()
    ledger.close()


def test_threads_never_hold_the_same_piece() -> None:
    ring, ledger = ring_of(5, apart=True)
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
            ring.give_back(piece, None if turn % 2 else SimpleNamespace(wait=lambda: None))  # type: ignore[arg-type]

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not clashes
    ring.close()
    ledger.close()
