"""Products whose depth work-groups share: every listed config without tensor cores, against float64 and ONNX Runtime."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashmem
from flashmem.compiler.configs.listed import listed_configs
from flashmem.compiler.configs.workload import Workload
from flashmem.compiler.kernels.contraction.configs import MOST_PARTIAL, Contraction, StagedContraction
from flashmem.compiler.selection.configs import candidates
from flashmem.compiler.selection.selector import KernelSelector
from flashmem.target.descriptor import descriptor_names, load_descriptor
from tests.support.compared import PLACES, Nodes, require_right

SHIPPED = [
    config
    for name in descriptor_names()
    for config in listed_configs(load_descriptor(name))
    if isinstance(config, StagedContraction) and config.split_k > 1
]
UNEVEN = StagedContraction("uneven", 4, 4, (8, 8), k_block=8, split_k=5)
"""One stage; the last share is shorter, and with 40 steps of depth some are empty."""

CASES = [(config, PLACES[0]) for config in SHIPPED] + [(UNEVEN, place) for place in PLACES]


def model(*, slices: bool) -> Nodes:
    """Products with epilogues: a bias, a residual that may be overwritten, a Transpose. Sizes are no multiples of blocks.

    Numbers are neither around 0 nor normal. `slices`: the last one has weights of two slices.
    """
    nodes, random = Nodes(), np.random.default_rng(5)

    def numbers(*shape: int) -> Any:
        return random.uniform(-0.5, 1.5, shape).astype(np.float32)

    def inner(op: str, *inputs: str, **attributes: Any) -> str:
        [made] = nodes.node(op, *inputs, **attributes)
        nodes.outputs.pop()
        return made

    x = nodes.input(numbers(2, 37, 520))
    biased = inner("Add", inner("MatMul", x, nodes.constant(numbers(520, 150))), nodes.constant(numbers(150) - 140))
    nodes.node("Relu", biased)
    residual = inner("Relu", nodes.input(numbers(2, 37, 68)))
    nodes.node("Add", inner("MatMul", x, nodes.constant(numbers(520, 68))), residual)
    nodes.node("Transpose", inner("MatMul", x, nodes.constant(numbers(520, 36))), perm=[0, 2, 1])
    nodes.node("MatMul", nodes.input(numbers(3, 40)), nodes.constant(numbers(40, 5)))
    if slices:
        nodes.node("MatMul", nodes.input(numbers(19, 512)), nodes.constant(numbers(512, 4096)))
    return nodes


@pytest.mark.parametrize(("config", "place"), CASES, ids=lambda each: each.name if isinstance(each, Contraction) else str(each))
def test_answers(config: StagedContraction, place: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KernelSelector, "config", lambda *asked, **given: config)
    nodes, (device, path) = model(slices=config is UNEVEN), place
    proto = nodes.proto()
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    wanted: Any = {"device": device, "memory_path": path}
    bundle = flashmem.compile(tmp_path / "m.onnx", tmp_path / "b", **wanted)
    launches = bundle.program.launches
    shares = [launch for launch in launches if launch.shape.family == "matmul"]
    assert all(launch.global_size[2:] == (config.split_k,) for launch in shares)
    # One product a slice: weights of two slices are two on a device with small ones.
    assert sum(launch.shape.family == "join_sums" for launch in launches) == len(shares) == len(bundle.program.slices) >= 4
    modes, answers = load_descriptor(device).modes[bundle.program.memory_path], []
    for mode in (modes[0], "interleave") if config is UNEVEN else modes[:1]:
        with flashmem.Session(bundle, device=device, mode=mode) as session:
            answers.append(session.run(None, nodes.feeds))
    require_right(proto, nodes.feeds, answers[0])
    for one, other in zip(answers[0], answers[-1], strict=True):
        np.testing.assert_array_equal(one, other)


def test_only_deep_products_of_few_sums_fit() -> None:
    deep = Workload("matmul", "buffer", 128, 8192, 2048)
    for config in SHIPPED:
        assert config.fits(deep)
        for changes in (
            {"depth": config.k_block * config.split_k}, {"rows": MOST_PARTIAL // 4096}, {"storage": "int8"}, {"family": "conv"},
        ):  # fmt: skip
            assert not config.fits(replace(deep, **changes)), changes
        assert config.cut(replace(deep, family="conv")).split_k == 1


def test_limited_memory_has_no_room_for_sums() -> None:
    nvidia = load_descriptor("nvidia")
    thin = Workload("matmul", "buffer", 128, 8192, 2048)
    assert {config for config in SHIPPED if config.fits(thin)} <= set(candidates(nvidia, thin))
    free, limited = (KernelSelector(nvidia, limited=each).config(thin) for each in (False, True))
    assert isinstance(free, Contraction) and isinstance(limited, Contraction)
    assert free.groups_deep > 1 == limited.groups_deep
