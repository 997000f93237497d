"""Cache folders for tests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flashmem.base.paths import VARIABLE, cache_folder, make_private
from flashmem.bundle.bundle import Bundle
from flashmem.cli.calls.models import CompileCommand
from flashmem.cli.commands import compiling
from flashmem.program.kernel_text import Source
from flashmem.program.program import Program
from flashmem.request.opening import SessionCall
from flashmem.request.request import CompileCall
from flashmem.runtime.kernels import chains, device_chains
from flashmem.runtime.kernels.cache import Build, CachedKernels
from flashmem.runtime.kernels.cache_files import ProgramCache
from flashmem.runtime.kernels.required import RequiredKernel
from flashmem.runtime.opencl import measured_rates
from flashmem.runtime.opencl.context import CompiledProgram, Context
from flashmem.runtime.serving.runtime import Runtime
from flashmem.target.descriptor import DeviceDescriptor


def empty_bundle_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make `folder` the user's cache: without bundles, and with the compiled kernels of the whole test run.

    Building the kernels of a tiny model takes seconds in each test. Tests that empty the cache, or count builds, need their own
    cache.
    """
    kernels = cache_folder("programs")
    make_private(kernels)
    folder.mkdir(mode=0o700)
    (folder / "programs").symlink_to(kernels)
    monkeypatch.setenv(VARIABLE, str(folder))
    return folder


_read_measured = measured_rates._read
_save, _init = CachedKernels.save, CachedKernels.__init__
_compile_here, _compile_apart = compiling.compile_here, compiling.compile_apart


def kernels_built_by_runs(monkeypatch: pytest.MonkeyPatch, *, saved: bool = True) -> None:
    """Build kernels where they first run: `compile`, commands and sessions start no processes for it, and PoCL's kernels are
    not saved.

    A process takes a second. To save a kernel, PoCL compiles it once more, for groups of any size; it has a cache of its own.
    `saved`: other drivers' kernels are.
    """

    def save_cheap_ones(kernels: CachedKernels) -> None:
        if not saved or kernels._context.device.compiles_at_launch:
            kernels.wait()
        else:
            _save(kernels)

    def compile_here(call: CompileCommand) -> Bundle:
        return _compile_here(call.replace(build=call.build and call.with_binaries))

    def compile_apart(*args: Any, build: bool = True, **options: Any) -> Bundle:
        return _compile_apart(*args, build=False, **options)

    _set_defaults(monkeypatch, apart=False)
    monkeypatch.setattr(CachedKernels, "save", save_cheap_ones)
    monkeypatch.setattr(compiling, "compile_here", compile_here)
    monkeypatch.setattr(compiling, "compile_apart", compile_apart)


class Optimisation:
    """Whether drivers optimise the kernels that a session builds itself."""

    def __init__(self) -> None:
        self.on, self.always = True, False

    @contextmanager
    def off(self) -> Iterator[None]:
        """None in the body, where something other than the kernels is tested."""
        before, self.on = self.on, False
        try:
            yield
        finally:
            self.on = before


optimisation = Optimisation()
"""That of the test that runs, and of its fixtures: `conftest.py` sets it."""


def kernels_unoptimised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let drivers compile kernels without optimising them where `optimisation` is off.

    That takes a fifth of Intel's time, and half of PoCL's. A kernel's key has the options, so no other test finds these.
    """

    def init(
        kernels: CachedKernels,
        cache: ProgramCache,
        context: Context,
        options: Sequence[str],
        wanted: Iterable[RequiredKernel],
        carried: bytes = b"",
        build: Build | None = None,
        shared: MutableMapping[str, CompiledProgram] | None = None,
    ) -> None:
        if build is None and not carried and not (optimisation.on or optimisation.always):
            options = [*options, "-cl-opt-disable"]
        _init(kernels, cache, context, options, wanted, carried, build, shared)

    monkeypatch.setattr(CachedKernels, "__init__", init)


def launches_unchained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave chains out, whose kernels are compiled in addition: all launches of a tiny model are small."""

    def unchained(program: Program, source: Source, descriptor: DeviceDescriptor, cores: int) -> tuple[Program, Source]:
        return program, source

    _set_chains(monkeypatch, unchained)


def launches_chained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo `launches_unchained`."""
    _set_chains(monkeypatch, chains.with_chains)


def _set_chains(monkeypatch: pytest.MonkeyPatch, function: Any) -> None:
    monkeypatch.setattr(device_chains, "with_chains", function)


def rates_as_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the rates that were measured on this machine: plans are the same on every one."""
    monkeypatch.setattr(measured_rates, "_read", lambda file: measured_rates._Measured())


def rates_as_for_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo `rates_as_shipped`."""
    monkeypatch.setattr(measured_rates, "_read", _read_measured)


def kernels_built_as_for_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo `kernels_built_by_runs`."""
    _set_defaults(monkeypatch, apart=True)
    monkeypatch.setattr(CachedKernels, "save", _save)
    monkeypatch.setattr(compiling, "compile_here", _compile_here)
    monkeypatch.setattr(compiling, "compile_apart", _compile_apart)


def _set_defaults(monkeypatch: pytest.MonkeyPatch, *, apart: bool) -> None:
    for description, name in ((CompileCall, "build"), (SessionCall, "build_apart")):
        monkeypatch.setattr(description.options[name], "default", apart)
    defaults = Runtime.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "build_apart", apart)
