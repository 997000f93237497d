"""The program cache: compiled kernels on disk, so that the second process compiles nothing. This is its specification.

Place    FLASHMEM_CACHE_DIR, else XDG_CACHE_HOME/flashmem, else ~/.cache/flashmem; there `programs/KEY.bin`, one file a kernel.
Key      SHA-256 (hex) over: the format version; the device key (platform, its version, vendor, device, its version, driver
         version); the build options; the kernel's text with all that it needs (`program.kernel_texts`); and its variants, where
         the driver compiles anew for what a kernel is launched with (`variant`; docs/opencl-notes.md). Nothing of the model:
         kernels of the same text are one entry.
Content  The magic line, the key, the length of the binary (8 bytes, little endian), the SHA-256 of the binary, the binary.
Writing  By child processes of `flashmem compile`, or of a session that lacks kernels (`kernel_processes`); by a session that
         builds them itself (`build_apart=False`), after its kernels have all run once. Into a temporary file in the same
         folder, renamed when whole. A cache that cannot be written costs a warning, never a run.
Reading  Any doubt is a miss: no file, a short one, another magic, key, length or hash, or a binary that the driver refuses.
         An entry found wrong is deleted. Nothing is ever migrated: another format version is another key.

A bundle may carry entries, as they stand in files, one after the other (`packed_entries`); the cache is asked first.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from flashmem.errors import FlashmemWarning, RunError, UserError
from flashmem.paths import cache_folder
from flashmem.program import kernel_texts
from flashmem.runtime.devices import HALF_ARITHMETIC, Device
from flashmem.runtime.kernel_list import Wanted, variant
from flashmem.runtime.opencl import Context, Kernel, Program

Build = Callable[[Mapping[str, Wanted]], Mapping[str, bytes]]
"""Gives the binaries of kernels by key. Raises RunError."""

FORMAT_VERSION = 2
_MAGIC = b"flashmem program\n"
_LENGTH_BYTES = 8
_HASH_BYTES = 32


class ProgramCache:
    """The entries in one folder."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = cache_folder("programs") if folder is None else folder

    def holds(self, key: str) -> bool:
        """Whether there is an entry for `key`, which may yet be found wrong as it is read."""
        return self._path(key).is_file()

    def read(self, key: str) -> bytes | None:
        """The binary stored under `key`, or None."""
        path = self._path(key)
        try:
            content = path.read_bytes()
        except OSError:
            return None
        binary = _unpack(key, content)
        if binary is None:
            self.delete(key)
        return binary

    def write(self, key: str, binary: bytes) -> None:
        """Store `binary` under `key`, whole or not at all. Warns where the folder cannot be written."""
        temporary: Path | None = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(dir=self.folder, prefix=f".{key[:16]}-")
            temporary = Path(name)
            with os.fdopen(descriptor, "wb") as file:
                file.write(_pack(key, binary))
            temporary.replace(self._path(key))
        except OSError as error:
            if temporary is not None:
                with suppress(OSError):
                    temporary.unlink()
            warnings.warn(
                f"the program cache {self.folder} cannot be written ({error.strerror}), so kernels are compiled again next "
                "time; set FLASHMEM_CACHE_DIR to a folder that can",
                FlashmemWarning,
                stacklevel=2,
            )

    def delete(self, key: str) -> None:
        """Forget `key`, if it is there and can be."""
        with suppress(OSError):
            self._path(key).unlink()

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.bin"


