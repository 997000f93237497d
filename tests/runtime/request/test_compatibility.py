"""A bundle on another machine than its compile target: allocation limits, and the message if it does not fit."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashmem
from flashmem.base.errors import FlashmemWarning, UserError
from flashmem.bundle.bundle import Bundle
from flashmem.compiler.memory.allocations import within_allocations
from flashmem.planning.capacity.choice import default_model
from flashmem.planning.capacity.roofline import Roofline
from flashmem.runtime.engine import replanned
from flashmem.runtime.engine.replanned import fitted
from flashmem.runtime.opencl.device import Device
from flashmem.runtime.opencl.discovery import list_devices
from flashmem.runtime.request import compatibility
from flashmem.runtime.request.compatibility import for_processor, usable_modes
from flashmem.runtime.serving.runtime import Runtime
from flashmem.runtime.session import Session
from flashmem.target.descriptor import load_descriptor
from tests.runtime.opencl.test_devices import phone
from tests.support.mini_bundle import MiniModel, write_mini_bundle
from tests.support.paths import DATA, ROOT

MODEL = DATA / "gptneo-tiny.onnx"


@pytest.fixture(scope="module")
def travelled(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Compiled for an Adreno 740, while no such device is present."""
    return flashmem.compile(MODEL, tmp_path_factory.mktemp("made") / "m.flashmem", device="adreno740")


@pytest.fixture(scope="module")
def mini(tmp_path_factory: pytest.TempPathFactory) -> MiniModel:
    return write_mini_bundle(tmp_path_factory.mktemp("mini") / "m.flashmem")


def test_nothing_is_said_on_the_device_that_it_was_compiled_for(travelled: Bundle) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        descriptor = usable_modes(
            travelled, phone(image_max_width=16384, image_max_height=16384, image_pitch_alignment=64), "auto"
        )
    assert descriptor.modes["texture"][0] == "alias"


