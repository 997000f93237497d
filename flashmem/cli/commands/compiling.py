"""Compilation for commands: in this process for `compile`, in a child process for `run`; and the options of both.

With a child process, the process that runs the model never loads the offline half. So its reported memory is that of the run.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from flashmem.base.child_processes import module_environment, python_module
from flashmem.base.errors import BudgetError, MissingFileError, UserError
from flashmem.base.extras import offline_half
from flashmem.base.interrupts import EXIT_CODE, blocked, child_environment
from flashmem.base.paths import VARIABLE, why_unusable
from flashmem.base.streams import say
from flashmem.bundle import cache as bundle_cache
from flashmem.bundle.language import is_bundle, is_language_folder
from flashmem.bundle.shape_variants import asked_for, list_text, shapes_text
from flashmem.cli.commands.temporary_cache import have_cache
from flashmem.cli.output.console import progress
from flashmem.request.opening import SessionRequest
from flashmem.request.request import BundleRequest, CompileCall

if TYPE_CHECKING:
    from flashmem.bundle.bundle import Bundle
    from flashmem.cli.calls.models import CompileCommand

Asked = TypeVar("Asked", bound=SessionRequest)


@dataclass(frozen=True)
class ProcessLimit:
    """A limit on the memory of the process that will run the model, and what it holds without the model, in bytes."""

    limit: int
    held: int

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Raise the error of a budget that is the rest of a process's memory as that of the process."""
        from flashmem.runtime.request.process_memory import too_small

        try:
            yield
        except BudgetError as error:
            # One step more, so that the named limit works in the next process too, which may hold a little more.
            raise too_small(self.limit, self.held + _STEP, error) from error

    def argument(self) -> str:
        """The hidden option of `flashmem compile` for it."""
        return f"--within={self.limit},{self.held}"

    @classmethod
    def of(cls, text: str | None) -> ProcessLimit | None:
        """The inverse of `argument`, without the option's name."""
        return None if text is None else cls(*map(int, text.split(",")))


