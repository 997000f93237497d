"""`flashmem doctor`: its findings on three phones, given as file trees, and on every runtime of this machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from flashmem.cli.commands import doctor
from flashmem.runtime.opencl.discovery import list_devices
from flashmem.tools.doctor import surroundings
from flashmem.tools.doctor.advice import ADRENO_LINE, MALI_LINE, next_lines, steps
from flashmem.tools.doctor.selftest import SelfTestResult, disk, run_apart
from flashmem.tools.doctor.surroundings import FORBIDDEN, Surroundings, look
from tests.support.command_line import Command, command_line

PREFIX = "/data/data/com.termux/files/usr"
FORBIDS = f'library "libOpenCL.so" needed or dlopened by "python3" is {FORBIDDEN} "default"'


class Phone:
    """A file tree, and Termux's environment in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.environment = {"PREFIX": PREFIX}

    def file(self, path: str, content: str = "ELF", *, age: int = 100) -> Phone:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
        os.utime(file, (1e9 - age, 1e9 - age))
        return self

    def termux_package(self, copied: str = "", *, age: int = 50) -> Phone:
        """Install `opencl-vendor-driver`: an .icd file, and an empty library until it has copied the driver."""
        self.file(f"{PREFIX}/etc/OpenCL/vendors/vendor.icd", f"{PREFIX}/opt/vendor/lib/libOpenCL.so\n")
        return self.file(f"{PREFIX}/opt/vendor/lib/libOpenCL.so", copied, age=age)

    def look(self, refuse: Callable[[str], str] = lambda path: "") -> Surroundings:
        return look(self.root, self.environment, android=True, machine="aarch64", open_library=refuse)


@pytest.fixture
def adreno(tmp_path: Path) -> Phone:
    """A Snapdragon phone: its libOpenCL.so is not a driver that a loader could use."""
    phone = Phone(tmp_path).file("/vendor/lib64/libOpenCL.so").file("/vendor/lib64/libOpenCL_adreno.so")
    phone.file("/vendor/etc/public.libraries.txt", "libOpenCL.so\nlibadsprpc.so\n")
    phone.file("/system/build.prop", "ro.build.version.release=15\n")
    return phone.file(f"{PREFIX}/lib/libOpenCL.so")


@pytest.fixture
def mali(tmp_path: Path) -> Phone:
    """A MediaTek phone: OpenCL is inside the GL driver, in a folder for the chip."""
    phone = Phone(tmp_path).file("/vendor/lib64/egl/mt6895/libGLES_mali.so").file("/vendor/lib64/libOpenCL.so")
    phone.file("/vendor/etc/public.libraries.txt", "libnpu.so 64\n")
    return phone.file(f"{PREFIX}/lib/libOpenCL.so")


@pytest.fixture
def powervr(tmp_path: Path) -> Phone:
    return Phone(tmp_path).file("/vendor/lib64/libPVROCL.so").file(f"{PREFIX}/lib/libOpenCL.so")


def said(around: Surroundings, what: str) -> tuple[bool | None, str]:
    found = [(step.ok, step.said) for step in steps(around) if step.what == what]
    assert found, f"nothing is said of {what}"
    return found[0]


def test_an_adreno_needs_the_vendors_folder_first(adreno: Phone) -> None:
    around = adreno.look()
    assert [(driver.family, driver.path) for driver in around.drivers] == [("adreno", "/vendor/lib64/libOpenCL.so")]
    assert (around.system, around.listed, around.loaders) == ("Android 15", True, (f"{PREFIX}/lib/libOpenCL.so",))
    assert next_lines(steps(around)) == ("export LD_LIBRARY_PATH=/vendor/lib64:$PREFIX/lib",) == (ADRENO_LINE,)
    adreno.environment["LD_LIBRARY_PATH"] = f"{PREFIX}/lib:/vendor/lib64"
    around = adreno.look()
    ok, why = said(around, "library path")
    assert ok is False and "the order matters" in why
    assert next_lines(steps(around)) == (ADRENO_LINE,)
    adreno.environment["LD_LIBRARY_PATH"] = f"/vendor/lib64:{PREFIX}/lib"
    assert said(adreno.look(), "library path")[0] is True


