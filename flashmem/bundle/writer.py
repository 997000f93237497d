"""Writing bundles, whole or not at all."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from flashmem.base.errors import BundleError
from flashmem.base.threads import started
from flashmem.base.version import __version__
from flashmem.bundle.bundle import (
    READ_BYTES,
    ShapeVariant,
    blocks_of_file,
    check_code,
    checksum_of_file,
    common_part,
    own_part,
)
from flashmem.bundle.checksums import ChecksummedRange, checksum, content_hash, pack_checksums
from flashmem.bundle.language import Language
from flashmem.bundle.manifest import (
    FORMAT_VERSION,
    LANGUAGE,
    WEIGHTS,
    compact,
    disk_errors,
    fingerprint,
    instruction_set_files,
    manifest_text,
    variant_files,
)
from flashmem.bundle.replacing import check_replaceable
from flashmem.bundle.validation import check_bundle, check_elsewhere, check_variants
from flashmem.bundle.version_directories import Draft
from flashmem.program.kernel_text import Source
from flashmem.program.program import Program
from flashmem.schedule.plan import OverlapPlan
from flashmem.target.descriptor import DeviceDescriptor


class BundleWriter:
    """Writes a bundle: append weights, then commit. Leaving the context without a commit removes what was written."""

    def __init__(self, path: str | Path) -> None:
        """Begin a bundle that becomes the folder `path`. An older bundle of that name stays until the new one is complete.

        Raises:
            UserError: `path` exists and is not a bundle, or cannot be written.
        """
        self.path = Path(path)
        check_replaceable(self.path)
        with disk_errors(self.path):
            self._draft = Draft(self.path)
        self._size = 0
        self._empty = 0  # bytes at the beginning that are not written
        self._sha256 = hashlib.sha256()
        self._appended: dict[tuple[int, int], tuple[int, bytes]] = {}  # checksum, content hash; by (offset, bytes)
        with self._cleaned_up():
            self._weights = (self._draft.folder / WEIGHTS).open("x+b", buffering=0)

    @property
    def size(self) -> int:
        """Bytes written to weights.bin so far."""
        return self._size

    def append(self, data: NDArray[Any] | bytes, alignment: int = 1) -> int:
        """Write `data` to weights.bin at the next multiple of `alignment` and return that offset.

        Raises:
            UserError: the disk is full or fails; nothing of the bundle is kept.
        """
        with self._cleaned_up():
            padding = bytes(-self._size % alignment)
            offset = self._size + len(padding)
            flat = memoryview(data if isinstance(data, bytes) else np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)
            hashing = started(self._hash, "flashmem-hash", padding, flat, offset, daemon=False)
            try:
                self._write(memoryview(padding))
                self._write(flat)
            finally:
                hashing.join()
            return offset

    def leave_empty(self, nbytes: int) -> None:
        """Begin weights.bin with so many zeros, which take no disk space, for a rehearsal. Their checksums are not computed.

        Raises:
            UserError: the disk fails; nothing of the bundle is kept.
        """
        with self._cleaned_up():
            self._weights.truncate(nbytes)
            self._weights.seek(nbytes)
        self._size = self._empty = nbytes

    def _hash(self, padding: bytes, data: memoryview, offset: int) -> None:
        """Hash appended bytes in a separate thread: hashing takes about as long as writing, and neither holds the GIL."""
        self._sha256.update(padding)
        self._sha256.update(data)
        self._appended[offset, len(data)] = checksum(data), content_hash([data])

    def _write(self, data: memoryview) -> None:
        while len(data):
            written = self._weights.write(data[:READ_BYTES])
            self._size += written
            data = data[written:]

    def commit(
        self,
        program: Program,
        source: Source,
        plan: OverlapPlan,
        descriptor: DeviceDescriptor,
        meta: Mapping[str, Any],
    ) -> None:
        """Commit a bundle of one program; see `commit_all`."""
        self.commit_all([ShapeVariant(program, plan, source, own_part(meta))], descriptor, common_part(meta))

    def commit_all(
        self,
        variants: Sequence[ShapeVariant],
        descriptor: DeviceDescriptor,
        meta: Mapping[str, Any],
        language: bytes = b"",
    ) -> None:
        """Check and write the other files, and move the bundle into place.

        `meta` is metadata as JSON: the origin of the model; `budget_bytes` is the default budget of a session. `variants` must
        not be empty; a session opens the first. `language`: the tokenizer of a language model (`bundle.language`).

        Raises:
            UserError: the disk is full or fails; nothing of the bundle is kept.
            BundleError: programs and plans contradict each other (an error of the compiler).
        """
        with self._cleaned_up():
            contents: dict[str, bytes] = {}
            for index, variant in enumerate(variants):
                program = variant.program
                source = variant.source
                if program.weights_bytes != self._size:
                    raise BundleError(f"the program is for {program.weights_bytes} bytes of weights, {self._size} were written")
                # The checks of Bundle.open, so that no bundle is written that cannot be opened.
                check_bundle(program, variant.plan)
                check_code(program, source.plain, source.lane)
                texts = (
                    compact(program.to_json()),
                    compact(variant.plan.to_json()),
                    source.plain.encode(),
                    source.lane.encode(),
                    pack_checksums(program, self._checksum, self._content_hash),
                )
                contents |= zip(variant_files(index), texts, strict=True)
                for name, code in variant.elsewhere.items():
                    check_bundle(code.program, variant.plan)
                    check_code(code.program, code.source.plain, code.source.lane)
                    check_elsewhere(program, code.program)
                    own = (compact(code.program.to_json()), code.source.plain.encode(), code.source.lane.encode())
                    contents |= zip(instruction_set_files(index, name), own, strict=True)
            check_variants([variant.program for variant in variants])
            if language:
                Language.from_json(language)
                contents[LANGUAGE] = language
            os.fsync(self._weights.fileno())
            self._weights.close()
            for name, content in contents.items():
                self._draft.write(name, content)
            manifest = {
                "format_version": FORMAT_VERSION,
                "flashmem_version": __version__,
                "version_directory": self._draft.version,
                "files": {name: fingerprint(content) for name, content in contents.items()},
                "weights": {"nbytes": self._size, "sha256": self._sha256.hexdigest()},
                "device": descriptor.runtime_part(),
                "meta": dict(meta),
                "variants": [dict(variant.own) for variant in variants],
            }
            self._draft.publish(manifest_text(manifest))

    def _checksum(self, part: ChecksummedRange) -> int:
        """The checksum of a range: known if it was appended in one call, else read back from the file."""
        if part.offset < self._empty:
            return 0
        known = self._appended.get((part.offset, part.nbytes))
        return checksum_of_file(self._weights.fileno(), part) if known is None else known[0]

    def _content_hash(self, part: ChecksummedRange) -> bytes:
        """The content hash of a range, found in the same way."""
        if part.offset < self._empty:  # as if no two parts were equal: these would share memory
            return content_hash([str(part.offset).encode()])
        known = self._appended.get((part.offset, part.nbytes))
        return content_hash(blocks_of_file(self._weights.fileno(), part)) if known is None else known[1]

    @contextmanager
    def _cleaned_up(self) -> Iterator[None]:
        """Remove the draft if the body fails, and turn errors of the disk into UserErrors."""
        try:
            with disk_errors(self.path):
                yield
        except BaseException:
            self._discard()
            raise

    def _discard(self) -> None:
        if hasattr(self, "_weights"):
            self._weights.close()
        self._draft.discard()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._discard()
