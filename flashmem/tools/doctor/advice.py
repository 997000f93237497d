"""Diagnosis of OpenCL from the facts in `surroundings`: a sequence of steps, with the commands for a failed step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from flashmem.tools.doctor.surroundings import FORBIDDEN, Driver, Surroundings


@dataclass(frozen=True)
class CheckedItem:
    """One checked item. `ok` is None if the item does not matter on this machine.

    `then` lists the commands to run, in order. Only those of the first failed step are useful.
    """

    what: str
    ok: bool | None
    said: str
    then: tuple[str, ...] = ()


ADRENO_LINE = "export LD_LIBRARY_PATH=/vendor/lib64:$PREFIX/lib"
MALI_LINE = "pkg install ocl-icd opencl-vendor-driver"
PYOPENCL_LINES = (
    "pkg install python python-numpy clang cmake ninja ocl-icd opencl-headers",
    "pip install scikit-build-core nanobind pytools platformdirs typing_extensions",
    "pip install --no-build-isolation --no-deps pyopencl",
)
"""Commands that build pyopencl on Android, for which there is no wheel. Without build isolation it uses Termux's numpy."""

OWN_FOLDER = "$HOME/.opencl"


def steps(around: Surroundings, devices: Sequence[str] = ()) -> list[CheckedItem]:
    """The steps to a working device, from the bottom up. `devices` are the names that OpenCL lists."""
    found = [_driver(around)]
    if around.android:
        found += [*_namespaces(around), *_termux(around)]
    found += [_loader(around), _icds(around), _check_binding(around), _devices(around, devices)]
    return found


def next_lines(found: Sequence[CheckedItem]) -> tuple[str, ...]:
    """The commands to run now: those of the first failed step that has any."""
    return next((step.then for step in found if step.ok is False and step.then), ())


def _driver(around: Surroundings) -> CheckedItem:
    if around.drivers:
        known = ", ".join(f"{driver.path} ({_FAMILIES[driver.family]})" for driver in around.drivers)
        return CheckedItem("vendor's driver", True, known)
    if around.android:
        places = "/vendor/lib64, /system/vendor/lib64"
        return CheckedItem(
            "vendor's driver",
            False,
            f"none of libOpenCL.so, libGLES_mali.so and libPVROCL.so is in {places}: this phone has none",
        )
    if around.pip:
        return CheckedItem("driver of pip", True, ", ".join(around.pip))
    return CheckedItem("driver of pip", None, "none")


_FAMILIES = {"adreno": "Qualcomm Adreno", "mali": "Arm Mali", "powervr": "Imagination PowerVR"}


def _namespaces(around: Surroundings) -> list[CheckedItem]:
    """Check whether Android lets programs load the driver from its folder."""
    found = []
    if around.listed is not None:
        said = "libOpenCL.so is" if around.listed else "libOpenCL.so is not"
        found.append(
            CheckedItem("public libraries", around.listed or None, f"{said} among those that the vendor lets apps load")
        )
    for driver in around.drivers:
        if not driver.refusal:
            found.append(CheckedItem("linker", True, f"{driver.path} can be loaded"))
        elif FORBIDDEN in driver.refusal:
            copies = driver.family == "adreno"  # the package `opencl-vendor-driver` copies a Mali's
            found.append(
                CheckedItem(
                    "linker", False if copies and _adreno_is_first(around) else None, driver.refusal, _copy_commands(driver)
                )
            )
        else:
            found.append(CheckedItem("linker", None, driver.refusal))
    return found


def _copy_commands(driver: Driver) -> tuple[str, ...]:
    """Commands that copy the driver and its dependencies to a folder from which programs may load them."""
    names = "libOpenCL*.so libadreno_*.so libgsl.so libCB.so libllvm-*.so libq3dtools_adreno.so"
    return (
        f"mkdir -p {OWN_FOLDER}",
        f"cd {PurePosixPath(driver.path).parent} && cp {names} {OWN_FOLDER}/; cd -",
        f"export LD_LIBRARY_PATH={OWN_FOLDER}:$PREFIX/lib",
    )


