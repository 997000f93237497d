"""The program cache: compiled kernels on disk, so that a later process compiles nothing. This is its specification.

Place    FLASHMEM_CACHE_DIR, else XDG_CACHE_HOME/flashmem, else ~/.cache/flashmem; there `programs/KEY.bin`, one file a kernel.
         Only the user can access folder and files. A folder of another user is not used.
Key      SHA-256 (hex) over: the format version; the device key (platform, its version, vendor, device, its version, driver
         version, and the compile target: instruction set and variables, `compile_target`); the build options; and the kernel's
         complete text (`program.kernel_text`). If the driver compiles a kernel separately for launches of different sizes, its
         variants count too (`variant`; docs/research/opencl-notes.md). Nothing of the model: kernels of the same text are one
         entry. Kernels that a session compiled in one program (below) are one entry; its key is the SHA-256 over theirs.
Content  The magic line, the key, the length of the binary (8 bytes, little endian), the SHA-256 of the binary, the binary.
Writing  By child processes of `flashmem compile`, or of a session that lacks kernels (`pool`). A session that builds
         them itself (`build_apart=False`) compiles them in one program, because a driver reads its own declarations for each
         (PoCL: 0.2 s), and writes it after all of its kernels have run once. A temporary file in the same folder is renamed
         when complete. If the cache cannot be written, there is a warning, and the run continues. Kernels carried by a bundle
         are never written: only those compiled here from source.
Reading  Any doubt is a miss: no file, a short one, or another magic, key, length or hash. A binary is also a miss if the driver
         refuses it when it is loaded, or when a kernel of it is created. An invalid entry is deleted, and built again. Entries
         are not migrated: another format version is another key.
Limit    1 GB, or a tenth of the disk space that would be free without it, at least 50 MB; least recently used entries are
         removed (`ProgramCache.trim`).

A bundle may carry entries, in the same form as files, one after the other (`packed_entries`). The cache is searched first.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from typing import Any

from flashmem.base.errors import RunError, UserError
from flashmem.base.interrupts import held_back
from flashmem.base.threads import Thread, Waiters, started
from flashmem.program.kernel_text import joined_texts, kernel_texts, shuffles, uses_tensor_cores
from flashmem.runtime.kernels.cache_files import ProgramCache, unpacked_entries
from flashmem.runtime.kernels.required import RequiredKernel, variant
from flashmem.runtime.opencl.context import CompiledProgram, Context
from flashmem.runtime.opencl.device import HALF_ARITHMETIC, Device
from flashmem.runtime.opencl.handles import KernelObject

Build = Callable[[Mapping[str, RequiredKernel]], Mapping[str, bytes]]
"""Builds kernels, writes them to the cache, and returns the binaries by key. Raises RunError."""

FORMAT_VERSION = 3
_LENGTH_BYTES = 8
_KEY_DIGITS = 64
_AHEAD_BYTES = 4 << 20
_COMPUTES_IN_HALF = re.compile(rf"(?<!#ifdef {HALF_ARITHMETIC}\n)^#pragma OPENCL EXTENSION {HALF_ARITHMETIC}", re.MULTILINE)
"""A kernel's text that needs arithmetic in half, and has no other way for devices without it."""


