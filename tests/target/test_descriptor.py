"""Device descriptors: shipped ones, and refusals."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flashmem.base.errors import MissingFileError, UserError
from flashmem.compiler.configs.listed import configs_of
from flashmem.compiler.kernels.contraction.configs import Contraction, SlicedContraction
from flashmem.compiler.selection.counted_code import load_codes
from flashmem.profiler.phone_compilers.families import FAMILIES
from flashmem.profiler.phone_compilers.gpus import GPUS
from flashmem.schedule.modes import MODES
from flashmem.target.descriptor import DeviceDescriptor, PlainTile, Rates, descriptor_names, load_descriptor
from tests.support.paths import ROOT

FOLDER = ROOT / "devices"


def test_every_file_in_devices_ships() -> None:
    assert set(descriptor_names()) == {file.stem for file in FOLDER.glob("*.toml")}
    assert {"pocl", "intel-cpu"} <= set(descriptor_names())


@pytest.mark.parametrize("name", [file.stem for file in sorted(FOLDER.glob("*.toml"))])
def test_a_shipped_descriptor_makes_sense(name: str) -> None:
    descriptor = load_descriptor(name)
    assert descriptor.name == name
    assert set(descriptor.modes) == set(descriptor.memory_paths) <= {"buffer", "texture"}
    for modes in descriptor.modes.values():
        assert modes, "a memory path without a transfer mode cannot run"
        assert set(modes) <= set(MODES)
        in_place = [mode for mode in modes if not (MODES[mode].copies or MODES[mode].by_pages)]
        assert descriptor.shares_memory or not in_place, "the host cannot read into memory that it does not share"
    tile = descriptor.tile
    assert tile.columns % tile.vector == 0, "a panel is a whole number of vectors"
    assert min(tile.rows, tile.columns, tile.vector, tile.lanes, *tile.local_size) >= 1
    assert all(
        rate > 0 for name, rate in vars(descriptor.rates).items() if name not in ("contention", "conv_flops", "run_seconds")
    )
    assert all(mode in MODES and share >= 0 for mode, share in descriptor.rates.contention.items())
    assert set(descriptor.rates.contention) >= set(MODES) - ({"map"} if descriptor.kind == "gpu" else set())
    assert "contention" in descriptor.sources
    assert not descriptor.probed, "results of probes are of one device, not of its kind"
    assert set(descriptor.sources) <= {*vars(descriptor.rates), *vars(descriptor)}, "a source must be of something"
    if {"map", "alias"} & set(descriptor.modes.get("texture", ())):
        assert descriptor.image_pitch_alignment > 0, "a texture over a buffer needs the device's row pitch"


PHONES = [name for name in descriptor_names() if name.startswith(("adreno", "mali"))]
_PEAK = re.compile(r"% of ([\d.]+) ([GT])FLOP/s")
_PART = re.compile(r"(?:up to|about) (\d+) MB/s")


def shares(name: str) -> tuple[float, float, float]:
    """Ratios of a phone's descriptor: `gemm_flops` over the peak and `disk_bandwidth` over the part's rate in its sources, and
    the seconds of opening.
    """
    descriptor = load_descriptor(name)
    peak, part = _PEAK.search(descriptor.sources["gemm_flops"]), _PART.search(descriptor.sources["disk_bandwidth"])
    assert peak and part, name
    flops = float(peak[1]) * {"G": 1e9, "T": 1e12}[peak[2]]
    rates = descriptor.rates
    return rates.gemm_flops / flops, rates.disk_bandwidth / (1e6 * float(part[1])), rates.session_seconds


@pytest.mark.parametrize("name", PHONES)
def test_phones_reach_the_same_shares_of_what_is_published(name: str) -> None:
    """The ratios fitted for one of them apply to all: an older phone is not predicted to be faster."""
    assert shares(name) == pytest.approx(shares("adreno750"), rel=0.01)
    assert "adreno750.toml" in load_descriptor(name).sources["gemm_flops"] or name == "adreno750"


@pytest.mark.parametrize("name", PHONES)
def test_phones_with_an_open_compiler_have_counted_code(name: str) -> None:
    """Each has the widths of its GPU, of which all are assumed to reach one share, and its family's models.

    Lanes and clock give the peak in its sources. Those whose core a compiler knows have counted instructions of their configs.
    """
    descriptor = load_descriptor(name)
    pipelines, reference = descriptor.pipelines, load_descriptor("adreno750").pipelines
    assert pipelines is not None and reference is not None
    assert any(name in family.devices for family in FAMILIES.values() if family.name == descriptor.capacity_model)
    peak = _PEAK.search(descriptor.sources["gemm_flops"])
    assert peak is not None
    flops = float(peak[1]) * {"G": 1e9, "T": 1e12}[peak[2]]
    assert 2 * pipelines.lanes * pipelines.clock == pytest.approx(flops, rel=0.01)
    assert pipelines.reached == reference.reached
    if not any(name in gpu.descriptors for gpu in GPUS.values()):
        assert not descriptor.counted
        return
    assert descriptor.counted == name
    listed = {(code.family, code.rows, code.columns, bool(code.half)) for code in load_codes(name)}
    for family in ("matmul", "conv", "matmul_dynamic"):
        for config in configs_of(descriptor, family):
            if isinstance(config, SlicedContraction):  # quantised weights have one config for few rows
                continue
            assert isinstance(config, Contraction)
            assert (family, config.rows, config.columns, "half" in config.needs) in listed
    assert {"attention", "depthwise", "lane_copy"} <= {code.family for code in load_codes(name)}


def test_a_descriptor_survives_the_bundle() -> None:
    descriptor = DeviceDescriptor(
        name="x", tile=PlainTile(rows=4), rates=Rates(gemm_flops=1e12), sources={"gemm_flops": "measured"}
    )
    assert DeviceDescriptor.from_dict(descriptor.to_dict()) == descriptor


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        'name = "mine"\nmemory_paths = ["texture"]\n[tile]\nlocal_size = [8, 4]\n[modes]\ntexture = ["dma"]\n'
        "[rates]\ncontention = {dma = 0}\n"
    )
    descriptor = load_descriptor(str(file))
    assert (descriptor.name, descriptor.tile.local_size, descriptor.modes) == ("mine", (8, 4), {"texture": ("dma",)})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = 'x'\nimage_max_widht = 4", "unknown key 'image_max_widht'"),
        ("name = 'x'\n[tile]\nrow = 4", "unknown key 'row' for PlainTile"),
        ("kind = 'cpu'", "'name' of DeviceDescriptor is missing"),
        ("name = 'x'", r"the contention of transfer mode 'alias' is missing; add it under \[rates.contention\], or measure"),
        ("name = 'x'\n[modes]\nbuffer = ['map', 'dma']\n[rates]\ncontention = {map = 0.1}", "transfer mode 'dma' is missing"),
        ("name = ", "not valid TOML"),
        ("name = 'x'\nkind = 'gpu'\nshares_memory = true", "say shares_memory = true, or false .* uses_host_memory = true"),
        ("name = 'x'\nshares_memory = 'yes'", "say shares_memory = true, or false"),
        ("name = 'x'\nprobed = ['cl_arm_import_memory']", "give a table with the driver of each extension whose probe passed"),
    ],
)
def test_a_file_that_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        load_descriptor(str(file))
    assert "wrong.toml" in str(caught.value)


def test_how_kernels_multiply_and_add() -> None:
    ways = {name: load_descriptor(name).code.multiply_add for name in descriptor_names()}
    assert {name for name, way in ways.items() if way == "mad"} == {name for name in ways if name.startswith("adreno")}
    assert set(ways.values()) == {"fma", "mad"}
    with pytest.raises(UserError, match="multiply_add is 'fast'; name one of: fma, mad, expression"):
        DeviceDescriptor.from_dict({**load_descriptor("pocl").to_dict(), "code": {"multiply_add": "fast"}})


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(MissingFileError, match=r"no device descriptor 'adreno9000'.*pocl"):
        load_descriptor("adreno9000")


def test_another_memory_path_comes_first() -> None:
    descriptor = DeviceDescriptor(name="x", memory_paths=("buffer", "texture"))
    assert descriptor.on_path("texture").memory_paths == ("texture", "buffer")
    assert descriptor.on_path("buffer") == descriptor
    with pytest.raises(UserError, match="has no memory path 'texture'; it has buffer"):
        DeviceDescriptor(name="x", memory_paths=("buffer",)).on_path("texture")
