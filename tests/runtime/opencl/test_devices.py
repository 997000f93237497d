"""Choice of the descriptor for a device, from its driver's properties, and the device's own overrides."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashmem.cli.commands.devices import show_devices
from flashmem.compiler.configs.listed import listed_configs
from flashmem.runtime.opencl.device import IMAGE_FROM_BUFFER, Device, fitting_descriptor
from flashmem.runtime.opencl.devices import choose, descriptor_for, no_device, why_not
from flashmem.runtime.opencl.discovery import list_devices
from flashmem.target.descriptor import IMPORT_HOST_MEMORY, descriptor_names, load_descriptor

ADRENO, ARM, MESA = "QUALCOMM Snapdragon(TM)", "ARM Platform", "rusticl"


@pytest.mark.parametrize(
    ("platform", "name", "version", "expected"),
    [
        (ADRENO, "QUALCOMM Adreno(TM)", "OpenCL 2.0 Adreno(TM) 540", "adreno540"),
        (ADRENO, "QUALCOMM Adreno(TM)", "OpenCL 3.0 Adreno(TM) 740", "adreno740"),
        (ADRENO, "QUALCOMM Adreno(TM) 750", "OpenCL 3.0 Adreno(TM) 750", "adreno750"),
        ("clvk", "Adreno (TM) 750", "OpenCL 3.0 CLVK on Vulkan v1.3.128 driver 2150604830", "adreno750"),
        (ADRENO, "QUALCOMM Adreno(TM)", "OpenCL 3.0 Adreno(TM) 730", "adreno730"),
        (ADRENO, "QUALCOMM Adreno(TM) 830", "OpenCL 3.0 Adreno(TM) 830", "adreno830"),
        (ADRENO, "QUALCOMM Adreno(TM)", "OpenCL 3.0 Adreno(TM) 725", "generic-gpu"),
        (ADRENO, "QUALCOMM Adreno(TM)", "OpenCL 3.0 Adreno(TM) 7401", "generic-gpu"),
        (ADRENO, "Qualcomm(R) Adreno(TM) X1-85 GPU", "OpenCL 3.0 Qualcomm(R) Adreno(TM) X1-85 GPU", "generic-gpu"),
        (ARM, "Mali-G710 r0p0", "OpenCL 3.0 v1.r51p0-00eac0.5491dbbe6a8ad90707c5bca9eec07875", "mali-g710"),
        (ARM, "Mali-G715 r0p0", "OpenCL 3.0 v1.r50p0-00eac0.9d9ad95a795d1f11bf29f66a99b2792a", "mali-g715"),
        (ARM, "Mali-G715-Immortalis MC11 r1p2", "OpenCL 3.0 v1.r38p1-01eac0", "mali-g715"),
        (ARM, "Mali-G720-Immortalis r0p0", "OpenCL 3.0 v1.r53p0", "mali-g720"),
        (ARM, "Mali-G720-Immortalis MC12 r0p0", "OpenCL 3.0 v1.r44p1-01eac0", "mali-g720"),
        (ARM, "Mali-G610 MC6 r0p0", "OpenCL 3.0 v1.g13p0-01eac0.9113fb3d6cbac82527a272992153edf9", "generic-gpu"),
        (ARM, "Mali-G71", "OpenCL 2.0 v1.r9p0-01rel0.37c12a13c46b4c2d9d736e0d5ace2e5e", "generic-gpu"),
        (ARM, "Mali-T880", "OpenCL 1.2 v1.r22p0-01rel0", "generic-gpu"),
        (MESA, "FD740", "OpenCL 3.0", "generic-gpu"),
        ("NVIDIA CUDA", "NVIDIA H200", "OpenCL 3.0 CUDA", "nvidia"),
        ("AMD Accelerated Parallel Processing", "gfx1100", "OpenCL 2.0", "generic-gpu"),
    ],
)
def test_a_gpu_gets_its_own_descriptor_or_the_generic_one(platform: str, name: str, version: str, expected: str) -> None:
    assert expected in descriptor_names()
    assert fitting_descriptor("gpu", platform, name, version, descriptor_names()) == expected
    assert fitting_descriptor("gpu", platform.upper(), name.upper(), version.upper(), descriptor_names()) == expected


@pytest.mark.parametrize(
    ("platform", "expected"),
    [("Portable Computing Language", "pocl"), ("Intel(R) OpenCL", "intel-cpu"), ("Oclgrind", "generic-cpu")],
)
def test_a_cpu_is_known_by_its_platform(platform: str, expected: str) -> None:
    assert fitting_descriptor("cpu", platform, "a processor", "OpenCL 3.0", descriptor_names()) == expected


def phone(**changes: Any) -> Device:
    """An Adreno 740 with limits that differ from the descriptor's."""
    values = {
        "platform": ADRENO,
        "platform_version": "OpenCL 3.0 QUALCOMM build",
        "name": "QUALCOMM Adreno(TM)",
        "vendor": "QUALCOMM",
        "version": "OpenCL 3.0 Adreno(TM) 740",
        "driver_version": "OpenCL 3.0 QUALCOMM build Compiler E031.41.03.62",
        "kind": "gpu",
        "extensions": frozenset({IMAGE_FROM_BUFFER}),
        "has_images": True,
        "image_max_width": 16383,
        "image_max_height": 8191,
        "image_pitch_alignment": 32,
        "image_base_alignment": 32,
        "base_address_alignment": 128,
        "max_alloc_bytes": 700_000_000,
        "global_memory_bytes": 3_000_000_000,
        "unified_memory": True,
        "compute_units": 6,
        "handle": None,
    }
    return Device(**(values | changes))


