"""The bundle: everything a device needs to run a model, and nothing it does not. Where the offline and online halves meet.

A bundle is a folder, NAME.flashmem, with a manifest and the folder that it names (flashmem.generations says why):

    manifest.json        format version, sizes and hashes of the other files, device, origin; a digest of itself
    3f2a90c1d5e7b846/
        program.json     what the device executes (flashmem.program)
        plan.json        when weights are loaded (flashmem.planning.plan)
        kernels.cl       OpenCL C of the program: one part for each kernel (flashmem.program.kernel_texts)
        kernels_lane.cl  the same kernels, each with a stream lane
        digests.bin      a digest of every part of weights.bin that is read on its own (flashmem.digests)
        weights.bin      weights, packed as the kernels read them, and constants
        binaries.bin     compiled kernels for one device, if it was asked to carry them: entries of the program cache
                         (flashmem.runtime.program_cache)

It is written beside its destination and put in place by one rename. Opening it checks everything but the content of
weights.bin: a session checks the constants, and the weights as they come in where it is asked to; `verify_weights` reads all
of it. Compiled kernels that are not what was written, or for another device or driver, are not used: kernels are compiled then.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from flashmem import __version__, digests
from flashmem.bundle_check import check_bundle, check_types
from flashmem.device import DeviceDescriptor
from flashmem.digests import Digests, Piece, digest, identity
from flashmem.errors import BundleError, MissingFileError, UserError
from flashmem.generations import MANIFEST, Draft, is_generation, named_generation
from flashmem.kernel_bounds import check_reach
from flashmem.lane_bounds import check_lanes
from flashmem.planning.plan import OverlapPlan
from flashmem.program import Program, Source, parsed

FORMAT_VERSION = 8
TEXT_FILES = ("program.json", "plan.json", "kernels.cl", "kernels_lane.cl")
DIGESTS = "digests.bin"
WEIGHTS = "weights.bin"
BINARIES = "binaries.bin"
_READ_BYTES = 8 << 20


@dataclass(frozen=True)
class Bundle:
    """A bundle that has been checked. `meta` is what the compiler said of its origin (model, budget_bytes, ...).

    `files` is the folder that its manifest named when it was opened.
    """

    path: Path
    files: Path
    program: Program
    plan: OverlapPlan
    source: Source
    descriptor: DeviceDescriptor
    meta: Mapping[str, Any]
    weights_sha256: str
    digests: Digests
    binaries: bytes | None = field(default=b"", repr=False)  # compiled kernels; None if they are damaged

    @property
    def weights_path(self) -> Path:
        """The weight file."""
        return self.files / WEIGHTS

    @property
    def budget_bytes(self) -> int | None:
        """The budget it was compiled for, in bytes."""
        budget = self.meta.get("budget_bytes")
        return budget if type(budget) is int and budget > 0 else None

    @classmethod
    def open(cls, path: str | Path) -> Bundle:
        """The bundle in the folder `path`.

        Raises:
            MissingFileError: there is nothing.
            BundleError: not a bundle, of another format version, truncated or tampered with.
        """
        path = Path(path)
        if not path.exists():
            raise MissingFileError(f"bundle {path} does not exist; make it with: flashmem compile model.onnx -o {path.name}")
        while True:
            manifest = _read_manifest(path)
            try:
                return cls._open(path, manifest)
            except BundleError:
                if named_generation(path) in (None, manifest["generation"]):
                    raise
                # It was replaced while it was read, and the files of the old one are gone.

    @classmethod
    def _open(cls, path: Path, manifest: Mapping[str, Any]) -> Bundle:
        files = path / manifest["generation"]
        contents = {name: _read_checked(path, name, manifest) for name in (*TEXT_FILES, DIGESTS)}
        _check_weights_size(path, manifest)
        try:
            texts = {name: contents.pop(name).decode() for name in TEXT_FILES}
            program = Program.from_json(parsed(texts.pop("program.json")))
            plan = OverlapPlan.from_json(parsed(texts.pop("plan.json")))
            descriptor = DeviceDescriptor.from_dict(manifest["device"], where=f"{path}/{MANIFEST}")
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
            raise BundleError(f"bundle {path} is damaged ({type(error).__name__}: {error}); compile the model again") from error
        check_types(descriptor, f"the device in {MANIFEST}")
        check_bundle(program, plan)
        check_reach(program, texts["kernels.cl"])
        check_lanes(program, texts["kernels_lane.cl"])
        if program.weights_bytes != manifest["weights"]["nbytes"]:
            raise BundleError(f"bundle {path} is damaged: its program is for another {WEIGHTS}; compile the model again")
        source = Source(texts["kernels.cl"], texts["kernels_lane.cl"], tuple(sorted({x.kernel for x in program.launches})))
        stored = digests.read(contents[DIGESTS], program)
        weights_sha256, binaries = manifest["weights"]["sha256"], _read_binaries(path, manifest)
        return cls(path, files, program, plan, source, descriptor, manifest["meta"], weights_sha256, stored, binaries)

    def verify_weights(self) -> None:
        """Read all of weights.bin and compare its hash.

        Raises:
            BundleError: it is not what was written; the first part that is damaged is named.
        """
        whole = hashlib.sha256()
        try:
            with self.weights_path.open("rb", buffering=0) as file:
                while block := file.read(_READ_BYTES):
                    whole.update(block)
                if whole.hexdigest() == self.weights_sha256:
                    return
                parts = zip(digests.pieces(self.program), self.digests.all(), strict=True)
                wrong = (part.name for part, stored in parts if _digest_of_file(file.fileno(), part) != stored)
                what = next(wrong, "what lies between its slices")
        except OSError as error:
            raise BundleError(f"{self.weights_path} cannot be read ({error.strerror}); compile the model again") from error
        raise BundleError(f"{self.weights_path} is damaged: {what} is not what was written; compile the model again")


def _digest_of_file(descriptor: int, part: Piece) -> int:
    """The digest of a part of an open file, as far as the file goes."""
    value = digest(b"")
    for block in _blocks_of_file(descriptor, part):
        value = digest(block, value)
    return value


def _blocks_of_file(descriptor: int, part: Piece) -> Iterator[bytes]:
    """The bytes of a part of an open file, as far as the file goes."""
    end = part.offset + part.nbytes
    return (os.pread(descriptor, min(_READ_BYTES, end - offset), offset) for offset in range(part.offset, end, _READ_BYTES))


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BundleError(f"{path} is not a bundle: it has no readable {MANIFEST}; compile the model again") from error
    version = manifest.get("format_version") if isinstance(manifest, dict) else None
    if type(version) is not int or version != FORMAT_VERSION:
        raise BundleError(
            f"bundle {path} has format version {version!r}, this flashmem reads {FORMAT_VERSION}; compile the model again"
        )
    if manifest.get("digest") != _manifest_digest(manifest):
        raise BundleError(f"bundle {path} is damaged: {MANIFEST} is not what was written; compile the model again")
    shape = {"generation": str, "device": dict, "files": dict, "weights": dict, "meta": dict}
    for key, kind in shape.items():
        if not isinstance(manifest.get(key), kind):
            raise BundleError(f"bundle {path} is damaged: its manifest lacks {key!r}; compile the model again")
    weights = manifest["weights"]
    if type(weights.get("nbytes")) is not int or weights["nbytes"] < 0 or not isinstance(weights.get("sha256"), str):
        raise BundleError(f"bundle {path} is damaged: its manifest does not describe {WEIGHTS}; compile the model again")
    if not is_generation(manifest["generation"]):
        raise BundleError(f"bundle {path} is damaged: its manifest names no folder; compile the model again")
    checked: dict[str, Any] = manifest
    return checked


def _manifest_digest(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of a manifest without its own digest, however it is laid out."""
    rest = {key: value for key, value in manifest.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _manifest_text(manifest: Mapping[str, Any]) -> bytes:
    """The content of manifest.json."""
    plain = json.loads(json.dumps(manifest))  # as it will be read, so that the digests agree
    return json.dumps({**plain, "digest": _manifest_digest(plain)}, indent=2).encode()


def _read_checked(path: Path, name: str, manifest: Mapping[str, Any]) -> bytes:
    """The content of a small file whose size and hash are as the manifest says."""
    try:
        content: bytes = (path / manifest["generation"] / name).read_bytes()
    except OSError as error:
        raise BundleError(f"bundle {path} lacks {name} ({error.strerror}); compile the model again") from error
    if manifest["files"].get(name) != _fingerprint(content):
        raise BundleError(f"bundle {path} is damaged: {name} is not what was written; compile the model again")
    return content


def _read_binaries(path: Path, manifest: Mapping[str, Any]) -> bytes | None:
    """The compiled kernels that the bundle carries; None if they are not what was written."""
    if BINARIES not in manifest["files"]:
        return b""
    try:
        return _read_checked(path, BINARIES, manifest)
    except BundleError:
        return None


def _check_weights_size(path: Path, manifest: Mapping[str, Any]) -> None:
    try:
        size = (path / manifest["generation"] / WEIGHTS).stat().st_size
    except OSError as error:
        raise BundleError(f"bundle {path} lacks {WEIGHTS} ({error.strerror}); compile the model again") from error
    expected = manifest["weights"]["nbytes"]
    if size != expected:
        raise BundleError(f"bundle {path} is damaged: {WEIGHTS} has {size} bytes, not {expected}; compile the model again")


def _fingerprint(content: bytes) -> dict[str, Any]:
    return {"nbytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


class BundleWriter:
    """Writes a bundle: append weights, then commit. Leaving the context without a commit leaves nothing behind."""

    def __init__(self, path: str | Path) -> None:
        """Begin a bundle that will be the folder `path`. An older bundle of that name stays until the new one is whole.

        Raises:
            UserError: `path` is something else than a bundle, or cannot be written.
        """
        self.path = Path(path)
        if self.path.exists() and not (self.path / MANIFEST).is_file():
            raise UserError(f"{self.path} exists and is not a bundle; remove it or name another output")
        with _disk_errors(self.path):
            self._draft = Draft(self.path)
        self._size = 0
        self._sha256 = hashlib.sha256()
        self._appended: dict[tuple[int, int], tuple[int, bytes]] = {}  # digest and identity of what was, by offset and bytes
        with self._cleaned_up():
            self._weights = (self._draft.folder / WEIGHTS).open("w+b", buffering=0)

    @property
    def size(self) -> int:
        """Bytes in weights.bin so far."""
        return self._size

    def append(self, data: NDArray[Any] | bytes, alignment: int = 1) -> int:
        """Write `data` at the next multiple of `alignment`, and return that offset.

        Raises:
            UserError: the disk is full or fails; nothing of the bundle is kept.
        """
        with self._cleaned_up():
            padding = bytes(-self._size % alignment)
            offset = self._size + len(padding)
            flat = memoryview(data if isinstance(data, bytes) else np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)
            hashing = threading.Thread(target=self._hash, args=(padding, flat, offset))
            hashing.start()
            try:
                self._write(memoryview(padding))
                self._write(flat)
            finally:
                hashing.join()
            return offset

    def _hash(self, padding: bytes, data: memoryview, offset: int) -> None:
        """In a thread beside the writing: both take about as long, and none needs the interpreter."""
        self._sha256.update(padding)
        self._sha256.update(data)
        self._appended[offset, len(data)] = digest(data), identity([data])

    def _write(self, data: memoryview) -> None:
        while len(data):
            written = self._weights.write(data[:_READ_BYTES])
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
        """Write everything else, and put the bundle in place.

        `meta` is JSON-able: where the model came from; `budget_bytes` is the default budget of a session.

        Raises:
            UserError: the disk is full or fails; nothing of the bundle is kept.
            BundleError: program and plan do not hold together (an error of the compiler).
        """
        with self._cleaned_up():
            if program.weights_bytes != self._size:
                raise BundleError(f"the program is for {program.weights_bytes} bytes of weights, {self._size} were written")
            # What Bundle.open will check, checked before anything is kept.
            check_bundle(program, plan)
            check_reach(program, source.plain)
            check_lanes(program, source.lane)
            contents = {
                "program.json": _compact(program.to_json()),
                "plan.json": _compact(plan.to_json()),
                "kernels.cl": source.plain.encode(),
                "kernels_lane.cl": source.lane.encode(),
                DIGESTS: digests.make(program, self._digest, self._identity),
            }
            os.fsync(self._weights.fileno())
            self._weights.close()
            for name, content in contents.items():
                self._draft.write(name, content)
            manifest = {
                "format_version": FORMAT_VERSION,
                "flashmem_version": __version__,
                "generation": self._draft.generation,
                "files": {name: _fingerprint(content) for name, content in contents.items()},
                "weights": {"nbytes": self._size, "sha256": self._sha256.hexdigest()},
                "device": descriptor.to_dict(),
                "meta": dict(meta),
            }
            self._draft.publish(_manifest_text(manifest))

    def _digest(self, part: Piece) -> int:
        """The digest of a part as it was appended; of what is only a part of that, as it was written."""
        known = self._appended.get((part.offset, part.nbytes))
        return _digest_of_file(self._weights.fileno(), part) if known is None else known[0]

    def _identity(self, part: Piece) -> bytes:
        """Its identity, likewise."""
        known = self._appended.get((part.offset, part.nbytes))
        return identity(_blocks_of_file(self._weights.fileno(), part)) if known is None else known[1]

    @contextmanager
    def _cleaned_up(self) -> Iterator[None]:
        """Whatever fails inside leaves nothing half-written; errors of the disk become UserErrors."""
        try:
            with _disk_errors(self.path):
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


def replace_plan(bundle: Bundle, plan: OverlapPlan, meta: Mapping[str, Any], path: Path | None = None) -> Bundle:
    """The same bundle, opened anew, with another plan of its program and other `meta`; all other files stay as they are.

    It takes the bundle's place when it is whole; or that of `path`. The two share one file of weights if the file system can.

    Raises:
        UserError: the disk is full or fails; the bundle stays as it was.
        BundleError: the plan is not one of the bundle's program, or the bundle was replaced by another one meanwhile.
    """
    check_bundle(bundle.program, plan)
    return _with_file(bundle, "plan.json", _compact(plan.to_json()), meta, path or bundle.path)


def replace_binaries(bundle: Bundle, binaries: bytes) -> Bundle:
    """The same bundle, opened anew, carrying the compiled kernels `binaries` (`program_cache.packed_entries`).

    Raises:
        UserError: the disk is full or fails; the bundle stays as it was.
        BundleError: the bundle was replaced by another one meanwhile.
    """
    return bundle if bundle.binaries == binaries else _with_file(bundle, BINARIES, binaries, bundle.meta, bundle.path)


def _with_file(bundle: Bundle, name: str, content: bytes, meta: Mapping[str, Any], path: Path) -> Bundle:
    """The bundle at `path`, opened: `bundle` with another content of the file `name`, and other `meta`."""
    manifest = _read_manifest(bundle.path)
    if bundle.path / manifest["generation"] != bundle.files:
        raise BundleError(f"bundle {bundle.path} was replaced since it was opened; open it again")
    with _disk_errors(path):
        draft = Draft(path)
        try:
            kept = (*TEXT_FILES, DIGESTS, *([BINARIES] if bundle.binaries else []))
            for other in (*kept, WEIGHTS):
                if other != name:
                    _link_or_copy(bundle.files / other, draft.folder / other)
            draft.write(name, content)
            files = {**{other: manifest["files"][other] for other in kept}, name: _fingerprint(content)}
            draft.publish(_manifest_text({**manifest, "generation": draft.generation, "files": files, "meta": dict(meta)}))
        finally:
            draft.discard()
    return Bundle.open(path)


def _link_or_copy(source: Path, target: Path) -> None:
    """Two names for one file where the file system has such a thing, else a copy."""
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, target)


def _compact(data: dict[str, Any]) -> bytes:
    return json.dumps(data, separators=(",", ":")).encode()


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"the disk is full, so {path} was not written; free some space or name another output") from error
        raise UserError(f"{path} cannot be written ({error.strerror}); name another output") from error