class CachedKernels:
    """The kernels of a session: from the cache, from the bundle, or built.

    What is there is loaded in a thread, in the order given: a driver takes a millisecond or two for each, in which opening can
    go on with those that are loaded, and a first run without what only later runs need. What is not there is built by `build`,
    which gives binaries; without it by this process, and `save` puts it into the cache once it has run.
    """

    def __init__(
        self,
        cache: ProgramCache,
        context: Context,
        options: Sequence[str],
        wanted: Iterable[Wanted],
        carried: bytes = b"",
        build: Build | None = None,
        shared: MutableMapping[str, Program] | None = None,
    ) -> None:
        """Find or build, and begin to load. `carried`: entries that the bundle brings (`packed_entries`). `shared`: programs by
        key that others have in this context; what is built here or comes from the cache joins them.

        Raises:
            UserError: the kernels compute in half, and the device does not.
            RunError: the driver refuses the kernels.
        """
        self._cache, self._context, self._options, self._build = cache, context, options, build
        self._shared = {} if shared is None else shared
        self._programs: dict[str, Program] = {}
        self._names = set[str]()
        self._compiled: dict[str, Program] = {}  # by key: what this process has built
        self._error: RunError | None = None
        self._refused: dict[str, Wanted] = {}  # what the driver does not take from the cache
        brought: dict[str, bytes] | None = None
        found: list[tuple[str, Wanted, bytes | None]] = []  # None: in the cache
        missing: dict[str, Wanted] = {}
        for each in wanted:
            self._names.add(each.name)
            if HALF_ARITHMETIC in each.text and HALF_ARITHMETIC not in context.device.extensions:
                raise UserError(
                    f"the bundle's kernels compute in half ({HALF_ARITHMETIC}), which {context.device.name} does not; "
                    "compile the model for this device"
                )
            key = kernel_key(context.device, each, options)
            program = self._shared.get(key)
            if program is not None:
                self._programs[each.name] = program
                continue
            if cache.holds(key):
                found.append((key, each, None))
                continue
            brought = unpacked_entries(carried) if brought is None else brought
            if key in brought:
                found.append((key, each, brought[key]))
            else:
                missing[key] = each
        self._make(missing)
        self._more = threading.Condition()  # of `_programs`
        self._left, self._ending = len(found), threading.Lock()
        self._loading: threading.Thread | None = threading.Thread(target=self._load, args=(found,), name="flashmem-kernels")
        self._loading.start()

    def __contains__(self, name: object) -> bool:
        """Whether the kernel was wanted."""
        return name in self._names

    @property
    def compiled(self) -> int:
        """How many kernels were compiled and are not in the cache."""
        self.wait()
        return len(self._compiled)

    def _make(self, missing: Mapping[str, Wanted]) -> None:
        """Build what is missing, by key."""
        if self._build is not None and missing:
            for key, binary in self._build(missing).items():
                self._keep(key, missing[key], self._context.load(binary, self._options))
            return
        for key, each in missing.items():
            self._compiled[key] = self._keep(key, each, self._context.build(each.text, self._options))

    def _keep(self, key: str, wanted: Wanted, program: Program) -> Program:
        self._programs[wanted.name] = self._shared[key] = program
        return program

    def _load(self, found: list[tuple[str, Wanted, bytes | None]]) -> None:
        try:
            for key, each, carried in found:
                binary = self._cache.read(key) if carried is None else carried  # one at a time: together they are megabytes
                self._load_one(key, each, binary, carried)
        finally:
            with self._more:
                self._left = 0
                self._more.notify_all()

    def _load_one(self, key: str, wanted: Wanted, binary: bytes | None, carried: bytes | None) -> None:
        program = None
        try:
            if binary is not None:
                program = self._context.load(binary, self._options)
        except RunError:
            self._cache.delete(key)
        with self._more:
            if program is None:
                self._refused[key] = wanted
            else:
                self._programs[wanted.name] = program
                if carried is None:  # what a bundle brings is for that bundle alone: nothing says that it is of this text
                    self._shared[key] = program
            self._left -= 1
            self._more.notify_all()

    def _wait_for(self, name: str) -> None:
        """The kernel `name` is there, or all are that will be. Raises RunError as `wait` does."""
        with self._more:
            while name not in self._programs and self._left:
                self._more.wait()
            if name in self._programs:
                return
        self.wait()

    def wait(self) -> None:
        """All kernels are there. Raises RunError where the driver refuses one, each time."""
        with self._ending:  # who comes second finds what the first one has built
            if self._loading is not None:
                self._loading.join()
                self._loading = None
                try:
                    self._make(self._refused)
                except RunError as error:
                    self._error = error
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Nothing is loaded any more; what was refused is nobody's business."""
        with suppress(RunError):
            self.wait()

    def kernel(self, name: str, arguments: Sequence[Any]) -> Kernel:
        """A kernel object of its own with its arguments set (`opencl.Program.kernel`).

        Raises:
            RunError: the driver refuses the kernels; it is missing, or takes other arguments.
        """
        self._wait_for(name)
        if name not in self._programs:
            raise RunError(f"the bundle lacks the kernel {name}; compile the model again")
        return self._programs[name].kernel(name, arguments)

    def save(self) -> None:
        """Store what was compiled; nothing to do for what came from the cache."""
        self.wait()
        for key, program in list(self._compiled.items()):
            self._cache.write(key, program.binary())
            del self._compiled[key]


class CompiledKernels:
    """The kernels of a source, each compiled when it is first asked for and never kept: for measurements."""

    def __init__(self, context: Context, source: str, options: Sequence[str]) -> None:
        self._context, self._texts, self._options = context, kernel_texts(source), options
        self._programs: dict[str, Program] = {}

    def kernel(self, name: str, arguments: Sequence[Any]) -> Kernel:
        """A kernel object of its own with its arguments set. Raises RunError."""
        if name not in self._programs:
            self._programs[name] = self._context.build(self._texts[name], self._options)
        return self._programs[name].kernel(name, arguments)


def kernel_key(device: Device, wanted: Wanted, options: Sequence[str]) -> str:
    """The hash an entry is stored under: hex, 64 digits."""
    variants = sorted(set(map(variant, wanted.sizes))) if device.compiles_at_launch else []
    digest = hashlib.sha256()
    for part in (str(FORMAT_VERSION), device.key, "\n".join(options), wanted.text, "\n".join(variants)):
        data = part.encode()
        digest.update(len(data).to_bytes(_LENGTH_BYTES, "little"))
        digest.update(data)
    return digest.hexdigest()


def packed_entries(entries: Mapping[str, bytes]) -> bytes:
    """Entries by key as one block of bytes, for a bundle."""
    return b"".join(_pack(key, entries[key]) for key in sorted(entries))


def unpacked_entries(content: bytes) -> dict[str, bytes]:
    """The entries in `content`, up to the first that is not as `packed_entries` writes it."""
    entries, header = dict[str, bytes](), len(_MAGIC) + 2 * _HASH_BYTES + _LENGTH_BYTES
    while content:
        key = content[len(_MAGIC) : len(_MAGIC) + _HASH_BYTES].hex()
        length = int.from_bytes(content[len(_MAGIC) + _HASH_BYTES :][:_LENGTH_BYTES], "little")
        binary = _unpack(key, content[: header + length])
        if binary is None:
            break
        entries[key] = binary
        content = content[header + length :]
    return entries


def _pack(key: str, binary: bytes) -> bytes:
    return b"".join(
        (_MAGIC, bytes.fromhex(key), len(binary).to_bytes(_LENGTH_BYTES, "little"), hashlib.sha256(binary).digest(), binary)
    )


def _unpack(key: str, content: bytes) -> bytes | None:
    """The binary in `content`, or None if anything is not as `_pack` writes it."""
    header = len(_MAGIC) + 2 * _HASH_BYTES + _LENGTH_BYTES
    binary = content[header:]
    return binary if binary and _pack(key, binary) == content else None
