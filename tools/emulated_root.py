"""Folders of Debian's packages, in which commands run as on another machine: with an emulator, if it is of another kind.

Nothing is installed and nobody else notices: apt is given an empty database of its own, packages are only unpacked, and
commands run in a user namespace, with an emulator that is registered for it alone (Linux 6.7 or newer).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MIRROR = "http://deb.debian.org/debian"
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
_MAGIC = r"\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
_MASK = r"\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff"
"""Of programs for arm64, as qemu's own list for binfmt_misc has them."""

_CORE = """\
processor\t: {number}
BogoMIPS\t: 38.40
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x1
CPU part\t: 0xd0b
CPU revision\t: 0

"""
"""A Cortex-A76, which the emulator is told to be: LLVM takes the processor from here, and would find this machine's."""

_ENTER = r"""
set -e
root=$1 shared=$2 emulator=$3; shift 3
mount --rbind /proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --rbind /sys "$root/sys"
mount --bind "$shared" "$root/shared"
if [ -n "$emulator" ]; then
    mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
    printf '%s' ":rehearsal-arm64:M::$MAGIC:$MASK:$emulator:F" > /proc/sys/fs/binfmt_misc/register
    mount --bind "$root/cpuinfo" "$root/proc/cpuinfo"
fi
unset MAGIC MASK
exec chroot "$root" "$@"
"""


@dataclass(frozen=True)
class Root:
    """Debian's `suite` for `architecture`, in `folder`. `shared` is there as /shared. `emulator`: qemu's path; None where the
    machine itself runs such programs.
    """

    architecture: str
    suite: str
    folder: Path
    shared: Path
    emulator: Path | None

    def make(self, packages: tuple[str, ...]) -> None:
        """Download `packages` and what they need, and unpack them. Does nothing where that was done before.

        Raises:
            subprocess.CalledProcessError: apt or dpkg-deb fails.
        """
        done = self.folder / "complete"
        if done.exists():
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        apt = self.folder.with_name(f"{self.folder.name}-apt")
        for name in ("state/lists/partial", "cache/archives/partial", "etc/apt.conf.d", "etc/preferences.d", "log"):
            (apt / name).mkdir(parents=True, exist_ok=True)
        (apt / "state/status").touch()
        (apt / "etc/sources.list").write_text(f"deb [signed-by={KEYRING}] {MIRROR} {self.suite} main\n")
        lines = [
            f'APT::Architecture "{self.architecture}";', f'APT::Architectures {{ "{self.architecture}"; }};',
            f'Dir::State "{apt}/state";', f'Dir::State::status "{apt}/state/status";', f'Dir::Cache "{apt}/cache";',
            f'Dir::Etc "{apt}/etc";', f'Dir::Log "{apt}/log";', 'Acquire::Languages "none";', 'APT::Sandbox::User "";',
        ]  # fmt: skip
        (apt / "apt.conf").write_text("\n".join(lines) + "\n")
        environment = {**os.environ, "APT_CONFIG": str(apt / "apt.conf")}
        fetch = ("install", "--yes", "--quiet", "--download-only", "--no-install-recommends", *packages)
        for words in (("update", "--quiet"), fetch):
            subprocess.run(["apt-get", *words], env=environment, check=True)
        for name in ("bin", "lib", "lib64", "sbin"):
            (self.folder / "usr" / name).mkdir(parents=True)
            (self.folder / name).symlink_to(f"usr/{name}")
        for package in sorted((apt / "cache/archives").glob("*.deb")):
            subprocess.run(["dpkg-deb", "--extract", package, self.folder], check=True)
        for name in ("proc", "dev", "sys", "tmp", "shared"):
            (self.folder / name).mkdir(exist_ok=True)
        for library in self.folder.glob("usr/lib/*/*/lib*.so.3"):  # of which a script that is not run would have chosen one
            if library.parent.name in ("blas", "lapack"):
                library.parent.with_name(library.name).symlink_to(f"{library.parent.name}/{library.name}")
        (self.folder / "cpuinfo").write_text("".join(_CORE.format(number=number) for number in range(os.cpu_count() or 1)))
        done.write_text("".join(f"{each.name}\n" for each in sorted((apt / "cache/archives").glob("*.deb"))))

    def versions(self, *packages: str) -> dict[str, str]:
        """The upstream versions of packages that were unpacked."""
        lines = (self.folder / "complete").read_text().splitlines()
        found = dict(line.split("_")[:2] for line in lines)
        return {name: re.sub(r"^\d+%3a|[-+](dfsg|ds|b\d|\d+$|\d+\+).*", "", found[name]) for name in packages}

    def run(self, *words: str | Path, variables: Mapping[str, str], seconds: float) -> subprocess.CompletedProcess[str]:
        """Run a command in the root, for `seconds` at the most, with `variables` and little else as its environment.

        Raises:
            subprocess.TimeoutExpired: it takes longer.
        """
        environment = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/tmp", "LANG": "C.UTF-8", **variables}
        if self.emulator:
            environment |= {"MAGIC": _MAGIC, "MASK": _MASK, "QEMU_CPU": "cortex-a76"}
        enter = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", _ENTER, "enter"]
        command = [*enter, self.folder, self.shared, self.emulator or "", *words]
        return subprocess.run(
            list(map(str, command)), env=environment, capture_output=True, text=True, timeout=seconds, check=False
        )
