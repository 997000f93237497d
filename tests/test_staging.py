"""Staging of a loader thread: what a copy reads is not given out before the copy is done."""

from __future__ import annotations

import random
from typing import cast

import numpy as np
import pytest

from flashmem.runtime.copier import CopyEvent
from flashmem.runtime.opencl import Bytes
from flashmem.runtime.staging import StagingPart


class _Copy:
    """A copy that reads a piece until somebody waits for it."""

    def __init__(self, piece: Bytes) -> None:
        self.piece, self.done = piece, False

    def wait(self) -> None:
        self.done = True


@pytest.mark.parametrize("seed", range(20))
def test_no_piece_is_given_out_that_a_copy_reads(seed: int) -> None:
    """Pieces of any size: of a half, or, as rows of wide images are, of more."""
    draw, size = random.Random(seed), 640
    part = StagingPart(np.zeros(size, np.uint8))
    copies: list[_Copy] = []
    beside = 0
    for _ in range(40):
        unit = draw.choice((1, 16, 300, 400, size))
        most = part.piece_bytes(unit)
        assert most >= unit
        piece = part.next(draw.randrange(unit, most + 1))
        flying = [copy for copy in copies if not copy.done]
        assert not any(np.shares_memory(piece, copy.piece) for copy in flying)
        beside += bool(flying)
        copies.append(_Copy(piece))
        part.copying(cast(CopyEvent, copies[-1]))
    assert beside  # one half is read into while the other is copied
    part.settle()
    assert all(copy.done for copy in copies)
