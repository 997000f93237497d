"""Run a command with another OpenCL driver for CPUs than the machine's: `python -m tools.cpu_drivers DRIVER COMMAND...`

    python -m tools.cpu_drivers rusticl flashmem doctor
    python -m tools.cpu_drivers pocl7 python -m pytest --driver pocl tests/compiler/lowering

DRIVER is `rusticl`, Mesa's OpenCL on llvmpipe (the same front end as the compilers of Adreno and Mali, and real images), or
`pocl7`, the newest release of PoCL. Debian's packages are unpacked into the user's cache by the first command, and not
installed. They need a newer C library than Debian 12's: the command runs in a mount namespace in which their libraries lie over
the machine's, as if it had been upgraded. It finds this driver only. Needs `unshare`, user namespaces with overlays
(Linux 5.11), `apt-get`, `dpkg-deb` and `debian-archive-keyring`; no root rights.

The exit code is the command's; 2 if the driver cannot be set up here.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flashmem.base.errors import UserError
from flashmem.base.streams import exit_codes, prepare_streams
from flashmem.profiler.phone_compilers import roots
from flashmem.profiler.phone_compilers.packages import Wanted

_ARCHITECTURES = {"x86_64": ("amd64", "x86_64-linux-gnu"), "aarch64": ("arm64", "aarch64-linux-gnu")}
_LAID_OVER = ("lib", "share")
"""The folders of /usr in which drivers have files. Programs stay the machine's own."""

_ENTER = r"""
set -e
while [ "$1" != -- ]; do
    mount -t overlay overlay -o "lowerdir=$2" "$1"
    shift 2
done
shift
exec "$@"
"""


@dataclass(frozen=True)
class Driver:
    """A driver: its packages, the descriptor that its device gets, and the variables that enable it."""

    packages: Wanted
    descriptor: str
    variables: Mapping[str, str] = field(default_factory=dict)


DRIVERS = {
    "rusticl": Driver(roots.WANTED, "generic-cpu", {"RUSTICL_ENABLE": "llvmpipe"}),
    "pocl7": Driver(
        Wanted(
            called="the newest PoCL",
            main="pocl-opencl-icd",
            series="7",
            kind="cpu-drivers",
            name="pocl",
            suites=("forky",),
            packages=("pocl-opencl-icd",),
        ),
        "pocl",
    ),
}
"""By name. Compilers of phones are in the same packages as rusticl, so both use one root."""


def command_with(driver: Driver, command: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The words that run `command` with `driver`, and their environment; its packages are fetched if they are not here.

    Raises:
        UserError: the driver cannot be set up on this machine.
    """
    if platform.machine() not in _ARCHITECTURES:
        raise UserError(f"there are no drivers for {platform.machine()} here, only for {' and '.join(_ARCHITECTURES)}")
    if shutil.which("unshare") is None:
        raise UserError("unshare is not installed, which runs commands with other drivers; install util-linux")
    architecture, triple = _ARCHITECTURES[platform.machine()]
    root = driver.packages.set_up(architecture)
    enter = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", _ENTER, "enter", *_laid_over(root, triple), "--"]
    tried = subprocess.run([*enter, "true"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if tried.returncode:
        said = " ".join(tried.stderr.split()) or f"exit code {tried.returncode}"
        raise UserError(f"the driver's libraries cannot be laid over the machine's ({said}); allow user namespaces")
    vendors = {"OCL_ICD_VENDORS": str(root / "etc/OpenCL/vendors")}
    return [*enter, *command], {**os.environ, **vendors, **driver.variables}


def _laid_over(root: Path, triple: str, usr: Path = Path("/usr")) -> list[str]:
    """The folders of `usr` to mount on, each with its layers; the one with the newer C library is uppermost."""
    newer = c_library(usr / "lib" / triple) > c_library(root / "usr/lib" / triple)
    pairs = [(usr / name, root / "usr" / name) for name in _LAID_OVER]
    return [word for here, there in pairs for word in (str(here), f"{here}:{there}" if newer else f"{there}:{here}")]


def c_library(folder: Path) -> tuple[int, ...]:
    """The version of glibc in a folder of libraries, as numbers; empty if there is none."""
    file = folder / "libc.so.6"
    found = re.search(rb"GNU C Library[^\n]*release version (\d+)\.(\d+)", file.read_bytes()) if file.is_file() else None
    return tuple(map(int, found.groups())) if found else ()


def main() -> None:
    """Become the command."""
    if len(sys.argv) < 3 or sys.argv[1] not in DRIVERS:
        raise UserError(f"usage: python -m tools.cpu_drivers {'|'.join(DRIVERS)} COMMAND...")
    command, environment = command_with(DRIVERS[sys.argv[1]], sys.argv[2:])
    os.execvpe(command[0], command, environment)


if __name__ == "__main__":
    prepare_streams()
    with exit_codes():
        main()