def test_limits_are_the_devices_and_rates_the_descriptors() -> None:
    shipped, descriptor = load_descriptor("adreno740"), descriptor_for(phone())
    assert (descriptor.name, descriptor.measured) == ("adreno740", False)
    assert (descriptor.tile, descriptor.rates) == (shipped.tile, shipped.rates)
    assert (descriptor.image_max_width, descriptor.image_max_height) == (16383, 8191)
    assert (descriptor.image_pitch_alignment, descriptor.max_alloc_bytes) == (32, 700_000_000)
    assert descriptor.memory_paths[0] == "texture" and descriptor.modes["texture"][0] == "alias"


def test_what_the_driver_lacks_is_not_taken_from_the_descriptor() -> None:
    without_view = descriptor_for(phone(extensions=frozenset(), image_pitch_alignment=0))
    assert "alias" not in without_view.modes["texture"] and "alias" in without_view.modes["buffer"]
    without_images = descriptor_for(phone(has_images=False, image_max_width=0, image_max_height=0, image_pitch_alignment=0))
    assert without_images.memory_paths == ("buffer",) == tuple(without_images.modes)


def test_a_gpu_that_emulates_fma_multiplies_and_adds_by_mad() -> None:
    def way(**changes: Any) -> str:
        return descriptor_for(phone(**changes)).code.multiply_add

    unknown = {"platform": ARM, "name": "Mali-G610 MC6 r0p0", "vendor": "ARM", "version": "OpenCL 3.0 v1.g13p0"}
    assert (way(), way(version="OpenCL 3.0 Adreno(TM) 725")) == ("mad", "mad")
    assert (way(**unknown), way(**unknown, fuses=False)) == ("fma", "mad")
    assert way(**{**unknown, "name": "Mali-G710 r0p0"}, fuses=False) == "fma", "its descriptor knows better"
    for device in list_devices():  # Intel's CPU runtime reports none, on processors that have it
        assert descriptor_for(device).code == load_descriptor(device.descriptor_name).code


def test_only_a_device_with_tensor_cores_has_their_configs() -> None:
    new = phone(platform="NVIDIA CUDA", name="NVIDIA H100", vendor="NVIDIA Corporation", mma=True)
    shipped = listed_configs(load_descriptor("nvidia"))
    assert listed_configs(descriptor_for(new)) == shipped
    others = tuple(each for each in shipped if "mma" not in each.needs)
    assert listed_configs(descriptor_for(replace(new, mma=False))) == others != shipped


def test_the_order_of_modes_is_the_descriptors() -> None:
    listed = load_descriptor("adreno740").modes["texture"]
    assert descriptor_for(phone()).modes["texture"][: len(listed)] == listed
    without_view = descriptor_for(phone(extensions=frozenset(), image_pitch_alignment=0))
    assert without_view.modes["texture"] == ("interleave", "dma"), "what is not listed comes last"
    assert descriptor_for(phone(unified_memory=False)).modes["buffer"] == ("interleave", "dma")
    for device in list_devices():
        found, shipped = descriptor_for(device), load_descriptor(device.descriptor_name)
        for path, modes in found.modes.items():
            kept = [mode for mode in shipped.modes.get(path, ()) if mode in modes]
            assert list(modes[: len(kept)]) == kept
            assert set(modes) <= set(found.rates.contention), "the cost of every mode is known"


def test_a_gpu_reads_files_in_place_after_a_probe_has_passed_on_it() -> None:
    driver = "OpenCL 3.0 v1.r53p0"
    mali = phone(
        platform=ARM, name="Mali-G720-Immortalis r0p0", version=driver, extensions=phone().extensions | {IMPORT_HOST_MEMORY}
    )
    assert "no probe has shown" in why_not(mali)["buffer"]["map"] and "map" not in descriptor_for(mali).modes["buffer"]
    passed = {IMPORT_HOST_MEMORY: mali.driver, "cl_qcom_recordable_queues": mali.driver}
    found, shipped = descriptor_for(mali, passed), load_descriptor("mali-g720")
    for path in ("buffer", "texture"):
        assert found.modes[path] == (*shipped.modes[path], "map", "dma")
        assert "map" not in why_not(mali, passed)[path]
    assert found.rates.contention["map"] == shipped.rates.contention["alias"] and not found.uses_host_memory
    assert found.probed == {IMPORT_HOST_MEMORY: mali.driver}, "the device lacks the other extension"
    updated = replace(mali, driver_version="newer")
    apart = replace(mali, unified_memory=False)
    for other in (updated, apart, phone()):
        assert "map" in why_not(other, passed)["buffer"] and "map" not in descriptor_for(other, passed).modes["buffer"]