def test_another_device_is_one_sentence(travelled: Bundle) -> None:
    other = phone(version="OpenCL 3.0 Adreno(TM) 750", image_max_width=16384, image_max_height=16384, image_pitch_alignment=64)
    with pytest.warns(FlashmemWarning, match=r"was compiled for adreno740 and runs on QUALCOMM Adreno\(TM\) \(adreno750\)"):
        usable_modes(travelled, other, "auto")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_alloc_bytes": 1000}, "has .* bytes of activations in one buffer, and .* allocates at most 1000 at a time"),
        ({"image_max_width": 4, "image_max_height": 4}, "has textures of .* texels, and .* supports them up to 4 x 4"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_sentence(travelled: Bundle, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"compiled for adreno740, {message}; compile the model for this device"):
        usable_modes(travelled, phone(**changes), "auto")


def test_rows_that_cannot_lie_over_a_buffer_leave_the_other_modes(travelled: Bundle) -> None:
    strict = phone(image_max_width=16384, image_max_height=16384, image_pitch_alignment=4096)
    assert usable_modes(travelled, strict, "auto").modes["texture"] == ("interleave", "dma")
    with pytest.raises(UserError, match="mode alias here: its textures have rows that are not multiples of 4096 texels"):
        usable_modes(travelled, strict, "alias")


def test_pools_and_arenas_are_held_against_one_allocation(mini: MiniModel, tmp_path: Path) -> None:
    bundle = mini.open()
    descriptor = replace(load_descriptor("adreno740"), max_alloc_bytes=1 << 20)
    assert within_allocations(bundle.program, bundle.plan, descriptor, "alias") == bundle.plan
    pool = bundle.plan.layouts["alias"].pool_bytes
    tight = replace(descriptor, max_alloc_bytes=pool - 1)
    left = within_allocations(bundle.program, bundle.plan, tight, "map").layouts
    assert "alias" not in left and "map" in left
    with pytest.raises(UserError, match=f"in mode alias .* take {pool} bytes in one buffer, and adreno740 allocates at most"):
        within_allocations(bundle.program, bundle.plan, tight, "alias")
    arena = replace(bundle.program, arena_bytes=2 << 20)
    with pytest.raises(UserError, match=r"activations need 2097152 bytes in one buffer.*--budget"):
        within_allocations(arena, bundle.plan, descriptor, "alias")
    with pytest.raises(UserError, match=r"weight 'w0' needs \d+ bytes"):
        within_allocations(bundle.program, bundle.plan, replace(descriptor, max_alloc_bytes=50_000), "alias")


@pytest.mark.parametrize("device", list_devices(), ids=lambda device: device.descriptor_name)
def test_auto_takes_a_mode_that_the_bundle_has_a_layout_for(device: Device, tmp_path: Path) -> None:
    """A phone's bundle has layouts for the phone's modes, alias and interleave; a local runtime may have the second."""
    model = write_mini_bundle(tmp_path / "m.flashmem", "texture")
    bundle = model.open()
    name = str(list_devices().index(device))

    def having(*modes: str) -> Bundle:
        layouts = {mode: layout for mode, layout in bundle.plan.layouts.items() if mode in modes}
        return replace(bundle, variants=(replace(bundle.variants[0], plan=replace(bundle.plan, layouts=layouts)),))

    expected = model.reference(model.inputs())[0]
    with Session(having("interleave"), device=name) as session:
        assert session.mode == "interleave"
        np.testing.assert_allclose(session.run(None, model.inputs())[0], expected, rtol=1e-4, atol=1e-5)
    with Runtime(device=name) as runtime:
        opened = runtime.open(having("interleave"))
        np.testing.assert_allclose(opened.run(None, model.inputs())[0], expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match=r"layouts for transfer modes none, and device .* has .*interleave on the texture"):
        Session(having(), device=name)


def test_a_bundle_without_a_layout_for_any_mode_here_is_planned_anew(mini: MiniModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A phone's bundle with times of its layers, where the device has none of the phone's modes: in memory, and it is said."""
    device = list_devices()[0]
    modes = {"buffer": ("interleave", "dma")}
    monkeypatch.setattr(compatibility, "descriptor_for", lambda *_: replace(load_descriptor("pocl"), modes=modes))
    bundle, times = mini.open(), {"times": [[1e-5, []]], "of": [0] * len(mini.open().program.launches)}
    plan = replace(bundle.plan, layouts={"alias": bundle.plan.layouts["alias"]})
    there = bundle.with_plan(plan, {**bundle.meta, "layers": times, "mode": "alias"})
    said = r"has layouts for transfer modes alias, and .* has interleave, dma: it was planned anew for mode interleave, in this"
    expected = mini.reference(mini.inputs())[0]
    with pytest.warns(FlashmemWarning, match=said):
        session = Session(there, device="0", build_apart=False)
    with session:
        assert session.mode == "interleave"
        np.testing.assert_allclose(session.run(None, mini.inputs())[0], expected, rtol=1e-4, atol=1e-5)
    with pytest.warns(FlashmemWarning, match=said):
        planned, mode = fitted(there, device, "auto")
    assert mode == planned.meta["mode"] == "interleave" and list(planned.plan.layouts) == ["interleave"]
    assert planned.index == there.index and list(Bundle.open(mini.path).plan.layouts) == list(bundle.plan.layouts)
    monkeypatch.setattr(replanned, "too_large", lambda layout, device: "too large" if layout.staging_bytes else "")
    with pytest.warns(FlashmemWarning, match="planned anew for mode dma"):
        assert fitted(there, device, "auto")[1] == "dma"
    refusal = r"the bundle has layouts for transfer modes alias, and device pocl has interleave, dma on the buffer path;"
    for other in (bundle.with_plan(plan, bundle.meta), there.with_plan(replace(plan, strategy="same-op"), there.meta)):
        with pytest.raises(UserError, match=refusal):
            fitted(other, device, "auto")


def test_compiling_for_a_phone_names_the_budget_that_works(tmp_path: Path) -> None:
    text = (ROOT / "devices/adreno740.toml").read_text()
    limit, model = 300_000, DATA / "sd-tiny-unet.onnx"
    (tmp_path / "small.toml").write_text(text.replace("max_alloc_bytes = 1073741824", f"max_alloc_bytes = {limit}"))
    device = str(tmp_path / "small.toml")
    with pytest.raises(UserError, match=rf"in mode alias .* at most {limit} at a time; name a budget of {limit} bytes or less"):
        flashmem.compile(model, tmp_path / "m.flashmem", device=device)
    assert not (tmp_path / "m.flashmem").exists()
    bundle = flashmem.compile(model, tmp_path / "m.flashmem", device=device, budget=limit)
    assert bundle.plan.layouts["alias"].pool_bytes <= limit
    assert max(part.file_bytes for part in bundle.program.slices) <= limit


def test_a_bundle_names_no_folder_of_the_machine_that_compiled(tmp_path: Path) -> None:
    text = (
        (ROOT / "devices/adreno740.toml").read_text().replace('"adreno7', '"mine7')
    )  # its name, its capacity model and its counts
    (tmp_path / "mine.toml").write_text(text)
    descriptor = load_descriptor(str(tmp_path / "mine.toml"))
    assert Path(descriptor.capacity_model).is_absolute()
    assert (descriptor.portable.capacity_model, descriptor.portable.tuned) == ("mine7xx", "")
    model = default_model(descriptor.portable, "texture")
    assert isinstance(model, Roofline) and "the trained model mine7xx is not here" in model.note


@pytest.mark.parametrize(("here", "told"), [("avx512", False), ("avx2", True), ("sse", True), ("", False)])
def test_another_instruction_set_is_one_sentence(mini: MiniModel, here: str, told: bool) -> None:
    opened = Bundle.open(mini.path)
    device = replace(phone(), platform="Portable Computing Language", name="a processor", kind="cpu", instruction_set=here)
    descriptor = replace(opened.descriptor, name=device.descriptor_name, instruction_set="avx512")
    bundle = replace(opened, descriptor=descriptor)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for_processor(bundle, device)
    said = [str(each.message) for each in found if "compiled for" in str(each.message)]
    assert len(said) == told
    assert all(f"was compiled for a processor with avx512, and this one has {here}; compiled here, it" in each for each in said)
