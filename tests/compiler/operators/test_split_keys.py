"""Attention whose keys are split among work-groups, compared with float64: lengths, masks, grouped heads, small caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import flashmem
from flashmem.compiler.configs.listed import listed_configs
from flashmem.compiler.configs.workload import Workload
from flashmem.compiler.kernels.attention.configs import SplitKeysConfig
from flashmem.compiler.kernels.attention.form import split_form
from flashmem.target.descriptor import load_descriptor
from tests.support.attention_cases import LOWEST, Model
from tests.support.compared import DEVICES, answers_of, require_right
from tests.support.quantised_rows import dequantised, quantised

[CONFIG] = [each for each in listed_configs(load_descriptor("nvidia")) if isinstance(each, SplitKeysConfig)]
CHUNK = CONFIG.keys


def _grouped(m: Model, rows: int, keys: int, end: int, size: int = 16, value_size: int = 16, each: int = 2) -> None:
    """`each` heads for each of two heads of keys, whose queries see the keys before `end`."""
    query, key, value = m.input(1, 2, each * rows, size), m.input(1, 2, keys, size), m.input(1, 2, keys, value_size)
    scores = m.op("Mul", m.op("MatMul", query, m.turned(key)), m.constant(0.3))
    scores = m.op("Reshape", scores, m.shape(1, 2 * each, rows, keys))
    seen = m.op("Less", m.constant(np.arange(keys)[None], np.int32), m.given(np.full((1, 1, rows, 1), end, np.int32)))
    weights = m.op("Softmax", m.op("Where", seen, scores, m.constant(LOWEST)), axis=-1)
    m.answer(m.op("MatMul", m.op("Reshape", weights, m.shape(1, 2, each * rows, keys)), value))


def _masked(m: Model, rows: int, keys: int) -> None:
    """Chunks of which a query sees no key, and a query that sees none at all: its answer is 0."""
    query, key, value = m.input(1, 2, rows, 10), m.input(1, 2, keys, 10), m.input(1, 2, keys, 7)
    mask = np.zeros((1, 2, rows, keys), np.float32)
    mask[:, 0, :, : keys - 2] = -np.inf
    mask[:, 1, 0, CHUNK:] = -np.inf
    mask[:, 1, rows - 1] = -np.inf
    weights = m.op("Softmax", m.op("Add", m.op("MatMul", query, m.turned(key)), m.given(mask)), axis=-1)
    m.answer(m.op("MatMul", m.op("Where", m.op("IsNaN", weights), m.constant(0), weights), value))


@pytest.mark.parametrize(("device", "path"), DEVICES)
def test_answers_are_those_of_float64(device: str, path: str, tmp_path: Path) -> None:
    full = 2 * CHUNK + 22
    model = Model(kind="positive" if device == "pocl" else "around 1e3")
    for rows, end in ((1, 1), (1, CHUNK - 1), (1, CHUNK), (3, CHUNK + 1), (8, full)):
        _grouped(model, rows, full, end)
    model.kind = "normal"
    _grouped(model, 1, full, full - 5, 128, 36, 8)
    _masked(model, 3, full)
    proto = model.proto()
    answers = answers_of(proto, model.feeds, (device, path), tmp_path, "nvidia")
    launches = [launch.kernel for launch in flashmem.Bundle.open(tmp_path / "b.flashmem").program.launches]
    assert [sum(part in name for name in launches) for part in ("split_keys", "join_chunks", "attention_")] == [7, 7, 0]
    require_right(proto, model.feeds, answers)


@pytest.mark.parametrize("precision", ["fp16", "int8"])
@pytest.mark.parametrize(("device", "path"), DEVICES)
def test_caches_of_few_bits(precision: Literal["fp16", "int8"], device: str, path: Any, tmp_path: Path) -> None:
    """Keys and values are read as they are stored, and none behind the filled part."""
    heads, length, size, filled = 2, 2 * CHUNK, 64, CHUNK + 3
    m, random = Model(opset=24), np.random.default_rng(5)
    query, at = m.input(1, heads, 4, size), m.given(np.array([filled - 1]))
    pasts = [m.given(np.zeros((1, heads, length, size), np.float32)) for _ in range(2)]
    new = [m.input(1, heads, 1, size) for _ in range(2)]
    states = {past: m.op("TensorScatter", past, rows, at, axis=2) for past, rows in zip(pasts, new, strict=True)}
    key, value = states.values()
    seen = m.op("Less", m.constant(np.arange(length)[None], np.int32), m.given(np.full((1, 1, 1, 1), filled, np.int32)))
    scores = m.op("Where", seen, m.op("MatMul", query, m.turned(key)), m.constant(LOWEST))
    m.answer(m.op("MatMul", m.op("Softmax", scores, axis=-1), value))
    proto = m.proto()
    proto.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in states.values())
    onnx.save(proto, tmp_path / "m.onnx")
    bundle = flashmem.compile(
        tmp_path / "m.onnx",
        tmp_path / "m.flashmem",
        device="nvidia",
        memory_path=path,
        states=states,
        state_precision=precision,
    )
    assert any("split_keys" in launch.kernel for launch in bundle.program.launches)
    rows = [random.uniform(-0.5, 1.5, (1, heads, length, size)).astype(np.float32) for _ in range(2)]
    stored = [quantised(each) if precision == "int8" else each.astype(np.float16) for each in rows]
    feeds = {name: data for name, data in m.feeds.items() if name not in states}
    with flashmem.Session(bundle, device=device) as session:
        before = dict(zip(states, stored, strict=True))
        if precision == "fp16":
            for each in before.values():
                each[:, :, filled:] = np.nan
        session.set_states({name: each if precision == "int8" else each.astype(np.float32) for name, each in before.items()})
        [answer] = session.run(None, feeds)
    for each, rows_of in zip(stored, new, strict=True):
        added = m.feeds[rows_of]
        each[:, :, filled - 1 : filled] = quantised(added) if precision == "int8" else added.astype(np.float16)
    keys, values = (
        (dequantised(each, size) if precision == "int8" else each).astype(np.float64)[:, :, :filled] for each in stored
    )
    scores = m.feeds[query].astype(np.float64) @ keys.swapaxes(-1, -2)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = weights / weights.sum(-1, keepdims=True) @ values
    # A score is a sum of `size` products, and its error that of a weight.
    error = 2.0**-23 * (size * np.abs(m.feeds[query]).astype(np.float64) @ np.abs(keys).swapaxes(-1, -2)).max()
    np.testing.assert_allclose(answer, wanted, rtol=0, atol=error * np.abs(values).max())


def test_the_descriptor_says_where_keys_are_split() -> None:
    """Few queries and more keys than one chunk. Any head that attention is fused for has a work-item for each four channels."""
    fits = [
        CONFIG.fits(Workload("attention", "buffer", *sizes, 4))
        for sizes in ((1, 64, CHUNK), (1, 64, CHUNK + 1), (64, 512, 999))
    ]
    assert fits == [False, True, True] and not CONFIG.fits(Workload("attention", "buffer", CONFIG.most + 1, 64, 999, 4))
    for rows, channels in ((1, 64), (8, 128), (64, 512), (3, 10)):
        form = split_form(CONFIG, rows, channels)
        assert form.parts * form.query_groups * form.quads <= form.lanes and form.parts and form.joining
        assert form.rows % (form.sharing * form.query_groups) == 0 and form.lanes % form.rows == 0
