"""Neighbours in a text are joined in the order of their ranks, in n log n steps for n parts."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush


def joined(parts: Sequence[str], rank: Callable[[str, str], int | None]) -> list[str]:
    """`parts` after all joins: of all neighbours that have a rank, the lowest is first, then the leftmost.

    `rank`: of two neighbours, 0 or more; None if they are not joined. The parts are not empty.
    """
    texts = list(parts)
    count = len(parts)
    before = array("q", range(-1, count - 1))
    after = array("q", range(1, count + 1))
    # A join in the heap is one number, because tuples take three times as much memory.
    found = [each * count + at for at in range(count - 1) if (each := rank(texts[at], texts[at + 1])) is not None]
    heapify(found)
    while found:
        lowest, left = divmod(heappop(found), count)
        right = after[left]
        if not texts[left] or right == count or rank(texts[left], texts[right]) != lowest:
            continue  # one of them was joined to another
        texts[left], texts[right] = texts[left] + texts[right], ""
        after[left] = after[right]
        if after[left] < count:
            before[after[left]] = left
        for first, second in ((before[left], left), (left, after[left])):
            if first >= 0 and second < count and (new := rank(texts[first], texts[second])) is not None:
                heappush(found, new * count + first)
    return [text for text in texts if text]
