"""Roots: folders with Debian's packages and what they depend on, unpacked and not installed.

apt downloads the packages of one architecture by name and verifies them with its own signatures. The system does not change,
and no root rights are needed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flashmem.base.errors import UserError
from flashmem.base.paths import cache_folder, make_private

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
"""The keys that sign Debian's archive."""

MIRROR = "http://deb.debian.org/debian"
"""Debian's archive. Its files are verified by signature, and apt's configuration may redirect requests."""

_MOST_SECONDS = 900


@dataclass(frozen=True)
class Wanted:
    """What a root consists of: `packages` of `suites`, and what they depend on.

    Attributes:
        called: what they are, for messages: "Mesa's compilers for phones".
        main: the package whose version is the root's.
        series: the first numbers of that version.
        kind: the cache folder that the root is in.
        name: that of the root, before the series.
    """

    called: str
    main: str
    series: str
    kind: str
    name: str
    suites: tuple[str, ...]
    packages: tuple[str, ...]

    def folder(self, architecture: str) -> Path:
        """Where the root of `architecture` is, if it was set up."""
        return cache_folder(self.kind) / f"{self.name}-{self.series}-{architecture}"

    def version(self, architecture: str) -> str | None:
        """The version of `main` in the root of `architecture`, or None if it was not set up."""
        file = self.folder(architecture) / f"{self.name}-version"
        return file.read_text(encoding="utf-8").strip() if file.is_file() else None

    def set_up(self, architecture: str) -> Path:
        """The root of `architecture`, downloaded and unpacked unless the user's cache has it.

        Raises:
            UserError: a program, the keys or the network is missing, or the archive has another series.
        """
        folder = self.folder(architecture)
        if self.version(architecture) is not None:
            return folder
        for program in ("apt-get", "dpkg-deb"):
            if shutil.which(program) is None:
                raise UserError(f"{program} is not installed, which fetches {self.called}; use a machine with Debian or Ubuntu")
        if not KEYRING.is_file():
            raise UserError(f"{KEYRING} is missing, which verifies {self.called}; install debian-archive-keyring")
        make_private(folder.parent)
        print(f"downloading {self.called} ({architecture}) into {folder}", file=sys.stderr)
        with tempfile.TemporaryDirectory(prefix=f"{architecture}-", dir=folder.parent) as temporary:
            archives = self._download(architecture, Path(temporary) / "apt")
            made = Path(temporary) / "root"
            version = _unpack(archives, made).get(self.main, "none")
            if not version.startswith(f"{self.series}."):
                raise UserError(f"Debian's archive has {self.main} {version}, not {self.series}; use a newer flashmem")
            (made / f"{self.name}-version").write_text(version, encoding="utf-8")
            try:
                made.rename(folder)
            except OSError:  # another process created the root first
                if self.version(architecture) is None:
                    raise
        return folder

    def _download(self, architecture: str, apt: Path) -> list[Path]:
        """Download the packages' files, with a separate state of apt."""
        for each in ("state/lists/partial", "cache/archives/partial"):
            (apt / each).mkdir(parents=True)
        (apt / "status").touch()
        sources = "".join(f"deb [signed-by={KEYRING}] {MIRROR} {suite} main\n" for suite in self.suites)
        (apt / "sources.list").write_text(sources)
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
        self._apt([*options, "--error-on=any", "update", "-qq"])
        self._apt([*options, "install", "-y", "-qq", "--download-only", "--no-install-recommends", *self.packages])
        return sorted((apt / "cache/archives").glob("*.deb"))

    def _apt(self, arguments: Sequence[str]) -> None:
        """Run apt-get. Raises UserError with its first error message."""
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
            raise UserError(f"apt-get could not fetch {self.called} ({why}); look at the network and at apt's configuration")


def _unpack(archives: Sequence[Path], root: Path) -> dict[str, str]:
    """Unpack packages into a new folder with one /usr. Return their versions."""
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
    return versions