def test_an_older_android_has_the_folder_elsewhere(tmp_path: Path) -> None:
    around = Phone(tmp_path).file("/system/vendor/lib64/libOpenCL.so").look()
    assert next_lines(steps(around)) == ("export LD_LIBRARY_PATH=/system/vendor/lib64:$PREFIX/lib",)


def test_an_adreno_that_the_linker_forbids_is_copied(adreno: Phone) -> None:
    around = adreno.look(lambda path: FORBIDS)
    assert next_lines(steps(around)) == (ADRENO_LINE,), "first the path, which may be enough"
    adreno.environment["LD_LIBRARY_PATH"] = f"/vendor/lib64:{PREFIX}/lib"
    around = adreno.look(lambda path: FORBIDS)
    lines = next_lines(steps(around))
    assert lines[0] == "mkdir -p $HOME/.opencl" and lines[1].startswith("cd /vendor/lib64 && cp libOpenCL*.so ")
    assert lines[2] == "export LD_LIBRARY_PATH=$HOME/.opencl:$PREFIX/lib"
    adreno.environment["LD_LIBRARY_PATH"] = f"/data/data/com.termux/files/home/.opencl:{PREFIX}/lib"
    assert said(adreno.look(), "library path")[0] is True


def test_a_mali_needs_a_package_that_copies_its_driver(mali: Phone) -> None:
    around = mali.look(lambda path: FORBIDS)
    driver = "/vendor/lib64/egl/mt6895/libGLES_mali.so"
    assert [(driver.family, driver.path) for driver in around.drivers] == [("mali", driver)]
    assert said(around, "public libraries") == (None, "libOpenCL.so is not among those that the vendor lets apps load")
    assert next_lines(steps(around)) == (f"OVERRIDE_LIBOPENCL={driver} {MALI_LINE}",)
    empty = mali.termux_package().look()
    assert empty.copied == "" and empty.icds[0].broken.endswith("libOpenCL.so is empty")
    assert next_lines(steps(empty)) == (f"OVERRIDE_LIBOPENCL={driver} pkg reinstall opencl-vendor-driver",)
    done = mali.termux_package("ELF").look()
    assert said(done, "opencl-vendor-driver") == (True, f"{PREFIX}/opt/vendor/lib/libOpenCL.so")
    old = mali.termux_package("ELF", age=5000).look()
    assert said(old, "opencl-vendor-driver")[1].endswith("the system was updated since")


def test_the_packages_own_place_of_a_mali_needs_no_override(tmp_path: Path) -> None:
    around = Phone(tmp_path).file("/vendor/lib64/egl/libGLES_mali.so").look()
    assert next_lines(steps(around)) == (MALI_LINE,) == ("pkg install ocl-icd opencl-vendor-driver",)


def test_a_powervr_is_treated_as_a_mali_is(powervr: Phone) -> None:
    assert next_lines(steps(powervr.look())) == (MALI_LINE,)


def test_a_phone_without_a_driver_or_outside_termux(tmp_path: Path) -> None:
    phone = Phone(tmp_path)
    (tmp_path / "vendor/lib64").mkdir(parents=True)
    ok, why = said(phone.look(), "vendor's driver")
    assert ok is False and "this phone has none" in why
    phone.environment.clear()
    assert next_lines(steps(phone.file("/vendor/lib64/libOpenCL.so").look())) == ("open Termux, and run flashmem doctor there",)


def test_termux_without_a_loader_is_told_which_package_has_one(tmp_path: Path) -> None:
    phone = Phone(tmp_path).file("/vendor/lib64/libOpenCL.so")
    phone.environment["LD_LIBRARY_PATH"] = f"/vendor/lib64:{PREFIX}/lib"
    assert next_lines(steps(phone.look())) == ("pkg install ocl-icd",)
    assert said(phone.file(f"{PREFIX}/lib/libOpenCL.so").look(), "loader") == (True, f"{PREFIX}/lib/libOpenCL.so")