def within_process(call: Asked, *, compiles: bool) -> tuple[Asked, ProcessLimit | None]:
    """`call` with the budget that its limit on this process leaves for a model that is compiled (`compiles`).

    Opens the device, to measure what the process holds without the model.

    Raises:
        UserError: a budget is given too, or the device has memory of its own.
    """
    limit = call.process_memory
    if limit is None:
        return call, None
    if call.budget is not None or call.m_peak is not None or call.host_budget is not None:
        raise UserError("--process-memory gives the budget; give either it or --budget, --m-peak and --host-budget")
    if not compiles:
        return call, None
    from flashmem.runtime.engine.device_state import DeviceInUse
    from flashmem.runtime.request.options import device_here
    from flashmem.runtime.request.process_memory import budget_within

    held: int | None = DeviceInUse(device := device_here(call.device), None).start_rss
    if held is not None:  # rounded up, so that the next call finds the same bundle in the cache
        held = -(-(held + _OPENED) // _STEP) * _STEP
    return call.replace(budget=budget_within(limit, held, device)), ProcessLimit(limit, held or 0)


def compile_here(call: CompileCommand) -> Bundle:
    """Compile in this process, with a progress bar; without an output, into the user's cache.

    Raises:
        UserError: no output and no cache; and the errors of `flashmem.compile`.
    """
    if call.output is None and (reason := why_unusable(folder := bundle_cache.folder())) is not None:
        raise UserError(f"{folder} {reason}; name a bundle with -o, or set {VARIABLE} to a folder that can")
    with offline_half("compiling"):
        from flashmem.compile import compile as compile_model
    listed = _drivers_listed() if call.build else nullcontext()
    process = ProcessLimit.of(call.within)
    title = f"compiling {Path(str(call.model)).name}"
    with listed, progress(title) as report, process.explained() if process else nullcontext():
        bundle = compile_model(**call.given_as(CompileCall).given, progress=report)
    if call.quantize is not None:
        say(_describe_quantization(bundle.meta["quantised"]))
    if others := bundle.meta.get("states_in_half"):
        say(f"states in half, as they are no caches of keys or values that attention alone reads: {', '.join(others)}")
    return bundle


def _drivers_listed() -> AbstractContextManager[None]:
    """In the body, the drivers of this machine are listed for `flashmem run`, which loads one driver."""
    try:
        from flashmem.runtime.opencl.driver_table import listed_meanwhile
    except UserError:  # no OpenCL is here
        return nullcontext()
    return listed_meanwhile()


def _describe_quantization(weights: Sequence[Mapping[str, Any]]) -> str:
    """One sentence about the quantised weights of a bundle and their errors."""
    parts = []
    for bits in sorted({weight["bits"] for weight in weights}):
        alike = [weight for weight in weights if weight["bits"] == bits]
        errors = [weight["error"] for weight in alike]
        worst = max(alike, key=lambda weight: float(weight["error"]))["name"]
        parts.append(f"{len(alike)} to {bits} bits with errors of {min(errors):.1%} to {max(errors):.1%} (most: {worst})")
    return f"weights quantised, relative to their root mean squares: {'; '.join(parts)}"


def compile_apart(model: Path, request: BundleRequest, *, build: bool = True, process: ProcessLimit | None = None) -> Bundle:
    """The bundle in the user's cache; it is compiled in a child process unless it is there. `build`: kernels too.

    `process`: where the budget comes from, for errors. This process does not import the compiler. The child prints its progress
    and its errors to the same stderr.

    Raises:
        SystemExit: the child failed and has printed the reason; with its exit code.
        KeyboardInterrupt: this process or the child was interrupted.
    """
    from flashmem.bundle.bundle import Bundle
    from flashmem.compilation import read_compilation

    if not model.is_file() and not is_language_folder(model):
        raise MissingFileError(f"{model}: no such file; name an .onnx or .gguf file, or a bundle")
    have_cache()
    if (found := read_compilation(model, request).find()) is not None:
        return found
    command = python_module("flashmem", "compile", str(model), *request.arguments(), f"--{'' if build else 'no-'}build")
    command += [] if process is None else [process.argument()]
    quiet = module_environment(child_environment())
    with blocked() as unblock, subprocess.Popen(command, env=quiet, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as child:
        try:
            unblock()
            printed, _ = child.communicate()
        except KeyboardInterrupt:
            _interrupt(child)
            raise
    if child.returncode == EXIT_CODE:
        raise KeyboardInterrupt
    if child.returncode:
        sys.exit(child.returncode if child.returncode > 0 else 1)  # negative: ended by a signal
    return Bundle.open(Path(os.fsdecode(printed.strip())))


def _interrupt(child: subprocess.Popen[bytes]) -> None:
    """Interrupt a child process. A terminal's Ctrl-C has reached it already; it ignores a second one."""
    if child.poll() is None:
        child.send_signal(signal.SIGINT)
    try:
        child.wait(_LAST_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def open_bundle(
    model: Path,
    request: BundleRequest,
    *,
    chosen_again: bool = True,
    build: bool = False,
    process: ProcessLimit | None = None,
) -> Bundle:
    """The bundle for `model`: `model` itself if it is one, with the variant of `--shape` selected, or the first; else the
    compiled one, with its kernels if `build`.

    `chosen_again`: whether the command chooses what a session chooses, such as the device, for a bundle too.

    Raises:
        UserError: an option was given that was fixed when the bundle was compiled, or the bundle has no such variant.
    """
    from flashmem.bundle.bundle import Bundle

    if not is_bundle(model):
        if model.exists() and importlib.util.find_spec("flashmem.compile") is None:  # flashmem-runtime has the online half only
            raise UserError(
                f"{model} is no bundle, and the compiler is not installed here; compile it elsewhere, and copy the bundle"
            )
        return compile_apart(model, request.of_bundle, build=build, process=process)
    for name in request.fixed if chosen_again else request.of_bundle.given:
        if name != "shapes":
            flag = request.options[name].flags[0]
            raise UserError(f"{flag} was fixed when {model} was compiled; compile the model anew, or leave {flag} out")
    bundle = Bundle.open(model)
    asked = request.shapes
    if len(asked) > 1:
        raise UserError(f"{model} is compiled, and --shape names {len(asked)} variants of it; name one, or leave --shape out")
    inputs = [variant.program.inputs for variant in bundle.variants]
    index = asked_for(inputs, asked[0])
    if index is None:
        raise UserError(f"{model} has no variant for {shapes_text(asked[0])}; it was compiled for: {list_text(inputs)}")
    return bundle.variant(index)


_LAST_SECONDS = 10

_OPENED = 8 << 20
_STEP = 4 << 20
"""Bytes that an opened bundle and the inputs of a run take, and the step in which a process's memory counts."""