def test_arithmetic_follows_the_number_of_cores() -> None:
    shipped = load_descriptor("mali-g720")
    ten = descriptor_for(phone(platform=ARM, name="Mali-G720-Immortalis r0p0", version="OpenCL 3.0 v1.r53p0", compute_units=10))
    assert ten.rates.gemm_flops == pytest.approx(shipped.rates.gemm_flops * 10 / 12)
    assert (ten.cores, ten.parallelism) == (10, 10240)
    assert ten.rates.memory_bandwidth == shipped.rates.memory_bandwidth
    assert descriptor_for(phone(compute_units=99)).rates == load_descriptor("adreno740").rates, "it states no number of cores"


@pytest.mark.parametrize(
    ("machine", "android", "advice"),
    [
        ("x86_64", False, "pip install intel-opencl-rt"),
        ("AMD64", False, "pip install intel-opencl-rt"),
        ("aarch64", False, "apt-get install pocl-opencl-icd"),
        ("aarch64", True, "flashmem doctor"),
        ("x86_64", True, "flashmem doctor"),
    ],
)
def test_where_there_is_no_device_the_advice_is_for_this_machine(machine: str, android: bool, advice: str) -> None:
    said = str(no_device(machine, android=android))
    assert said.startswith("no OpenCL device is here; ") and said.endswith(advice)


def test_a_phone_is_chosen_by_the_name_of_its_descriptor() -> None:
    devices = [phone(version="OpenCL 3.0 Adreno(TM) 725"), phone()]
    assert choose(devices, "adreno740") is devices[1]
    assert choose(devices, "auto", prefer="adreno740") is devices[1]
    assert choose(devices, "auto") is devices[0]


def test_devices_says_which_descriptor_and_whether_it_is_the_devices_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "flashmem.cli.commands.devices.list_devices", lambda: (phone(version="OpenCL 3.0 Adreno(TM) 725"), phone())
    )
    show_devices(as_json=False)
    generic, own = (line.split(maxsplit=1)[1] for line in capsys.readouterr().out.splitlines() if "descriptor" in line)
    assert generic == "generic-gpu (none of this device's own; rates published or assumed)"
    assert own == "adreno740 (rates published or assumed)"


def test_rates_are_said_to_be_of_the_processor_they_were_measured_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A driver's name for a CPU is that of several generations, so family, model and cores count; a GPU's name is unique."""
    system = (
        "processor\t: 0\nmodel name\t: AMD EPYC\ncpu family\t: {}\nmodel\t\t: {}\n\nprocessor\t: 1\nmodel name\t: another\n"
    )
    cpuinfo = tmp_path / "cpuinfo"
    monkeypatch.setattr("flashmem.runtime.opencl.cpuinfo.CPUINFO", cpuinfo)
    intel = replace(phone(), platform="Intel(R) OpenCL", name="AMD EPYC", version="", kind="cpu", compute_units=2)
    measured_on = load_descriptor("intel-cpu").measured_on

    def said(device: Device) -> str:
        monkeypatch.setattr("flashmem.cli.commands.devices.list_devices", lambda: (device,))
        show_devices(as_json=False)
        [line] = [line for line in capsys.readouterr().out.splitlines() if "descriptor" in line]
        return line.split(maxsplit=1)[1]

    cpuinfo.write_text(system.format(26, 2))
    assert said(intel) == "intel-cpu (rates measured on AMD EPYC, family 26 model 2, 2 cores)"
    others = f"intel-cpu (rates measured on {measured_on}; this is {{}}, another one)"
    assert said(replace(intel, compute_units=16)) == others.format("AMD EPYC, family 26 model 2, 16 cores")
    cpuinfo.write_text(system.format(25, 1))
    assert said(intel) == others.format("AMD EPYC, family 25 model 1, 2 cores")
    cpuinfo.unlink()
    assert said(intel) == others.format("AMD EPYC, 2 cores")
    gpu = replace(phone(), platform="NVIDIA CUDA", name="NVIDIA H200", version="", kind="gpu")
    assert said(gpu) == "nvidia (rates measured on NVIDIA H200)"
    assert said(replace(gpu, name="NVIDIA H100")).endswith("(rates measured on NVIDIA H200; this is NVIDIA H100, another one)")


@pytest.mark.parametrize("name", descriptor_names())
def test_measured_rates_name_their_processor(name: str) -> None:
    descriptor = load_descriptor(name)
    assert bool(descriptor.measured_on) == descriptor.measured
    assert not descriptor.measured or descriptor.measured_on.split(",")[0] in descriptor.sources["gemm_flops"]