@pytest.mark.parametrize("named", ["/elsewhere/vendors", "/elsewhere/vendors/mine.icd"])
def test_drivers_that_the_user_named_are_the_loader_s(named: str, adreno: Phone, monkeypatch: pytest.MonkeyPatch) -> None:
    adreno.termux_package("ELF").file("/elsewhere/vendors/mine.icd", "libmine.so\n")
    adreno.environment["OCL_ICD_VENDORS"] = named
    assert said(adreno.look(), "drivers of the loader") == (True, "/elsewhere/vendors/mine.icd: libmine.so")
    monkeypatch.setattr(surroundings, "pip_runtimes", lambda: (Path("libintelocl.so"),))
    assert look(environment={}).pip == ("libintelocl.so",) and look(environment=adreno.environment).pip == ()


def test_pyopencl_comes_after_the_driver(adreno: Phone) -> None:
    adreno.environment["LD_LIBRARY_PATH"] = f"/vendor/lib64:{PREFIX}/lib"
    lines = next_lines(steps(adreno.look()))
    assert (
        lines[0].startswith("pkg install python python-numpy ")
        and lines[-1] == "pip install --no-build-isolation --no-deps pyopencl"
    )


@pytest.mark.parametrize(
    ("machine", "line"), [("x86_64", "pip install intel-opencl-rt"), ("aarch64", "apt-get install pocl-opencl-icd")]
)
def test_a_desk_is_told_of_a_driver_that_exists_for_it(tmp_path: Path, machine: str, line: str) -> None:
    around = look(tmp_path, {}, android=False, machine=machine, open_library=lambda path: "")
    lines = [each for step in steps(around) for each in step.then]
    assert lines == ["pip install pyopencl", line]
    arm = [each for each in lines if "intel-opencl-rt" in each]
    assert bool(arm) == (machine == "x86_64")


@pytest.mark.every_driver
@pytest.mark.parametrize("number", range(len(list_devices())))
def test_every_runtime_here_passes_its_self_test(number: int, tmp_path: Path) -> None:
    device, results = list_devices()[number], run_apart(number, tmp_path)
    assert [result.test for result in results] == [
        "build a kernel", "textures", "textures over buffers", "mapped buffers", "copies during kernels",
    ]  # fmt: skip
    assert not [result for result in results if result.ok is False], results
    assert (results[2].ok is True) == device.has_image_from_buffer and (results[1].ok is True) == device.has_images
    assert results[4].rate is not None and results[4].rate > 1e6


def test_a_driver_that_ends_the_process_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import subprocess

    line = '{"test": "build a kernel", "ok": true, "said": "1 ms", "rate": null}\n'
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], -11, f"hello\n{line}", ""))
    results = run_apart(0, tmp_path)
    assert results[0] == SelfTestResult("build a kernel", True, "1 ms")
    assert results[1] == SelfTestResult("the self test", False, "the driver ended the process with signal 11, after 1 tests")


def test_the_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    result = disk(tmp_path / "new")
    assert result.ok and result.rate is not None and "GB/s cold" in result.said
    assert list((tmp_path / "new").iterdir()) == []


def test_the_cache_of_another_user_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert disk(tmp_path) == SelfTestResult("disk", False, f"{tmp_path} belongs to another user")


def test_the_command_prints_a_report_and_the_same_as_json(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flashmem: Command = command_line(monkeypatch, capfd)
    monkeypatch.setenv("FLASHMEM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(doctor, "run_apart", lambda number, folder: [SelfTestResult("build a kernel", True, "1 ms")])
    shown = flashmem("doctor")
    assert shown.code == 0 and "Type next" not in shown.out
    for word in ("pyopencl", "libOpenCL", "textures", "map, alias, dma, interleave", "GB/s cold", "not texture"):
        assert word in shown.out
    report = flashmem("doctor", "--json").json
    assert [each["name"] for each in report["devices"]] == [device.name for device in list_devices()]
    assert report["next"] == [] and report["devices"][0]["tests"][0]["ok"] and report["disk"]["rate"] > 0
    monkeypatch.setattr(doctor, "run_apart", lambda number, folder: [SelfTestResult("textures", False, "wrong")])
    assert flashmem("doctor").code == 1
    monkeypatch.setattr(doctor, "_devices", lambda: ((), "no OpenCL device is here"))
    missing = flashmem("doctor")
    assert missing.code == 1 and "Type next:\n    " in missing.out
