"""Dot products of bytes on the strict device: phones' extensions, imitated, and devices without them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

import flashmem
from flashmem.base.types import MemoryPath
from flashmem.cli.commands.devices import show_devices
from flashmem.cli.commands.doctor import _facts, _print_device
from flashmem.runtime.opencl.discovery import list_devices
from flashmem.runtime.opencl.dot_products import ARM, ARM_ACCUMULATED, KHRONOS, KHRONOS_MIXED
from flashmem.runtime.opencl.matrix_extensions import UNUSED, unused_of
from tests.support.caches import kernels_built_by_runs
from tests.support.integer_products import Case, exact
from tests.support.strict_device import PROFILES, BrokenRuleError
from tests.support.strict_device.door import strict
from tests.support.strict_program import Small

ADRENO, MALI = (next(each for each in PROFILES if each.name == name) for name in ("adreno7xx", "mali-valhall"))
DEVICES = {
    KHRONOS_MIXED: ADRENO,
    KHRONOS: replace(MALI, extensions=MALI.extensions | {KHRONOS}, fast_dot_products=(1, 1, 0, 1, 1, 0)),
    ARM_ACCUMULATED: MALI,
    ARM: replace(MALI, extensions=MALI.extensions - {ARM_ACCUMULATED}),
    "": PROFILES[0],
}
"""By the instruction that is expected."""

CASES = (
    Case("uint8", "uint8", sizes=(7, 260, 21), zero=200, weight_zero=77, by_column=True, ends=True),
    Case("int8", "int8", (1, 8, 7, 6), (12, 8, 3, 3), zero=-90, attributes=(("pads", (1, 1, 1, 1)),)),
    # Four words of a row are read at a time.
    Case("int8", "uint8", sizes=(9, 272, 44), zero=-128, weight_zero=255, ends=True),
    Case(
        "uint8", "int8", (2, 32, 7, 6), (24, 16, 3, 2), zero=11, weight_zero=5, by_column=True,
        attributes=(("pads", (1, 0, 1, 1)), ("strides", (2, 1)), ("group", 2)),
    ),
)  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore:.*was compiled for")


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Under every strict device is PoCL: see `kernels_built_by_runs`."""
    monkeypatch.setenv("FLASHMEM_CACHE_DIR", str(tmp_path / "cache"))
    kernels_built_by_runs(monkeypatch, saved=False)
    yield


@pytest.mark.parametrize("dots", DEVICES)
@pytest.mark.parametrize("path", ["buffer", "texture"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_use_the_extension(case: Case, path: MemoryPath, dots: str, tmp_path: Path) -> None:
    model, feeds = case.model()
    onnx.save(model, tmp_path / "m.onnx")
    with strict(DEVICES[dots]) as device:
        [here] = list_devices()
        assert here.dots == dots
        bundle = flashmem.compile(tmp_path / "m.onnx", tmp_path / "b", device="adreno750", memory_path=path, build=False)
        for mode in ("alias", "interleave"):
            with flashmem.Session(bundle, mode=mode) as session:  # type: ignore[arg-type]
                assert np.array_equal(session.run(None, feeds)[0], exact(case))
        assert device.rules.broken == []


def test_a_driver_that_says_that_they_are_slow() -> None:
    with strict(replace(ADRENO, fast_dot_products=(0, 1, 0, 0, 1, 0))):
        [here] = list_devices()
        assert here.dots == ""
    with strict(replace(MALI, extensions=MALI.extensions | {KHRONOS}, fast_dot_products=(0, 1, 0, 0, 1, 0))):
        [here] = list_devices()
        assert here.dots == ARM_ACCUMULATED
    with strict(replace(ADRENO, extensions=ADRENO.extensions - {KHRONOS})):
        [here] = list_devices()
        assert here.dots == ""


def test_devices_and_doctor_say_what_is_used_and_what_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    more = {"cl_qcom_ml_ops", "cl_qcom_dot_product8"}
    with strict(replace(ADRENO, extensions=ADRENO.extensions | more)):
        [here] = list_devices()
        assert set(unused_of(here.extensions)) == more
        show_devices(as_json=False)
        listed = capsys.readouterr().out
        _print_device(0, here, [])
        examined = " ".join(capsys.readouterr().out.split())
        assert set(_facts(here)["unused_extensions"]) == more
    for said in ("products of 8 bits by cl_khr_integer_dot_product, mixed", *(f"{each}: {UNUSED[each]}" for each in more)):
        assert said in " ".join(listed.split()) and said in examined


@pytest.mark.parametrize(
    ("call", "name"),
    [("dot_4x8packed_ss_int(1u, 2u)", KHRONOS), ("arm_dot_acc((char4)(1), (char4)(2), 3)", ARM_ACCUMULATED)],
)
def test_the_strict_device_refuses_functions_of_an_extension_that_it_lacks(call: str, name: str) -> None:
    source = f"__kernel void k(__global int* y) {{ y[0] = {call}; }}"
    for profile in (PROFILES[0], *(each for each in (ADRENO, MALI) if name not in each.extensions)):
        with strict(profile) as device, pytest.raises(BrokenRuleError, match=f"uses {name}"):
            device.Program(Small(device).context, source).build([])