def _termux(around: Surroundings) -> list[CheckedItem]:
    if not around.prefix:
        return [
            CheckedItem(
                "Termux",
                False,
                "PREFIX is not set: this is not Termux's shell",
                ("open Termux, and run flashmem doctor there",),
            )
        ]
    if not around.drivers:
        return []
    family = around.drivers[0].family
    return [_adreno(around)] if family == "adreno" else [_copying_package(around, around.drivers[0])]


def _adreno_is_first(around: Surroundings) -> bool:
    """Whether the linker finds the vendor's libOpenCL.so before Termux's."""
    vendors = [i for i, part in enumerate(around.search) if "vendor/lib" in part or part.endswith("/.opencl")]
    own = [i for i, part in enumerate(around.search) if part.rstrip("/") == f"{around.prefix}/lib"]
    return bool(vendors) and (not own or vendors[0] < own[0])


def _adreno(around: Surroundings) -> CheckedItem:
    """An Adreno's driver is not an ICD: it must replace the loader."""
    if _adreno_is_first(around):
        return CheckedItem("library path", True, "the vendor's folder comes before Termux's in LD_LIBRARY_PATH")
    said = "LD_LIBRARY_PATH does not name the vendor's folder, so Termux's loader is used, which cannot use this driver"
    if any("vendor/lib" in part for part in around.search):
        said = "LD_LIBRARY_PATH has Termux's folder before the vendor's; the order matters: the first libOpenCL.so is used"
    line = ADRENO_LINE.replace("/vendor/lib64", str(PurePosixPath(around.drivers[0].path).parent))
    return CheckedItem("library path", False, said, (line,))


def _copying_package(around: Surroundings, driver: Driver) -> CheckedItem:
    """For Mali and PowerVR: the package copies the driver to a folder from which Termux's loader may load it."""
    usual = {"libGLES_mali.so": "egl", "libPVROCL.so": "lib64"}
    path = PurePosixPath(driver.path)
    override = "" if path.parent.name == usual.get(path.name) else f"OVERRIDE_LIBOPENCL={driver.path} "
    if not around.copied:
        said = "the driver is not in a folder that Termux's loader may use; the package opencl-vendor-driver copies it"
        installed = any(icd.library.endswith("opt/vendor/lib/libOpenCL.so") for icd in around.icds)
        line = "pkg reinstall opencl-vendor-driver" if installed else MALI_LINE
        return CheckedItem("opencl-vendor-driver", False, said, (override + line,))
    if around.outdated:
        said = f"{around.copied} is older than the vendor's driver: the system was updated since"
        return CheckedItem("opencl-vendor-driver", False, said, (f"{override}pkg reinstall opencl-vendor-driver",))
    return CheckedItem("opencl-vendor-driver", True, around.copied)


def _loader(around: Surroundings) -> CheckedItem:
    """The libOpenCL.so that programs are linked with; if pyopencl is installed, the one that it has loaded."""
    if around.loaded:
        return CheckedItem("loader", True, around.loaded)
    if around.loaders:
        return CheckedItem("loader", True, ", ".join(around.loaders))
    if around.android:
        return CheckedItem("loader", False, "Termux has no libOpenCL.so", ("pkg install ocl-icd",))
    return CheckedItem("loader", None, "no libOpenCL.so in the usual folders; pip's pyopencl contains one")


def _icds(around: Surroundings) -> CheckedItem:
    if not around.icds:
        return CheckedItem("drivers of the loader", None, "no .icd file names one")
    said = "; ".join(f"{icd.path}: {icd.broken or icd.library}" for icd in around.icds)
    return CheckedItem("drivers of the loader", True if any(not icd.broken for icd in around.icds) else None, said)


def _check_binding(around: Surroundings) -> CheckedItem:
    if around.pyopencl:
        return CheckedItem("pyopencl", True, around.pyopencl)
    lines = PYOPENCL_LINES if around.android else ("pip install pyopencl",)
    return CheckedItem("pyopencl", False, around.pyopencl_error or "it is not installed", lines)


def _devices(around: Surroundings, devices: Sequence[str]) -> CheckedItem:
    if devices:
        return CheckedItem("devices", True, "; ".join(devices))
    lines: tuple[str, ...] = ()
    if not around.android:
        x86 = around.machine.lower() in ("x86_64", "amd64")
        lines = ("pip install intel-opencl-rt",) if x86 else ("apt-get install pocl-opencl-icd",)
    return CheckedItem("devices", False, "OpenCL lists none", lines)
