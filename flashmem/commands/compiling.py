"""The options that shape a bundle, and compiling one: in this process for `compile`, in a child process for `run`.

`run` compiles apart so that the process that answers never holds the offline half: what it reports as its memory is then
the memory of running.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from flashmem import bundle_cache
from flashmem.commands.extras import offline_half
from flashmem.console import progress, say
from flashmem.errors import MissingFileError, UserError
from flashmem.units import parse_shape, parse_size

if TYPE_CHECKING:
    from flashmem.bundle import Bundle


@dataclass(frozen=True)
class CompileOptions:
    """As typed on the command line; None or empty is left to `flashmem.compile`, which has the defaults."""

    device: str | None = None
    budget: str | None = None
    m_peak: str | None = None
    lambda_: float | None = None
    chunk: str | None = None
    precision: str | None = None
    shape: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()
    memory_path: str | None = None
    mode: str | None = None
    objective: str | None = None
    strategy: str | None = None
    unfusion: bool | None = None
    mu: float | None = None
    alpha: float | None = None

    def check(self) -> None:
        """Raises UserError for a size or a shape that is not one, before a child process is started for it."""
        for what in ("budget", "m_peak", "chunk"):
            if (text := getattr(self, what)) is not None:
                parse_size(text, what=f"--{what.replace('_', '-')}")
        if self.budget is not None and self.m_peak is not None:
            raise UserError("--budget and --m-peak cannot both be given: M_peak is derived from the budget; leave one out")
        for text in self.shape:
            parse_shape(text)

    def given(self) -> tuple[str, ...]:
        """The flags that were given, for instance `--chunk`."""
        return tuple(f"--{_flag(field.name)}" for field in fields(self) if getattr(self, field.name) not in (None, ()))

    def arguments(self) -> list[str]:
        """The same options as command line arguments."""
        written: list[str] = []
        for field in fields(self):
            value = getattr(self, field.name)
            for item in value if isinstance(value, tuple) else (value,):
                if isinstance(item, bool):
                    written.append(f"--{'' if item else 'no-'}{_flag(field.name)}")
                elif item is not None:
                    written.append(f"--{_flag(field.name)}={item}")
        return written


def compile_here(model: Path, output: Path | None, options: CompileOptions) -> Bundle:
    """Compiles in this process, with a progress bar; without `output`, into the user's cache.

    Raises:
        UserError: there is no output and no cache, among what `flashmem.compile` raises.
    """
    options.check()
    if output is None and (reason := bundle_cache.refusal()) is not None:
        raise UserError(f"{reason}; name a bundle with -o, or set FLASHMEM_CACHE_DIR to a folder that can")
    keywords = {name: value for name in _PASSED_ON if (value := getattr(options, name)) is not None}
    with offline_half("compiling"):
        from flashmem.compile import compile as compile_model
    with progress(f"compiling {model.name}") as report:
        return compile_model(
            model,
            output,
            shapes=dict(parse_shape(text) for text in options.shape),
            preload=options.preload,
            progress=report,
            **keywords,
        )


def compile_apart(model: Path, options: CompileOptions) -> Path:
    """Compiles into the user's cache, or finds it there, in a child process; returns the bundle's path.

    The child shows its progress and its errors on the same stderr. Where the cache cannot be written, the bundle is kept until
    this process ends.

    Raises:
        SystemExit: the child failed and has said why; with its exit code.
    """
    options.check()
    if not model.is_file():
        raise MissingFileError(f"{model}: no such file; name an .onnx model or a bundle")
    command = [sys.executable, "-m", "flashmem", "compile", str(model), *options.arguments()]
    if (reason := bundle_cache.refusal()) is not None:
        say(f"{reason}, so the bundle is removed after this run; set FLASHMEM_CACHE_DIR to a folder that can")
        command += ["-o", str(bundle_cache.temporary_folder() / f"{model.stem}.flashmem")]
    child = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=False)
    if child.returncode:
        sys.exit(child.returncode if child.returncode > 0 else 1)  # negative: ended by a signal
    return Path(child.stdout.strip())


def bundle_of(model: Path, options: CompileOptions, *, still_open: Collection[str] = ()) -> Path:
    """The bundle of `model`: itself if it is one (a folder), or else what it compiles to.

    `still_open`: flags that the command takes for a bundle too, for instance `RUN_TIME`.

    Raises:
        UserError: an option that a bundle has already settled.
    """
    if not model.is_dir():
        return compile_apart(model, options)
    fixed = [flag for flag in options.given() if flag not in still_open]
    if fixed:
        raise UserError(f"{fixed[0]} was settled when {model} was compiled; compile the model anew, or leave {fixed[0]} out")
    return model


_PASSED_ON = (
    "device", "budget", "m_peak", "lambda_", "chunk", "precision", "memory_path", "mode", "objective", "strategy", "unfusion",
    "mu", "alpha",
)  # fmt: skip
RUN_TIME = ("--device", "--budget", "--mode")
"""Flags that also say how a bundle is played, which a session or a simulation settles anew."""


def _flag(name: str) -> str:
    return name.rstrip("_").replace("_", "-")
