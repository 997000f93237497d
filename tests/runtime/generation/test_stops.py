"""Texts that end a generation, beside all prefixes tried one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flashmem.runtime.generation.stops import Stops

TEXTS = st.text(st.sampled_from("ab"), max_size=7)


@given(stops=st.lists(TEXTS, max_size=4), pieces=st.lists(TEXTS, max_size=12))
def test_what_may_become_a_stop_text_is_held_back(stops: list[str], pieces: list[str]) -> None:
    made, shown, whole = Stops(stops), "", ""
    for piece in pieces:
        known, whole = len(whole), whole + piece
        shown += made.passed(piece)
        begins = [whole.find(stop, max(0, known - len(stop) + 1)) for stop in stops if stop]
        if found := [at for at in begins if at >= 0]:
            assert made.found and shown == whole[: min(found)] and made.rest("b") == ""
            return
        held = max((size for stop in stops for size in range(1, len(stop)) if whole.endswith(stop[:size])), default=0)
        assert not made.found and shown == whole[: len(whole) - held]
    assert shown + made.rest("b") == whole + "b"


def test_the_work_for_a_piece_grows_with_its_length() -> None:
    """And not with the length of the stop text."""

    class Counted(str):
        read = 0

        def __getitem__(self, key: object) -> str:
            found = str.__getitem__(self, key)  # type: ignore[index]
            Counted.read += len(found)
            return found

    made = Stops([Counted("x" * 5000 + "y")])
    Counted.read = 0
    for _ in range(100):
        made.passed("xx")
        made.passed("hello")
    assert 0 < Counted.read <= 4 * 700
