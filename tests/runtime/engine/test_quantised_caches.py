"""Caches of keys and values in int8: new rows are quantised as numpy does, and attention reads them as they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import flashmem
from flashmem.base.errors import BudgetError, UserError
from flashmem.bundle.bundle import Bundle
from tests.support.attention_cases import Model
from tests.support.cached_attention import CASES, CachedAttention, earlier_rows
from tests.support.command_line import Command, command_line
from tests.support.compared import DEVICES, OF_A_GPU, require_right
from tests.support.inputs import floats
from tests.support.quantised_rows import Array, dequantised, quantised, scales_of
from tests.support.state_models import HIDDEN, KEY_HEADS, SIZE, cache, decoder, recurrence
from tests.support.strict_device import PROFILES
from tests.support.strict_device.door import strict

PLACES = [(*place, place[0]) for place in DEVICES] + [
    (*place[:2], target) for place in OF_A_GPU for target in ("nvidia", "adreno750", "mali-g710")
]
"""Every device with its own kernels, and one with those of GPUs."""


def _compiled(proto: onnx.ModelProto, folder: Path, states: Any, **options: Any) -> Bundle:
    onnx.save(proto, folder / "model.onnx")
    given: Any = {"states": states, "state_precision": "int8", **options}
    return flashmem.compile(folder / "model.onnx", folder / "m.flashmem", **given)


def _session(bundle: Bundle, device: str) -> flashmem.Session:
    return flashmem.Session(bundle, device=device)


def _written_of(rows: Array, folder: Path, place: tuple[str, str, str], repeat: int = 1) -> Array:
    """What is stored of `rows` [heads, tokens, size] after a run that writes them into an empty cache, `repeat` times."""
    heads, tokens, size = rows.shape
    case = CachedAttention(1, heads, heads, tokens, tokens, size, size, tokens, by_index=True)
    model = Model(opset=24)
    states, [key, value] = case.add(model)
    device, path, target = place
    bundle = _compiled(_with_states(model, states), folder, states, device=target, memory_path=path)
    with _session(bundle, device) as session:
        feeds = {name: data for name, data in model.feeds.items() if name not in states}
        for _ in range(repeat):
            session.run(None, {**feeds, key: rows[None], value: rows[None]})
        one, two = session.states().values()
    assert np.array_equal(one, two)
    return one[0]


def _with_states(model: Model, states: dict[str, str]) -> onnx.ModelProto:
    """The model with the next values of its states as outputs."""
    proto = model.proto()
    proto.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in states.values())
    return proto


@pytest.mark.parametrize("place", PLACES, ids="-".join)
@pytest.mark.parametrize("size", [10, 36, 64, 80])
def test_rows_are_quantised_as_numpy_does(size: int, place: tuple[str, str, str], tmp_path: Path) -> None:
    """Bit for bit: outliers, offsets, numbers half way between two codes, zeros, and numbers too small for a scale."""
    kinds = ("normal", "around 1e3", "around -1e4", "large", "tiny", "of many sizes", "positive")
    rows = np.stack([floats(12, size, kind=kind) for kind in kinds])
    rows[0, :4, 3] *= 1e4
    rows[0, 4] = 0
    rows[0, 5] = np.float32(1e-24) * (1 + np.arange(size, dtype=np.float32))
    rows[0, 6] = np.float32(-0.0)
    rows[1, 0] = np.float32(2e-22) * np.linspace(-1, 1, size, dtype=np.float32)
    half_way = (np.arange(size, dtype=np.float32) % 100) + np.float32(0.5)
    half_way[0] = 127
    rows[0, 7:10] = half_way * np.float32([[1], [-0.25], [2.0**-79]])
    stored = _written_of(rows, tmp_path, place)
    assert stored.dtype == np.int8 and stored.shape == (*rows.shape[:2], -(-size // 4) * 4 + 4)
    assert np.array_equal(stored, quantised(rows))
    back = dequantised(stored, size)
    assert np.all(np.abs(back - rows) <= np.maximum(0.501 * scales_of(stored), np.float32(1.1e-22)))


@pytest.mark.parametrize("place", PLACES[:1] + PLACES[-1:], ids="-".join)
def test_numbers_that_are_none_are_not_hidden(place: tuple[str, str, str], tmp_path: Path) -> None:
    rows = floats(2, 3, 16)
    rows[0, 0, 5], rows[0, 1, 15], rows[1, 2, 0] = np.nan, np.inf, -np.inf
    scales = scales_of(_written_of(rows, tmp_path, place))[..., 0]
    assert np.isnan(scales[0, 0]) and np.isposinf(scales[0, 1]) and np.isposinf(scales[1, 2])
    assert np.isfinite(scales).sum() == 3


@pytest.mark.parametrize("place", PLACES[:1] + PLACES[-1:], ids="-".join)
def test_the_last_of_several_rows_for_one_place_remains(place: tuple[str, str, str], tmp_path: Path) -> None:
    case = CachedAttention(1, 2, 2, 6, 8, 16, 16, 6, by_index=True)
    model = Model(opset=24)
    states, [key, _] = case.add(model)
    device, path, target = place
    bundle = _compiled(_with_states(model, states), tmp_path, states, device=target, memory_path=path)
    at = case.indices()
    at[0, :, :, 2] = [[3, 3, -1, 0, 3, 7], [5, 4, 4, 4, 5, -3]]
    feeds = {name: data for name, data in model.feeds.items() if name not in states}
    [indices] = [name for name, data in feeds.items() if data.dtype == np.int64]
    with _session(bundle, device) as session:
        session.run(None, {**feeds, indices: at})
        stored = next(iter(session.states().values()))[0]
    wanted = np.zeros_like(stored)
    for head, tokens in ((0, {3: 4, 7: 5, 0: 3}), (1, {5: 5, 4: 3})):
        for at_place, token in tokens.items():
            wanted[head, at_place] = quantised(feeds[key])[0, head, token]
    assert np.array_equal(stored, wanted)


def _attended(names: Sequence[str], kind: str, place: tuple[str, str, str], folder: Path) -> None:
    """Fill caches, run, and compare the answers with attention over the dequantised caches; raise AssertionError."""
    model = Model(opset=24, kind=kind)
    added = [(CASES[name], *case_of) for name in names for case_of in [CASES[name].add(model)]]
    states = {past: present for _, pairs, _ in added for past, present in pairs.items()}
    device, path, target = place
    bundle = _compiled(_with_states(model, states), folder, states, device=target, memory_path=path)
    assert bundle.meta["states_in_half"] == []
    before = {
        past: quantised(earlier_rows(case, model, value=value))
        for case, pairs, _ in added
        for past, value in zip(pairs, (False, True), strict=True)
    }
    with _session(bundle, device) as session:
        session.set_states(before)
        answers = session.run(None, {name: data for name, data in model.feeds.items() if name not in states})
        after = session.states()
    right = Model(opset=24)
    for case, pairs, new in added:
        for past, rows in zip(pairs, new, strict=True):
            wanted = before[past].copy()
            wanted[:, :, case.first : case.filled] = quantised(model.feeds[rows])
            assert np.array_equal(after[past], wanted)
        [query] = [name for name, data in model.feeds.items() if data.shape == (case.batch, case.heads, case.rows, case.size)
                   and name not in new]  # fmt: skip
        key, value = (after[past] for past in pairs)
        case.reference(right, model.feeds[query], (key, value))
    require_right(right.proto(), right.feeds, answers)


@pytest.mark.parametrize("kind", ["normal", "positive", "around 1e3"])
@pytest.mark.parametrize("place", PLACES, ids="-".join)
def test_attention_is_that_over_the_dequantised_cache(kind: str, place: tuple[str, str, str], tmp_path: Path) -> None:
    _attended([*CASES], kind, place, tmp_path)
