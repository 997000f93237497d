"""Facts about OpenCL on this machine, from its files and its dynamic linker. `advice` interprets them.

Android's vendors install their drivers in a few folders, and Termux has packages that use them. The names are from the script
that installs Termux's `opencl-vendor-driver` (docs/how-to/phones.md has the links).
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from flashmem.base.pages import SYSTEM_PAGE
from flashmem.runtime.opencl.devices import is_android
from flashmem.runtime.opencl.icd import VARIABLE, pip_runtimes

Family = Literal["adreno", "mali", "powervr"]

_LIBRARIES = ("vendor/lib64", "system/vendor/lib64", "vendor/lib", "system/vendor/lib")
_NAMES: dict[Family, tuple[str, ...]] = {
    "mali": ("egl/libGLES_mali.so", "egl/*/libGLES_mali.so", "libGLES_mali.so"),
    "powervr": ("libPVROCL.so",),
    "adreno": ("libOpenCL.so",),
}
"""The libraries with OpenCL in such a folder. Mali and PowerVR may have a libOpenCL.so too; Adreno has only that."""

_LISTS = ("vendor/etc/public.libraries.txt", "system/etc/public.libraries.txt", "system/vendor/etc/public.libraries.txt")
_VENDORS = "etc/OpenCL/vendors"
_LOADER_FOLDERS = ("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "usr/lib", "usr/local/lib", "lib")
_PROBE = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
FORBIDDEN = "not accessible for the namespace"
"""The message of Android's linker for a library that programs may not load."""


@dataclass(frozen=True)
class Driver:
    """An OpenCL driver of the vendor. `refusal` is the linker's message when it fails to load, else ""."""

    family: Family
    path: str
    refusal: str = ""


@dataclass(frozen=True)
class Icd:
    """A file that names a driver for the OpenCL loader. `broken` is the reason why it cannot work, or ""."""

    path: str
    library: str
    broken: str = ""


@dataclass(frozen=True)
class Surroundings:
    """The facts. Paths are those that programs on the machine see."""

    machine: str
    system: str
    android: bool
    page_bytes: int
    python: str
    prefix: str  # Termux's; "" elsewhere
    search: tuple[str, ...]  # LD_LIBRARY_PATH
    drivers: tuple[Driver, ...]  # the vendor's
    listed: bool | None  # whether the vendor lets apps load libOpenCL.so; None without such a list
    loaders: tuple[str, ...]  # libOpenCL files where programs find them, Termux's own first
    icds: tuple[Icd, ...]
    copied: str  # the copy of the driver made by `opencl-vendor-driver`, or ""
    outdated: bool  # the copy is older than the driver
    pip: tuple[str, ...]  # drivers installed by pip
    pyopencl: str  # version; "" if it cannot be loaded
    pyopencl_error: str = ""
    loaded: str = ""  # the libOpenCL loaded by pyopencl
    environment: Mapping[str, str] = field(default_factory=dict)  # variables that drivers and loaders read


def look(
    root: Path = Path("/"),
    environment: Mapping[str, str] = os.environ,
    *,
    android: bool | None = None,
    machine: str | None = None,
    open_library: Callable[[str], str] | None = None,
) -> Surroundings:
    """The facts of this machine, or of a file tree at `root` that represents one.

    `open_library` asks the linker for a library; its result is the linker's message, "" if the library was loaded.
    """
    android = is_android() if android is None else android
    open_library = open_library or _refusal
    prefix = environment.get("PREFIX", "") if android else ""
    found = _drivers(root)
    copied = f"{prefix}/opt/vendor/lib/libOpenCL.so" if prefix else ""
    copy = root / copied.lstrip("/") if copied else None
    if copy is None or not copy.is_file() or copy.stat().st_size == 0:  # the package has an empty file until it is set up
        copied = ""
        copy = None
    version, error, loaded = _pyopencl() if root == Path("/") else ("", "", "")
    return Surroundings(
        machine=machine or platform.machine(),
        system=_system_name(root, android),
        android=android,
        page_bytes=SYSTEM_PAGE,
        python=platform.python_version(),
        prefix=prefix,
        search=tuple(part for part in environment.get("LD_LIBRARY_PATH", "").split(":") if part),
        drivers=tuple(Driver(family, path, open_library(path)) for family, path in found),
        listed=_is_listed(root),
        loaders=_loaders(root, prefix),
        icds=_icds(root, environment.get(VARIABLE) or f"{prefix}/{_VENDORS}"),
        copied=copied,
        outdated=copy is not None
        and any((root / path.lstrip("/")).stat().st_mtime > copy.stat().st_mtime for _, path in found),
        pip=tuple(map(str, pip_runtimes())) if root == Path("/") and not environment.get(VARIABLE) else (),
        pyopencl=version,
        pyopencl_error=error,
        loaded=loaded,
        environment={name: environment[name] for name in _VARIABLES if name in environment},
    )


