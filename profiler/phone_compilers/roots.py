"""Compiler roots: folders with Mesa's compilers and their dependencies, unpacked from Debian's packages and not installed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flashmem.profiler.phone_compilers.packages import Wanted

MESA = "26.1"
"""The series of Mesa that made the numbers in docs/research/phone-compilers.md. The next one does not link `fma` on Adreno."""

_BACKPORTS = "trixie-backports"
WANTED = Wanted(
    called="Mesa's compilers for phones",
    main="mesa-opencl-icd",
    series=MESA,
    kind="phone-compilers",
    name="mesa",
    suites=("trixie", _BACKPORTS),
    packages=(
        f"mesa-opencl-icd/{_BACKPORTS}",
        f"mesa-drm-shim/{_BACKPORTS}",
        "ocl-icd-libopencl1",
        "python3-minimal",
        "libpython3-stdlib",
        "coreutils",
    ),
)
"""The packages of a compiler root."""


@dataclass(frozen=True)
class Root:
    """A folder with the compilers of one architecture. `mesa` is the version of the package."""

    folder: Path
    architecture: str
    mesa: str


def find_root(architecture: str) -> Root | None:
    """The root of `architecture` in the user's cache, or None if it was not set up."""
    version = WANTED.version(architecture)
    return None if version is None else Root(WANTED.folder(architecture), architecture, version)


def set_up(architecture: str) -> Root:
    """The root of `architecture`, downloaded and unpacked unless the user's cache has it.

    Raises:
        UserError: a program, the keys or the network is missing, or the archive has another series of Mesa.
    """
    folder = WANTED.set_up(architecture)
    return Root(folder, architecture, WANTED.version(architecture) or "")
