"""The data of plots; tests of the command line check that they are drawn."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from flashmem.tools.plots.figure import model_name
from flashmem.tools.plots.sweep import pareto_front

POINTS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=20)


@given(POINTS)
def test_the_front_is_what_nothing_beats(points: list[tuple[int, int]]) -> None:
    def beaten(point: tuple[int, int]) -> bool:
        return any(other != point and other[0] <= point[0] and other[1] <= point[1] for other in points)

    assert pareto_front(points) == sorted({point for point in points if not beaten(point)})


def test_an_architecture_keeps_its_whole_name() -> None:
    assert model_name(Path("zoo:gptneo-1.3b")) == "gptneo-1.3b"
    assert model_name(Path("folder/net.v2.onnx")) == "net.v2" and model_name(Path("vit/model.onnx")) == "vit"
