"""The program cache: compiled kernels on disk, so that the second process compiles nothing. This is its specification.

Place    FLASHMEM_CACHE_DIR, else XDG_CACHE_HOME/flashmem, else ~/.cache/flashmem; there `programs/KEY.bin`, one file a program.
Key      SHA-256 (hex) over: the format version; the device key (platform, its version, vendor, device, its version, driver
         version); the build options; the source; and the launches (kernel, global and local size) that the session makes.
         The launches belong to the key because some drivers compile when a kernel first runs, for the sizes it runs with
         (docs/opencl-notes.md): a program that other launches filled would be incomplete.
Content  The magic line, the key, the length of the binary (8 bytes, little endian), the SHA-256 of the binary, the binary.
Writing  After the session's kernels have all run once: into a temporary file in the same folder, renamed when whole. A cache
         that cannot be written costs a warning, never a run.
Reading  Any doubt is a miss: no file, a short one, another magic, key, length or hash, or a binary that the driver refuses.
         An entry found wrong is deleted. Nothing is ever migrated: another format version is another key.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from flashmem.errors import FlashmemWarning, RunError
from flashmem.paths import cache_folder
from flashmem.program import Launch
from flashmem.runtime.opencl import Context, Program

FORMAT_VERSION = 1
_MAGIC = b"flashmem program\n"
_LENGTH_BYTES = 8
_HASH_BYTES = 32


class ProgramCache:
    """The entries in one folder."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = cache_folder("programs") if folder is None else folder

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


class CachedProgram:
    """A program from the cache, or compiled; `save` puts a compiled one into the cache once its kernels have run."""

    def __init__(
        self, cache: ProgramCache, context: Context, source: str, options: Sequence[str], launches: Iterable[Launch]
    ) -> None:
        """Load or compile.

        Raises:
            RunError: the driver refuses the kernels.
        """
        self._cache = cache
        self._key = program_key(context.device.key, source, options, launches)
        self.was_cached = False
        binary = cache.read(self._key)
        if binary is not None:
            try:
                self.program: Program = context.load(binary, options)
            except RunError:
                cache.delete(self._key)
            else:
                self.was_cached = True
        if not self.was_cached:
            self.program = context.build(source, options)

    def save(self) -> None:
        """Store what was compiled; nothing to do if it came from the cache."""
        if not self.was_cached:
            self._cache.write(self._key, self.program.binary())
            self.was_cached = True


def program_key(device_key: str, source: str, options: Sequence[str], launches: Iterable[Launch]) -> str:
    """The hash an entry is stored under: hex, 64 digits."""
    shapes = sorted({f"{launch.kernel} {launch.global_size} {launch.local_size}" for launch in launches})
    digest = hashlib.sha256()
    for part in (str(FORMAT_VERSION), device_key, "\n".join(options), source, "\n".join(shapes)):
        data = part.encode()
        digest.update(len(data).to_bytes(_LENGTH_BYTES, "little"))
        digest.update(data)
    return digest.hexdigest()


def _pack(key: str, binary: bytes) -> bytes:
    return b"".join(
        (_MAGIC, bytes.fromhex(key), len(binary).to_bytes(_LENGTH_BYTES, "little"), hashlib.sha256(binary).digest(), binary)
    )


def _unpack(key: str, content: bytes) -> bytes | None:
    """The binary in `content`, or None if anything is not as `_pack` writes it."""
    header = len(_MAGIC) + 2 * _HASH_BYTES + _LENGTH_BYTES
    binary = content[header:]
    return binary if binary and _pack(key, binary) == content else None