class CachedKernels:
    """The compiled kernels of a session: from the cache, from the bundle, or built.

    A thread loads available kernels in the given order. A driver needs a millisecond or two for each. Meanwhile opening
    continues with those that are loaded, and a first run starts without the kernels of later runs. Until the context is made,
    the thread reads the first binaries. Missing kernels are built by
    `build`, which returns binaries. Without it this process builds them in one program, and `save` writes that to the cache
    after they have run.
    """

    def __init__(
        self,
        cache: ProgramCache,
        context: Context,
        options: Sequence[str],
        wanted: Iterable[RequiredKernel],
        carried: bytes = b"",
        build: Build | None = None,
        shared: MutableMapping[str, CompiledProgram] | None = None,
    ) -> None:
        """Find or build the kernels, and start to load them.

        `carried` has the compiled kernels of the bundle (`packed_entries`). `shared` has the programs of other sessions in this
        context by key; loaded programs are added to it. Those from a bundle are added with their hash in the key. So no other
        bundle gets them in place of a kernel that was compiled here.

        Raises:
            UserError: the kernels compute in half or use tensor cores, and the device does not.
            RunError: the driver refuses the kernels, or the system has no more threads.
        """
        self._cache = cache
        self._context = context
        self._options = options
        self._build = build
        self._shared = {} if shared is None else shared
        self._programs: dict[str, CompiledProgram] = {}
        self._names = set[str]()
        self._compiled: dict[str, CompiledProgram] = {}  # by key: built by this process
        self._loaded: dict[str, tuple[str, RequiredKernel]] = {}  # by name, with the key of its entry: not built here
        self._carried: dict[str, RequiredKernel] = {}  # by key: from the bundle
        self._error: RunError | UserError | None = None
        self._refused: dict[str, RequiredKernel] = {}  # refused by the driver
        brought: dict[str, bytes] | None = None
        found: list[tuple[str, RequiredKernel, bytes | None]] = []  # None: in the cache
        missing: dict[str, RequiredKernel] = {}
        for each in wanted:
            self._names.add(each.name)
            if HALF_ARITHMETIC not in context.device.extensions and _COMPUTES_IN_HALF.search(each.text):
                raise UserError(
                    f"the bundle's kernels compute in half ({HALF_ARITHMETIC}), which {context.device.name} does not; "
                    "compile the model for this device"
                )
            if uses_tensor_cores(each.text) and "nvidia" in context.device.platform.lower() and not context.device.mma:
                raise UserError(
                    f"the bundle's kernels use tensor cores (compute capability 8.0), which {context.device.name} does not "
                    "have; compile the model for this device"
                )
            key = kernel_key(context.device, each, options)
            program = self._shared.get(key)
            if program is not None:
                self._programs[each.name] = program
                self._loaded[each.name] = (key, each)
                continue
            if cache.holds(key):
                found.append((key, each, None))
                continue
            brought = unpacked_entries(carried) if brought is None else brought
            if key in brought:
                found.append((key, each, brought[key]))
                self._carried[key] = each
            else:
                missing[key] = each
        self._make(missing)
        self._lock = threading.Lock()
        self._more = Waiters()  # for `_programs`, which it guards
        self._left = len(found)
        self._ending = threading.Lock()
        self._loading: Thread | None = None
        if found:  # a driver that loads another program may keep the interpreter lock, for which a new thread's start waits
            with held_back():
                self._loading = started(self._load, "flashmem-kernels", found, daemon=False)

    def __contains__(self, name: object) -> bool:
        """Whether the kernel is one of the session's."""
        return name in self._names

    @property
    def compiled(self) -> int:
        """The number of programs that were compiled and are not in the cache."""
        self.wait()
        return len(self._compiled)

    def _make(self, missing: Mapping[str, RequiredKernel]) -> None:
        """Build the missing kernels, by key."""
        if self._build is not None and missing:
            for key, binary in self._build(missing).items():
                try:
                    self._keep(key, missing[key], self._context.load(binary, self._options_of(missing[key])))
                except RunError:
                    self._distrust(self._build)
                    self._keep(key, missing[key], self._context.build(missing[key].text, self._options_of(missing[key])))
            return
        for ways in {(shuffles(each.text), each.options) for each in missing.values()}:  # each is compiled with other options
            self._make_together({key: each for key, each in missing.items() if (shuffles(each.text), each.options) == ways})

    def _make_together(self, missing: Mapping[str, RequiredKernel]) -> None:
        """Load the program of these kernels from the cache, or compile it in this process."""
        if not missing:
            return
        entry = next(iter(missing)) if len(missing) == 1 else hashlib.sha256("".join(sorted(missing)).encode()).hexdigest()
        options = self._options_of(next(iter(missing.values())))
        program = self._from_cache(entry, options)
        if program is not None:
            self._loaded |= {each.name: (entry, each) for each in missing.values()}
        else:
            program = self._context.build(joined_texts([each.text for each in missing.values()]), options)
            self._compiled[entry] = program
        for key, each in missing.items():
            self._keep(key, each, program)

    def _options_of(self, wanted: RequiredKernel) -> Sequence[str]:
        return (*self._options, *wanted.options)

    def _from_cache(self, entry: str, options: Sequence[str], read: bytes | None = None) -> CompiledProgram | None:
        """The program of an entry, which is `read` perhaps; None if there is none that the driver takes. A refused entry is
        deleted.
        """
        binary = read or self._cache.read(entry)
        if binary is None:
            return None
        try:
            return self._context.load(binary, options)
        except RunError:
            self._cache.delete(entry)
            return None

    def _distrust(self, build: Build) -> None:
        """After a driver refused a new binary: delete the cache entries of this process's binaries, and build again.

        Intel's runtime refuses binaries in a process that has loaded one for another instruction set
        (docs/research/opencl-notes.md). The binaries of this process then do not match their keys, and the next process must
        not find them.
        """
        for key in list(self._shared):
            self._cache.delete(key[:_KEY_DIGITS])
        carried = self._carried
        self._carried = {}
        build(carried)

    def _keep(
        self, key: str, wanted: RequiredKernel, program: CompiledProgram, shared_as: str | None = None
    ) -> CompiledProgram:
        self._programs[wanted.name] = self._shared[shared_as or key] = program
        return program

    def _load(self, found: list[tuple[str, RequiredKernel, bytes | None]]) -> None:
        try:
            ahead = self._read_ahead(key for key, _, carried in found if carried is None)
            self._context.wait()
            for key, wanted, carried in found:
                self._load_one(key, wanted, carried, ahead.pop(key, None))
        except RunError as error:  # there is no context
            self._error = error
        finally:
            with self._lock:
                self._left = 0
                self._more.wake()

    def _read_ahead(self, keys: Iterable[str]) -> dict[str, bytes]:
        """Binaries of the cache that are read until the context is made."""
        ahead = dict[str, bytes]()
        held = 0
        for key in keys:
            if self._context.ready or held > _AHEAD_BYTES:
                break
            binary = self._cache.read(key)
            if binary is not None:
                ahead[key] = binary
                held = held + len(binary)
        return ahead

    def _load_one(self, key: str, wanted: RequiredKernel, carried: bytes | None, read: bytes | None) -> None:
        """Load a kernel that the bundle has `carried`, or the cache has, of which it is `read` perhaps."""
        if carried is None:
            shared_as = key
            program = self._from_cache(key, self._options_of(wanted), read)  # one at a time: all of them are megabytes
        else:
            shared_as = f"{key} {hashlib.sha256(carried).hexdigest()}"
            program = self._shared.get(shared_as)
            if program is None:
                with suppress(RunError):
                    program = self._context.load(carried, self._options_of(wanted))
        with self._lock:
            if program is None:
                self._refused[key] = wanted
            else:
                self._keep(key, wanted, program, shared_as)
                self._loaded[wanted.name] = key, wanted
            self._left -= 1
            self._more.wake()

    def _wait_for(self, name: str) -> None:
        """Wait until the kernel `name` is loaded, or all are that can be. Raises RunError as `wait` does."""
        while True:
            with self._lock:
                if name in self._programs:
                    return
                if not self._left:
                    break
                turn = self._more.turn()
            turn.acquire()
        self.wait()

    def wait(self) -> None:
        """Wait until all kernels are loaded. Every call raises RunError if one was refused, and UserError if none can be
        built.
        """
        with self._ending:  # the second caller finds what the first one has built
            if self._loading is not None:
                self._loading.join()
                self._loading = None
                try:
                    self._make(self._refused if self._error is None else {})
                except (RunError, UserError) as error:
                    self._error = error
        if self._error is not None:
            raise self._error

    def end_loading(self) -> None:
        """Wait until no thread loads kernels; refused ones are ignored. The others can be used."""
        with suppress(RunError, UserError):
            self.wait()

    def close(self) -> None:
        """End loading, and let go of the programs.

        Here, while Ctrl-C waits: at the end of a program `shared` calls a function of Python, in which Ctrl-C would be lost.
        """
        self.end_loading()
        self._programs.clear()
        self._compiled.clear()

    def kernel(self, name: str, arguments: Sequence[Any]) -> KernelObject:
        """A new kernel object with its arguments set (`opencl.context.CompiledProgram.kernel`).

        Raises:
            RunError: the driver refuses the kernels; the kernel is missing or has other arguments.
        """
        self._wait_for(name)
        if name not in self._programs:
            raise RunError(f"the bundle lacks the kernel {name}; compile the model again")
        try:
            return self._programs[name].kernel(name, arguments)
        except RunError:
            if not self._rebuild_incomplete(name):
                raise
        return self._programs[name].kernel(name, arguments)

    def _rebuild_incomplete(self, name: str) -> bool:
        """Rebuild a kernel whose binary the driver loaded but which has no such kernel. False if it was built here. Raises
        RunError.
        """
        with self._ending:
            if name not in self._loaded:
                return False
            entry, wanted = self._loaded.pop(name)
            self._cache.delete(entry)
            self._make({kernel_key(self._context.device, wanted, self._options): wanted})
            return True

    def save(self) -> None:
        """Write the kernels that this process compiled to the cache."""
        self.wait()
        for key, program in list(self._compiled.items()):
            self._cache.write(key, program.binary())
            del self._compiled[key]
            if not self._compiled:
                self._cache.trim()


class CompiledKernels:
    """The kernels of a source, compiled at every request and never cached, for measurements."""

    def __init__(self, context: Context, source: str, options: Sequence[str]) -> None:
        self._context = context
        self._texts = kernel_texts(source)
        self._options = options
        self._programs: dict[str, CompiledProgram] = {}

    def kernel(self, name: str, arguments: Sequence[Any]) -> KernelObject:
        """A new kernel object with its arguments set. Raises RunError."""
        if name not in self._programs:
            self._programs[name] = self._context.build(self._texts[name], self._options)
        return self._programs[name].kernel(name, arguments)


def kernel_key(device: Device, wanted: RequiredKernel, options: Sequence[str]) -> str:
    """The key of a kernel in the cache: 64 hexadecimal digits."""
    variants = sorted(set(map(variant, wanted.sizes))) if device.compiles_at_launch else []
    hashing = hashlib.sha256()
    text = device.with_instructions(wanted.text)
    for part in (str(FORMAT_VERSION), device.key, "\n".join((*options, *wanted.options)), text, "\n".join(variants)):
        data = part.encode()
        hashing.update(len(data).to_bytes(_LENGTH_BYTES, "little"))
        hashing.update(data)
    return hashing.hexdigest()
