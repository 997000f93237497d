"""Attention in half by tensor cores: its kernels without PTX agree with float64 on CPUs, for every config of a descriptor."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import flashmem
from flashmem.compiler.configs.config import EstimatedDevice
from flashmem.compiler.configs.listed import listed_configs
from flashmem.compiler.configs.workload import Workload
from flashmem.compiler.kernels.attention.tensor_cores import TensorAttention
from flashmem.program.kernel_text import kernel_texts, uses_tensor_cores
from flashmem.runtime.opencl.device import Device
from flashmem.runtime.opencl.discovery import list_devices
from flashmem.target.descriptor import descriptor_names, load_descriptor
from tests.support.attention_cases import LOWEST, Model
from tests.support.only_config import only_config

SHIPPED = [
    config
    for name in descriptor_names()
    for config in listed_configs(load_descriptor(name))
    if isinstance(config, TensorAttention)
]
HERE = sorted(list_devices(), key=lambda device: (not device.mma, device.descriptor_name))
CASES = [(config, HERE[0]) for config in SHIPPED] + [(SHIPPED[-1], device) for device in HERE[1:]]
"""Every config on one runtime, with tensor cores if any has them, and one on all."""


class Halves(Model):
    """Attention of activations that are stored in half and exact in it, and its answers in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.wanted: list[Any] = []
        self.errors: list[float] = []

    def stored(self, data: Any) -> str:
        """Data that the program keeps in half."""
        return str(self.op("Neg", self.given(-data)))

    def numbers(self, *shape: int) -> Any:
        """Numbers that are neither around 0 nor normal, exact in half."""
        return self.generator.uniform(-0.5, 1.5, shape).astype(np.float16).astype(np.float32)

    def attention(
        self, heads: int, rows: int, keys: int, size: int, width: int, scale: float, mask: Any = None, added: Any = None,
        known: Any = None, sharing: int = 1,
    ) -> None:  # fmt: skip
        """Attention of `heads` heads; `mask` and `known`, a constant, have the keys that a query sees, `added` is added.

        `known` is the mask of each of `sharing` heads, whose queries are rows of one product.
        """
        q, k, v = self.numbers(1, heads, rows, size), self.numbers(1, heads, keys, size), self.numbers(1, heads, keys, width)
        query, key, value = self.stored(q), self.stored(k), self.stored(v)
        scores = self.op("Mul", self.op("MatMul", query, self.turned(key)), self.constant(scale))
        exact = scale * (q.astype(np.float64) @ k.astype(np.float64).swapaxes(-1, -2))
        if mask is not None:
            scores, exact = self.op("Where", self.given(mask), scores, self.constant(LOWEST)), np.where(mask, exact, LOWEST)
        if known is not None:
            apart, together = (1, heads * sharing, rows // sharing, keys), (1, heads, rows, keys)
            scores = self.op("Reshape", scores, self.shape(*apart))
            scores = self.op("Where", self.constant(known, bool), scores, self.constant(LOWEST))
            scores = self.op("Reshape", scores, self.shape(*together))
            exact = np.where(known, exact.reshape(apart), LOWEST).reshape(together)
        if added is not None:
            scores, exact = self.op("Add", scores, self.given(added)), exact + added
        answer = self.op("MatMul", self.op("Softmax", scores, axis=-1), value)
        self.answer(self.op("Neg", answer))
        weights = np.exp(exact - exact.max(-1, keepdims=True))
        self.wanted.append(-weights / weights.sum(-1, keepdims=True) @ v.astype(np.float64))
        # Weights are rounded to half, answers too, and a score's error is that of its weight.
        score = 2.0**-23 * size * np.abs(exact[exact > -1e30]).max()
        self.errors.append((2.0**-10 + score) * float(np.abs(v).max()))


def causal(rows: int, keys: int) -> Any:
    """Whether a query, of the last `rows` tokens of `keys`, sees a key."""
    return (np.arange(keys) <= np.arange(keys - rows, keys)[:, None])[None, None]


def model(*, complete: bool) -> Halves:
    """No size is a multiple of a block. If `complete`: masks that hide blocks, in the middle and for a whole query, too."""
    m = Halves()
    m.attention(2, 150, 203, 40, 40, 1 / math.sqrt(40))
    m.attention(1, 150, 280, 16, 24, 0.3, mask=causal(150, 280))
    m.attention(2, 150, 280, 64, 64, 0.3, known=causal(150, 280))
    if not complete:
        return m
    m.attention(3, 70, 300, 64, 64, -0.2)
    m.attention(2, 65, 330, 8, 8, 1.0, mask=causal(65, 330))
    hidden = np.zeros((1, 2, 70, 330), np.float32)
    hidden[:, 0, :, 64:300] = -np.inf
    hidden[:, 1, :, :200] = LOWEST
    m.attention(2, 70, 330, 32, 32, 1.0, added=hidden)
    none = causal(66, 400) & (np.arange(66) != 9)[:, None]
    m.attention(1, 66, 400, 64, 40, 0.1, mask=none)
    window = causal(200, 200) & (np.arange(200) > np.arange(200)[:, None] - 70)
    m.attention(2, 200, 200, 32, 32, -0.4, known=window)
    m.attention(1, 140, 100, 32, 32, 0.4, known=causal(70, 100), sharing=2)
    m.attention(1, 100, 300, 64, 64, 0.2, known=np.arange(300) - np.arange(100)[:, None] >= 150)
    return m


MODELS = {complete: model(complete=complete) for complete in (False, True)}


@pytest.mark.parametrize(
    ("config", "device"), CASES, ids=lambda each: each.name if isinstance(each, TensorAttention) else each.descriptor_name
)
def test_answers(config: TensorAttention, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only_config(monkeypatch, "attention", config)
    complete = config is SHIPPED[-1] and device is HERE[0]
    m = MODELS[complete]
    onnx.save(m.proto(), tmp_path / "m.onnx")
    name = device.descriptor_name
    bundle = flashmem.compile(tmp_path / "m.onnx", tmp_path / "b", device=name, memory_path="buffer", precision="fp16")
    texts = kernel_texts(bundle.source.plain)
    launches = [launch for launch in bundle.program.launches if uses_tensor_cores(texts[launch.kernel])]
    assert [launch.shape.family for launch in launches] == ["attention"] * len(m.wanted)
    masks = sum("mask_blocks" in launch.kernel for launch in bundle.program.launches)
    assert masks == (3 if complete else 1), "where a mask is the same for all heads"
    modes, answers = load_descriptor(name).modes["buffer"], []
    for mode in (modes[0], "interleave") if complete else modes[:1]:
        with flashmem.Session(bundle, device=name, mode=mode) as session:
            answers.append(session.run(None, m.feeds))
    for answer, wanted, error in zip(answers[0], m.wanted, m.errors, strict=True):
        np.testing.assert_allclose(answer, wanted, rtol=0, atol=error)
    for one, other in zip(answers[0], answers[-1], strict=True):
        np.testing.assert_array_equal(one, other)


def test_only_heads_of_whole_chunks_in_half_fit() -> None:
    halves = Workload("attention", "buffer", 197, 64, 197, 12, "float16")
    for config in SHIPPED:
        assert config.fits(halves)
        for changes in ({"storage": "float32"}, {"depth": 60}, {"depth": 512}):
            assert not config.fits(replace(halves, **changes)), changes
    assert {config.name for config in SHIPPED if config.fits(replace(halves, depth=128))} == {"attention-tensor-64-wide"}


def test_few_queries_share_their_keys_among_warps() -> None:
    """As measured on an H200: few groups are slower than their latencies, many are bound by their work."""
    nvidia = EstimatedDevice.of(load_descriptor("nvidia"))

    def fastest(heads: int, rows: int, depth: int) -> TensorAttention:
        workload = Workload("attention", "buffer", rows, depth, rows, heads, "float16")
        return min(SHIPPED, key=lambda each: each.cost(workload, nvidia))

    assert fastest(12, 128, 64).parts == fastest(12, 197, 64).parts == 2
    assert fastest(8, 4096, 40).queries == fastest(20, 1500, 64).queries == 128
