"""The lookup of counted kernel configs: seconds by the busiest pipeline, bytes by the first one without time left."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.paper.lookup import CompiledCode
from flashmem.base.errors import UserError
from flashmem.base.resources import names, read_text
from flashmem.compiler.configs.listed import configs_of
from flashmem.compiler.kernels.contraction.configs import PlainContraction
from flashmem.compiler.selection.counted_code import CODE, LANE, KernelCode, read_codes, write_codes
from flashmem.planning.capacity.classes import load_capacity
from flashmem.planning.capacity.roofline import Roofline
from flashmem.program.launches import KernelShape, Launch
from flashmem.target.descriptor import DeviceDescriptor, Rates, load_descriptor
from flashmem.target.pipelines import Pipelines

RATES = Rates(gemm_flops=1e9, memory_bandwidth=10e9, cached_bandwidth=5e9, launch_seconds=1e-5, contention={"dma": 0.5})
PIPELINES = Pipelines(lanes=1000, clock=1e9, texture_bytes=100, load_bytes=200, half_rate=2.0, reached=0.5)
PHONE = DeviceDescriptor("phone", kind="gpu", rates=RATES, pipelines=PIPELINES)
TEXTURE = KernelCode("matmul", 4, 8, 0, "texture", 2.0, 0.1, 0.1, 0, 0, 0)
HALF = replace(TEXTURE, rows=8, columns=4, half=1)
BUFFER = KernelCode("matmul", 4, 8, 0, "buffer", 2.0, 0.0, 1.0, 0, 0, 0)
COPY = KernelCode(LANE, 0, 0, 0, "texture", 50.0, 0.0, 1.0, 0, 0, 0)
CODES = [TEXTURE, HALF, BUFFER, COPY]


def launch(
    rows: int = 256, depth: int = 512, columns: int = 1024, family: str = "matmul", tile: tuple[int, int] = (4, 8)
) -> Launch:
    shape = KernelShape(family, rows, columns, depth, tile_rows=tile[0], tile_columns=tile[1])
    nbytes = 4 * rows * (depth + columns)
    return Launch("l", "k", (64,), (64,), (), "reusable", (), rows * depth * columns, nbytes, shape)


def model(path: str = "texture") -> CompiledCode:
    return CompiledCode(PHONE, PIPELINES, CODES, path)  # type: ignore[arg-type]


def test_the_busiest_pipeline_gives_the_seconds() -> None:
    macs, weights = 256 * 512 * 1024, 4 * 512 * 1024
    busy = model().busy(launch(), weights)
    assert busy["arithmetic"] == pytest.approx(macs * 2 / 1000 / 0.5e9)
    assert busy["texture"] == pytest.approx(macs * 0.1 / 100 / 0.5e9)
    assert busy["load"] == pytest.approx(macs * 0.1 / 200 / 0.5e9)
    assert busy["memory"] == pytest.approx((launch().bytes + weights) / 10e9)
    assert model().seconds(launch(), weights) == pytest.approx(busy["arithmetic"] + 1e-5)
    on_buffer = model("buffer")
    assert on_buffer.seconds(launch(), weights) == pytest.approx(on_buffer.busy(launch(), weights)["load"] + 1e-5)


def test_sums_in_half_take_half_the_time() -> None:
    stored = 2 * 512 * 1024
    assert model().code_of(launch(tile=(8, 4)), stored) == HALF
    assert model().code_of(launch(), 2 * stored) == TEXTURE
    one, other = model().busy(launch(), stored), model().busy(launch(), 2 * stored)
    assert one["arithmetic"] == pytest.approx(other["arithmetic"] / 2)


def test_other_families_have_the_rooflines_seconds() -> None:
    plain = launch(family="pool")
    assert model().seconds(plain) == pytest.approx(Roofline(PHONE).seconds(plain))


@pytest.mark.parametrize("mode", ["alias", "interleave"])
def test_a_pipeline_without_time_limits_the_bytes(mode: str) -> None:
    weights, own = 4 * 512 * 1024, model()
    found = load_capacity(own, launch(), weights, mode)  # type: ignore[arg-type]
    room = own.room(launch(), weights, 0.2, mode)  # type: ignore[arg-type]
    assert found == min(room.values()) > 0
    assert set(room) == ({"memory", "host"} if mode == "alias" else {"memory", "host", "arithmetic", "load"})
    allowed = 1.2 * own.seconds(launch(), weights)
    assert own.loaded_seconds(launch(), weights, found, mode) == pytest.approx(allowed)  # type: ignore[arg-type]
    assert own.loaded_seconds(launch(), weights, 1.01 * found, mode) > allowed  # type: ignore[arg-type]
    if mode == "interleave":  # the kernel's arithmetic is busy all the time, so copies have a fifth of it
        alone = own.seconds(launch(), weights) - 1e-5
        assert room["arithmetic"] == pytest.approx((0.2 * (alone + 1e-5)) * 1000 * 0.5e9 / 50, rel=1e-3)


def test_other_modes_are_delayed_as_by_the_roofline() -> None:
    own, weights = model(), 4 * 512 * 1024
    alone = own.seconds(launch(), weights)
    delay = 0.5 * 1e6 / RATES.copy_bandwidth
    assert own.loaded_seconds(launch(), weights, 1e6, "dma") == pytest.approx(alone + delay)
    assert own.streamable_bytes(launch(), weights, 0.2, "dma") == pytest.approx(0.4 * alone * RATES.copy_bandwidth)


def test_files_are_read_back_or_refused() -> None:
    assert read_codes(write_codes(CODES, "a comment"), "x") == CODES
    for bad in ("family,rows\nmatmul,1\n", write_codes(CODES, "c").replace("2,", "two,")):
        with pytest.raises(UserError, match=r"x has no counted instructions"):
            read_codes(bad, "x")


@pytest.mark.parametrize("name", names("devices", CODE))
def test_shipped_files_have_every_config(name: str) -> None:
    descriptor = load_descriptor(name)
    codes = read_codes(read_text("devices", f"{name}{CODE}"), name)
    for family in ("matmul", "conv", "matmul_dynamic"):
        tiles = {(code.rows, code.columns, bool(code.half)) for code in codes if code.family == family}
        listed = [config for config in configs_of(descriptor, family) if isinstance(config, PlainContraction)]
        assert tiles >= {(config.rows, config.columns, config.half_run > 0) for config in listed} != set()
    assert {code.memory_path for code in codes if code.family == LANE} == {"texture", "buffer"}
    assert all(0.3 < code.slots < 30 for code in codes)
    assert "not measured" in CompiledCode.load(descriptor, "texture").note


def test_cores_change_the_widths() -> None:
    wider = replace(PHONE, cores=4).with_cores(8).pipelines
    assert wider is not None and (wider.lanes, wider.texture_bytes, wider.load_bytes, wider.clock) == (2000, 200, 400, 1e9)
