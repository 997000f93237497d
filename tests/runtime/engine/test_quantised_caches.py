"""Caches of keys and values in int8: new rows are quantised as numpy does, and attention reads them as they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
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


LENGTHS = (5, *[1] * 8)


def _decoder(folder: Path, **options: Any) -> Bundle:
    """Grouped-query attention with two shape variants, a prompt and single words."""
    shapes = [{"x": (1, 5, HIDDEN)}, {"x": (1, 1, HIDDEN)}]
    return _compiled(decoder(LENGTHS).proto, folder, "auto", shapes=shapes, **options)


@pytest.mark.parametrize("place", PLACES[:2], ids="-".join)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_decoder_reads_words_after_a_prompt(precision: str, place: tuple[str, str, str], tmp_path: Path) -> None:
    """Within 1 % of the range of ONNX Runtime's, whose cache is float32: codes are off by up to 1/254 of a row's largest."""
    model, (device, path, _) = decoder(LENGTHS), place
    reference = onnxruntime.InferenceSession(model.proto.SerializeToString())
    wanted, at_the_end = model.through_the_host(lambda inputs: reference.run(None, inputs), len(LENGTHS))
    bundle = _decoder(tmp_path, device=device, memory_path=path, precision=precision)
    with _session(bundle, device) as session:
        for number, right in enumerate(wanted):
            [y] = session.run(None, model.inputs(number))
            apart = np.abs(y - right["y"]).max() / np.ptp(right["y"])
            assert 1e-4 < apart < 1e-2  # not what floats would give
        for past, array in session.states().items():
            assert array.dtype == np.int8 and array.shape == (1, KEY_HEADS, at_the_end[past].shape[2], SIZE + 4)
            apart = np.abs(dequantised(array, SIZE) - at_the_end[past])
            assert 1e-4 < apart.max() / np.ptp(at_the_end[past]) < 1e-2


def test_no_launch_has_a_cache_of_floats(tmp_path: Path) -> None:
    """The launches of floats, but that rotate and write apart; and no tensor outside the states is as large as a cache."""
    families = {}
    for kind in ("fp16", "int8"):
        bundle = _decoder(tmp_path, state_precision=kind, device="pocl", build=False)
        for number, variant in enumerate(bundle.variants):
            program = variant.program
            families[kind, number] = [launch.shape.family for launch in program.launches]
            [shape] = {state.shape for state in program.states}
            elsewhere = [tensor for tensor in program.tensors if tensor.memory != "states"]
            assert all(np.prod(tensor.shape) < np.prod(shape[:3]) * SIZE for tensor in elsewhere)
    for number in range(2):
        replaced = [family.replace("scatter_quantised", "scatter") for family in families["int8", number]]
        apart = {"rotary_scatter": ("rotary", "scatter")}
        assert sorted(replaced) == sorted(part for family in families["fp16", number] for part in apart.get(family, (family,)))
        assert families["int8", number].count("scatter_quantised") == 2  # one for the keys and the values of a layer


@pytest.mark.parametrize("kind", ["int8", "fp16"])
def test_caches_break_no_rule_of_a_strict_device(kind: str, tmp_path: Path) -> None:
    model = decoder(LENGTHS)
    bundle = _decoder(tmp_path, device=DEVICES[0][0], build=False, state_precision=kind)
    for profile in PROFILES:
        with strict(profile) as device:
            with flashmem.Session(bundle) as session:
                for number in range(3):
                    session.run(None, model.inputs(number))
                session.set_states(session.states())
            assert device.rules.broken == []


def test_a_row_beyond_the_cache_is_refused_and_none_is_written(tmp_path: Path) -> None:
    model = decoder((5, 1))
    bundle = _decoder(tmp_path)
    inputs = {**model.inputs(1), "seqlens_k": np.array([24], np.int32), "total_sequence_length": np.array(25, np.int32)}
    with flashmem.Session(bundle) as session:
        with pytest.raises(ValueError, match="index outside the tensor"):
            session.run(None, inputs)
        assert not any(array.any() for name, array in session.states().items() if ".0." in name)
        session.reset()
        session.run(None, model.inputs(0))


def _refusal(proto: onnx.ModelProto, folder: Path, states: Any, **options: Any) -> str:
    with pytest.raises(UserError) as refused:
        _compiled(proto, folder, states, **options)
    return str(refused.value)


def test_models_without_such_a_cache_are_refused(tmp_path: Path) -> None:
    for model in (recurrence(), cache(), cache(reads_later=True)):  # a sum reads the caches, not attention
        said = _refusal(model.proto, tmp_path, model.states)
        assert "no state of" in said and "attention alone reads" in said and said.endswith("use --state-precision fp16")
    assert "--state-precision is for states, and none is named" in _refusal(recurrence().proto, tmp_path, None)
    assert "name one of: fp32, fp16, int8" in _refusal(recurrence().proto, tmp_path, {"h": "h2"}, state_precision="int4")
    assert "name one of: fp32, fp16" in _refusal(recurrence().proto, tmp_path, {"h": "h2"}, precision="int8")


def test_other_states_stay_in_half(tmp_path: Path) -> None:
    """A cache of which the model also sums the rows, beside one that attention alone reads."""
    model = Model(opset=24)
    states, _ = CachedAttention(1, 2, 1, 1, 100, 16, 16, 40).add(model)
    keys, values = states
    model.answer(model.op("ReduceSum", states[values], model.shape(2)))
    bundle = _compiled(_with_states(model, states), tmp_path, states)
    assert bundle.meta["states_in_half"] == [values]
    stored = {tensor.name: tensor.dtype for tensor in bundle.program.tensors if tensor.memory == "states"}
    assert [stored[state.tensor] for state in bundle.program.states] == ["int8", "float16"]
    with flashmem.Session(bundle) as session:
        session.run(None, {name: data for name, data in model.feeds.items() if name not in states})
        assert {name: array.dtype for name, array in session.states().items()} == {keys: np.int8, values: np.float32}


def test_caches_in_int8_count_in_the_budget(tmp_path: Path) -> None:
    with pytest.raises(BudgetError) as refused:
        _decoder(tmp_path, budget=1)
    bundle = _decoder(tmp_path, budget=refused.value.smallest_bytes)
    model = decoder(LENGTHS)
    with flashmem.Session(bundle) as session:
        for number in range(len(LENGTHS)):
            session.run(None, model.inputs(number))
        assert session.last_run is not None
        memory = session.last_run.memory
    assert memory.peak_bytes <= refused.value.smallest_bytes
    assert memory.by_category["states"] == bundle.program.states_bytes


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    return command_line(monkeypatch, capfd)


def test_the_command_line(command: Command, tmp_path: Path) -> None:
    onnx.save(decoder(LENGTHS).proto, tmp_path / "d.onnx")
    onnx.save(recurrence().proto, tmp_path / "r.onnx")
    words = ("--state", "auto", "--kv", "int8", "--shape", f"x=1x1x{HIDDEN}")
    made = command("compile", tmp_path / "d.onnx", "-o", tmp_path / "d.flashmem", *words)
    assert made.code == 0, made.err
    first = {"x": floats(1, 1, HIDDEN), "seqlens_k": np.zeros(1, np.int32), "total_sequence_length": np.array(1, np.int32)}
    np.savez(tmp_path / "first.npz", **first)
    ran = command("run", tmp_path / "d.flashmem", "--input", tmp_path / "first.npz", "--repeat", "2", "--json", "--verify")
    assert ran.code == 0 and ran.json["verify"]["ok"], ran.err
    refused = command("compile", tmp_path / "r.onnx", "--state", "h=h2", "--kv", "int8")
    assert refused.code == 2 and "use --state-precision fp16" in refused.err and "Traceback" not in refused.err
