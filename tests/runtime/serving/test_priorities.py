"""Priorities of requests: the order of runs of a real pair of models under one budget, their answers and their memory."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import flashmem
from flashmem import Bundle, Runtime, Session
from flashmem.program.program import fixed_bytes
from flashmem.runtime.engine.run import Run
from flashmem.runtime.opencl.discovery import list_devices
from tests.support.paths import DATA

DEVICES = range(len(list_devices()))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[Bundle]:
    folder = tmp_path_factory.mktemp("pair")
    names = ("gptneo-tiny", "resnet-tiny")
    return [flashmem.compile(DATA / f"{name}.onnx", folder / f"{name}.flashmem", build=False) for name in names]


def drawn(bundle: Bundle) -> dict[str, NDArray[Any]]:
    random = np.random.default_rng(6)
    return {
        port.name: random.integers(0, 9, port.shape).astype(port.dtype)
        if "int" in port.dtype
        else random.uniform(-2, 5, port.shape).astype(port.dtype)
        for port in bundle.program.inputs
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["map", "dma"])
def test_the_highest_priority_is_next_and_equal_ones_keep_their_order(
    mode: Any, device: int, pair: list[Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run holds the device until all others are queued: it is not interrupted by any of them."""
    inputs = [drawn(bundle) for bundle in pair]
    wanted = []
    for bundle, given in zip(pair, inputs, strict=True):
        with Session(bundle, device=str(device), mode=mode) as session:
            wanted.append(session.run(None, given))
    budget = int(1.2 * max(fixed_bytes(bundle.program) + bundle.plan.layouts[mode].total_bytes for bundle in pair))
    queued, begun, play = threading.Event(), threading.Event(), Run.execute

    def held(run: Run, *ports: Any, **options: Any) -> Any:
        begun.set()
        assert queued.wait(60)
        return play(run, *ports, **options)

    monkeypatch.setattr(Run, "execute", held)
    # (model, priority) in the order of submission, and the numbers of these in the order of their runs.
    requests = [(0, -5), (1, 0), (0, 2), (1, 2), (0, 0), (1, 7), (0, -1), (1, 2)]
    order = [0, 5, 2, 3, 7, 1, 4, 6]
    finished: list[int] = []
    with Runtime(budget, device=str(device)) as many:
        models = [many.open(bundle, mode=mode) for bundle in pair]
        answers = []
        for number, (which, priority) in enumerate(requests):
            answers.append(models[which].submit(inputs[which], priority=priority))
            answers[-1].add_done_callback(lambda _, number=number: finished.append(number))
            assert begun.wait(60)
        answers[3].cancel()
        queued.set()
        for number, ((which, _), answer) in enumerate(zip(requests, answers, strict=True)):
            if number != 3:
                for one, other in zip(answer.result(120), wanted[which], strict=True):
                    np.testing.assert_array_equal(one, other)
        times = [answers[number].started for number in order if number != 3]
        assert times == sorted(times)
        assert [number for number in finished if number != 3] == [number for number in order if number != 3]
        np.testing.assert_array_equal(models[1].run(None, inputs[1], priority=3)[0], wanted[1][0])
        assert many.peak <= budget


def test_a_priority_is_an_integer(pair: list[Bundle]) -> None:
    with Runtime() as many:
        model = many.open(pair[1])
        with pytest.raises(ValueError, match="give an integer, the higher the sooner"):
            model.submit(drawn(pair[1]), priority="high")  # type: ignore[arg-type]