_VARIABLES = ("LD_LIBRARY_PATH", "OCL_ICD_VENDORS", "OCL_ICD_FILENAMES", "POCL_CACHE_DIR", "POCL_DEVICES", "PREFIX")


def _drivers(root: Path) -> list[tuple[Family, str]]:
    """The vendor's OpenCL libraries, one of each family, in the first folder with any."""
    for folder in _LIBRARIES:
        there = root / folder
        if not there.is_dir():
            continue
        found: list[tuple[Family, str]] = []
        for family, patterns in _NAMES.items():
            files = [file for pattern in patterns for file in sorted(there.glob(pattern))]
            if files and not (family == "adreno" and found):
                found.append((family, f"/{files[0].relative_to(root)}"))
        if found:
            return found
    return []


def _is_listed(root: Path) -> bool | None:
    texts = [(root / name).read_text(encoding="utf-8", errors="replace") for name in _LISTS if (root / name).is_file()]
    if not texts:
        return None
    return any(line.split(maxsplit=1)[0] == "libOpenCL.so" for text in texts for line in text.splitlines() if line.strip())


def _loaders(root: Path, prefix: str) -> tuple[str, ...]:
    folders = [f"{prefix.lstrip('/')}/lib"] if prefix else list(_LOADER_FOLDERS)
    files = [file for folder in folders if (root / folder).is_dir() for file in sorted((root / folder).glob("libOpenCL.so*"))]
    return tuple(dict.fromkeys(f"/{file.relative_to(root)}" for file in files))


def _icds(root: Path, named: str) -> tuple[Icd, ...]:
    """The files in the folder `named`, or this file itself: what OCL_ICD_VENDORS may be, in place of the usual folder."""
    there = root / named.lstrip("/")
    found = []
    for file in sorted(there.glob("*.icd")) if there.is_dir() else [there] if there.is_file() else []:
        library = file.read_text(encoding="utf-8", errors="replace").strip()
        place = root / library.lstrip("/")
        broken = ""
        if not library:
            broken = "it names no library"
        elif library.startswith("/") and not place.is_file():
            broken = f"{library} is not there"
        elif library.startswith("/") and place.stat().st_size == 0:
            broken = f"{library} is empty"
        found.append(Icd(f"/{file.relative_to(root)}", library, broken))
    return tuple(found)


def _refusal(path: str) -> str:
    """The linker's message for `path`, from a new process, because a driver may end it."""
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _PROBE, path], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{path} was not tried: {error}"
    if done.returncode == 0:
        return ""
    last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), f"exit code {done.returncode}")
    return last.removeprefix("OSError: ").strip()


def _pyopencl() -> tuple[str, str, str]:
    """The version of pyopencl, why it cannot be loaded, and its libOpenCL."""
    try:
        import pyopencl
    except ImportError as error:
        return "", str(error), ""
    return str(pyopencl.VERSION_TEXT), "", _mapped_file("libOpenCL")


def _mapped_file(name: str) -> str:
    """The first file of that name that this process has mapped."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.split(maxsplit=5)[5] for line in lines if name in line.rsplit("/", 1)[-1]), "")


def _system_name(root: Path, android: bool) -> str:
    if not android:
        return f"{platform.system()} {platform.release()}"
    try:
        lines = (root / "system/build.prop").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # programs in an app may not read it
        lines = []
    properties = dict(line.split("=", 1) for line in lines if "=" in line)
    return f"Android {properties.get('ro.build.version.release', '')}".strip()
