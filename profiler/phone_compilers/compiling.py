"""Compile OpenCL C texts with the compiler of a phone's GPU, inside its compiler root."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from flashmem.base.errors import UserError
from flashmem.profiler.phone_compilers.gpus import Gpu
from flashmem.profiler.phone_compilers.roots import Root, set_up
from flashmem.runtime.opencl.dot_products import KHRONOS

MOST_SECONDS = 900
"""Time limit for the compilation of one text."""

BUILD_SCRIPT = Path(__file__).with_name("build_in_root.py")
"""The program that runs in a compiler root, and builds texts there."""

_TRIPLES = {"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}
_EMULATOR = "qemu-aarch64-static"
_ENTER = 'set -e; root=$1; shift; mount --rbind /dev "$root/dev"; exec chroot "$root" "$@"'
_BUILT = b"BUILT "


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
    """The build options of a kernel, equal to the runtime's: OpenCL C 3.0 for subgroup shuffles, and for dot products of an
    extension.
    """
    return ["-cl-std=CL3.0" if "FM_SHUFFLE" in text or f"EXTENSION {KHRONOS}" in text else "-cl-std=CL1.2"]


class Compiler:
    """Compiles OpenCL C texts for a GPU, one after another, in one process of the compiler.

    To start the compiler takes longer than to compile most kernels. The process starts with the first text, and again after a
    text that ends it. Close it, or use it in a `with` statement.
    """

    def __init__(self, gpu: Gpu, root: Root, seconds: float = MOST_SECONDS) -> None:
        self.gpu = gpu
        self.root = root
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process, if one runs."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def compile(self, text: str, options: Sequence[str]) -> Compiled:
        """Compile one text.

        Raises:
            UserError: the compiler cannot be started on this machine.
        """
        process = self._process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        expired = threading.Event()

        def stop() -> None:
            expired.set()
            process.kill()

        timer = threading.Timer(self._seconds, stop)
        timer.start()
        with contextlib.suppress(BrokenPipeError):  # its output says why it ended
            process.stdin.write(json.dumps({"text": text, "options": list(options)}).encode() + b"\n")
            process.stdin.flush()
        lines = []
        answer = None
        for line in process.stdout:
            if line.startswith(_BUILT):
                answer = line.removeprefix(_BUILT)
                break
            lines.append(line)
        timer.cancel()
        printed = b"".join(lines).decode(errors="replace")
        if answer is None:
            return self._end(printed, expired.is_set())
        said: dict[str, Any] = json.loads(answer)
        return Compiled(
            printed, said.get("error", ""), said.get("device", ""), said.get("seconds", 0.0), said.get("kernels", {})
        )

    def _start(self) -> subprocess.Popen[bytes]:
        command, environment = _command(self.gpu, self.root, BUILD_SCRIPT.read_text(encoding="utf-8"))
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )  # fmt: skip

    def _end(self, printed: str, expired: bool) -> Compiled:
        """The result for a text whose compilation ended the process."""
        assert self._process is not None
        code = self._process.wait()
        self._process = None
        if expired:
            return Compiled("", f"compiling took more than {self._seconds:g} s")
        last = next((line for line in reversed(printed.splitlines()) if line.strip()), f"exit code {code}")
        if last.startswith(("unshare:", "mount:", "chroot:")):
            raise UserError(f"the compiler's root cannot be entered ({last}); allow user namespaces, or run this as root")
        return Compiled(printed, f"the compiler ended without an answer: {last}")


def _command(gpu: Gpu, root: Root, script: str) -> tuple[list[str], dict[str, str]]:
    """The command that builds texts in the root, and its environment."""
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
    arguments = ["-c", script]
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
