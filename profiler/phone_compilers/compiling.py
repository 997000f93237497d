"""Compile one OpenCL C text with the compiler of a phone's GPU, inside its compiler root."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashmem.base.errors import UserError
from flashmem.profiler.phone_compilers.gpus import Gpu
from flashmem.profiler.phone_compilers.roots import Root, set_up

MOST_SECONDS = 900
"""Time limit for the compilation of one text."""

BUILD_SCRIPT = Path(__file__).with_name("build_in_root.py")
"""The program that runs in a compiler root, and builds a text there."""

_TRIPLES = {"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}
_EMULATOR = "qemu-aarch64-static"
_ENTER = 'set -e; root=$1; shift; mount --rbind /dev "$root/dev"; exec chroot "$root" "$@"'
_BUILT = re.compile(r"^BUILT (\{.*\})$", re.MULTILINE)


@dataclass(frozen=True)
class Compiled:
    """The result of a compiler: the code that it printed, and the driver's properties of the kernel; or the error."""

    printed: str
    error: str = ""
    device: str = ""
    seconds: float = 0.0
    kernels: dict[str, dict[str, int]] = field(default_factory=dict)


def root_of(gpu: Gpu) -> Root:
    """The root with the compiler of `gpu`, set up if it does not exist.

    Raises:
        UserError: the root cannot be set up or used on this machine.
    """
    needed, package = ("unshare", "util-linux") if gpu.architecture == "amd64" else (_EMULATOR, "qemu-user-static")
    if shutil.which(needed) is None:
        raise UserError(f"{needed} is not installed, which runs the compiler of {gpu.name}; install {package}")
    return set_up(gpu.architecture)


def options_of(text: str) -> list[str]:
    """The build options of a kernel, equal to the runtime's: kernels with subgroup shuffles are OpenCL C 3.0."""
    return ["-cl-std=CL3.0" if "FM_SHUFFLE" in text else "-cl-std=CL1.2"]


def compile_text(gpu: Gpu, root: Root, text: str, options: Sequence[str], seconds: float = MOST_SECONDS) -> Compiled:
    """Compile one OpenCL C text for `gpu`.

    Raises:
        UserError: the compiler cannot be started on this machine.
    """
    command, environment = _command(gpu, root, BUILD_SCRIPT.read_text(encoding="utf-8"), options)
    try:
        done = subprocess.run(
            command, env=environment, input=text.encode(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=seconds, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Compiled("", f"compiling took more than {seconds:g} s")
    printed = done.stdout.decode(errors="replace")
    found = _BUILT.search(printed)
    if found is None:
        last = next((line for line in reversed(printed.splitlines()) if line.strip()), f"exit code {done.returncode}")
        if last.startswith(("unshare:", "mount:", "chroot:")):
            raise UserError(f"the compiler's root cannot be entered ({last}); allow user namespaces, or run this as root")
        return Compiled(printed, f"the compiler ended without an answer: {last}")
    said: dict[str, Any] = json.loads(found[1])
    return Compiled(printed, said.get("error", ""), said.get("device", ""), said.get("seconds", 0.0), said.get("kernels", {}))


def _command(gpu: Gpu, root: Root, script: str, options: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The command that builds standard input in the root, and its environment."""
    triple = _TRIPLES[gpu.architecture]
    environment = {
        "PATH": "/usr/bin:/bin:/usr/sbin:/sbin",
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        "MESA_SHADER_CACHE_DISABLE": "true",
        "RUSTICL_ENABLE": gpu.driver,
        "PYTHONDONTWRITEBYTECODE": "1",
        **dict(gpu.environment),
    }
    shim = f"/usr/lib/{triple}/lib{gpu.driver}_noop_drm_shim.so"
    arguments = ["-c", script, *options]
    if gpu.architecture == "amd64":
        inside = ["env", f"LD_PRELOAD={shim}", "python3", *arguments]
        enter = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", _ENTER, "sh", str(root.folder)]
        return [*enter, *inside], environment
    environment |= {
        "OCL_ICD_VENDORS": f"{root.folder}/etc/OpenCL/vendors",
        "PYTHONHOME": f"{root.folder}/usr",
        "QEMU_CPU": "cortex-a76",  # the newest instructions are slow to emulate
    }
    emulator = [_EMULATOR, "-L", str(root.folder), "-E", f"LD_LIBRARY_PATH=/usr/lib/{triple}"]
    return [*emulator, "-E", f"LD_PRELOAD={root.folder}{shim}", f"{root.folder}/usr/bin/python3", *arguments], environment
