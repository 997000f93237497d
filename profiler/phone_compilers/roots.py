"""Compiler roots: folders with Mesa's compilers and their dependencies, unpacked from Debian's packages and not installed.

apt downloads the packages of one architecture by name and verifies them with its own signatures. The system does not change,
and no root rights are needed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from flashmem.base.errors import UserError
from flashmem.base.paths import cache_folder, make_private

MESA = "26.1"
"""The series of Mesa that made the numbers in docs/research/phone-compilers.md. The next one does not link `fma` on Adreno."""

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
"""The keys that sign Debian's archive."""

MIRROR = "http://deb.debian.org/debian"
"""Debian's archive. Its files are verified by signature, and apt's configuration may redirect requests."""

_SUITES = ("trixie", "trixie-backports")
_BACKPORTS = "trixie-backports"
_PACKAGES = (
    f"mesa-opencl-icd/{_BACKPORTS}",
    f"mesa-drm-shim/{_BACKPORTS}",
    "ocl-icd-libopencl1",
    "python3-minimal",
    "libpython3-stdlib",
    "coreutils",
)
_MOST_SECONDS = 900


@dataclass(frozen=True)
class Root:
    """A folder with the compilers of one architecture. `mesa` is the version of the package."""

    folder: Path
    architecture: str
    mesa: str


def find_root(architecture: str) -> Root | None:
    """The root of `architecture` in the user's cache, or None if it was not set up."""
    folder = _folder(architecture)
    version = folder / "mesa-version"
    if not version.is_file():
        return None
    return Root(folder, architecture, version.read_text(encoding="utf-8").strip())


def set_up(architecture: str) -> Root:
    """The root of `architecture`, downloaded and unpacked unless the user's cache has it.

    Raises:
        UserError: a program, the keys or the network is missing, or the archive has another series of Mesa.
    """
    found = find_root(architecture)
    if found is not None:
        return found
    for program in ("apt-get", "dpkg-deb"):
        if shutil.which(program) is None:
            raise UserError(f"{program} is not installed, which fetches the compilers; use a machine with Debian or Ubuntu")
    if not KEYRING.is_file():
        raise UserError(f"{KEYRING} is missing, which verifies the compilers; install debian-archive-keyring")
    folder = _folder(architecture)
    make_private(folder.parent)
    print(f"downloading Mesa's compilers for phones ({architecture}) into {folder}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix=f"{architecture}-", dir=folder.parent) as temporary:
        archives = _download(architecture, Path(temporary) / "apt")
        made = Path(temporary) / "root"
        version = _unpack(archives, made)
        (made / "mesa-version").write_text(version, encoding="utf-8")
        try:
            made.rename(folder)
        except OSError:  # another process created the root first
            if find_root(architecture) is None:
                raise
    return Root(folder, architecture, version)


def _folder(architecture: str) -> Path:
    return cache_folder("phone-compilers") / f"mesa-{MESA}-{architecture}"


def _download(architecture: str, apt: Path) -> list[Path]:
    """Download the packages' files, with a separate state of apt."""
    for each in ("state/lists/partial", "cache/archives/partial"):
        (apt / each).mkdir(parents=True)
    (apt / "status").touch()
    (apt / "sources.list").write_text("".join(f"deb [signed-by={KEYRING}] {MIRROR} {suite} main\n" for suite in _SUITES))
    settings = {
        "APT::Architecture": architecture,
        "APT::Architectures": architecture,
        "APT::Sandbox::User": "",
        "Acquire::Languages": "none",
        "Acquire::Retries": "2",
        "Dir::State": apt / "state",
        "Dir::State::status": apt / "status",
        "Dir::Cache": apt / "cache",
        "Dir::Etc::sourcelist": apt / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::Etc::preferences": "/dev/null",
        "Dir::Etc::preferencesparts": "/dev/null",
    }
    options = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
    _apt([*options, "--error-on=any", "update", "-qq"])
    _apt([*options, "install", "-y", "-qq", "--download-only", "--no-install-recommends", *_PACKAGES])
    return sorted((apt / "cache/archives").glob("*.deb"))


def _apt(arguments: list[str]) -> None:
    """Run apt-get. Raises UserError with its last error message."""
    environment = {**os.environ, "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            ["apt-get", *arguments], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=_MOST_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise UserError(f"apt-get took more than {_MOST_SECONDS} s; look at the network, and try again") from error
    if done.returncode:
        complaints = [line for line in done.stderr.splitlines() if line.startswith(("E:", "W:"))]
        why = complaints[0][2:].strip() if complaints else f"it exited with {done.returncode}"
        raise UserError(f"apt-get could not fetch the compilers ({why}); look at the network and at apt's configuration")


def _unpack(archives: list[Path], root: Path) -> str:
    """Unpack packages into a new folder with one /usr. Return the version of Mesa."""
    for name in ("bin", "lib", "lib64", "sbin"):
        (root / "usr" / name).mkdir(parents=True)
        (root / name).symlink_to(f"usr/{name}")
    for name in ("dev", "proc", "tmp"):
        (root / name).mkdir()
    versions: dict[str, str] = {}
    for archive in archives:
        subprocess.run(["dpkg-deb", "--extract", archive, root], check=True, stdin=subprocess.DEVNULL)
        name, version, *_ = archive.name.split("_")
        versions[name] = version.replace("%3a", ":")
    mesa = versions.get("mesa-opencl-icd", "none")
    if not mesa.startswith(MESA):
        raise UserError(f"Debian's archive has Mesa {mesa}, but flashmem reads the output of {MESA}; use a newer flashmem")
    return mesa
