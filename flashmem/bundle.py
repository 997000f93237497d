"""The bundle: everything a device needs to run a model, and nothing it does not. Where the offline and online halves meet.

A bundle is a folder, NAME.flashmem:

    manifest.json    format version, sizes and hashes of the other files, device, origin
    program.json     what the device executes (flashmem.program)
    plan.json        when weights are loaded (flashmem.planning.plan)
    kernels.cl       OpenCL C of the program
    kernels_lane.cl  the same kernels, each with a stream lane
    weights.bin      weights, packed as the kernels read them, and constants

It is written beside its destination and renamed when whole. Opening it checks everything but the content of weights.bin, whose
hash takes as long as reading it: `verify_weights` does that.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from flashmem import __version__
from flashmem.bundle_check import check_bundle
from flashmem.device import DeviceDescriptor
from flashmem.errors import BundleError, MissingFileError, UserError
from flashmem.planning.plan import OverlapPlan
from flashmem.program import Program, Source

FORMAT_VERSION = 1
SMALL_FILES = ("program.json", "plan.json", "kernels.cl", "kernels_lane.cl")
WEIGHTS = "weights.bin"
MANIFEST = "manifest.json"
_READ_BYTES = 8 << 20


@dataclass(frozen=True)
class Bundle:
    """A bundle that has been checked. `meta` is what the compiler said of its origin (model, budget_bytes, ...)."""

    path: Path
    program: Program
    plan: OverlapPlan
    source: Source
    descriptor: DeviceDescriptor
    meta: Mapping[str, Any]
    weights_sha256: str

    @property
    def weights_path(self) -> Path:
        """The weight file."""
        return self.path / WEIGHTS

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
        manifest = _read_manifest(path)
        texts = {name: _read_checked(path, name, manifest) for name in SMALL_FILES}
        _check_weights_size(path, manifest)
        try:
            program = Program.from_json(json.loads(texts["program.json"]))
            plan = OverlapPlan.from_json(json.loads(texts["plan.json"]))
            descriptor = DeviceDescriptor.from_dict(manifest["device"], where=f"{path}/{MANIFEST}")
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
            raise BundleError(f"bundle {path} is damaged ({type(error).__name__}: {error}); compile the model again") from error
        check_bundle(program, plan)
        if program.weights_bytes != manifest["weights"]["nbytes"]:
            raise BundleError(f"bundle {path} is damaged: its program is for another {WEIGHTS}; compile the model again")
        source = Source(texts["kernels.cl"], texts["kernels_lane.cl"], tuple(sorted({x.kernel for x in program.launches})))
        return cls(path, program, plan, source, descriptor, manifest["meta"], manifest["weights"]["sha256"])

    def verify_weights(self) -> None:
        """Read all of weights.bin and compare its hash. Raises BundleError if it is not what was written."""
        digest = hashlib.sha256()
        with self.weights_path.open("rb", buffering=0) as file:
            while block := file.read(_READ_BYTES):
                digest.update(block)
        if digest.hexdigest() != self.weights_sha256:
            raise BundleError(f"{self.weights_path} is damaged: its hash differs; compile the model again")


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
    shape = {"device": dict, "files": dict, "weights": dict, "meta": dict}
    for key, kind in shape.items():
        if not isinstance(manifest.get(key), kind):
            raise BundleError(f"bundle {path} is damaged: its manifest lacks {key!r}; compile the model again")
    weights = manifest["weights"]
    if type(weights.get("nbytes")) is not int or weights["nbytes"] < 0 or not isinstance(weights.get("sha256"), str):
        raise BundleError(f"bundle {path} is damaged: its manifest does not describe {WEIGHTS}; compile the model again")
    checked: dict[str, Any] = manifest
    return checked


def _read_checked(path: Path, name: str, manifest: Mapping[str, Any]) -> str:
    """The text of a small file whose size and hash are as the manifest says."""
    try:
        content = (path / name).read_bytes()
    except OSError as error:
        raise BundleError(f"bundle {path} lacks {name} ({error.strerror}); compile the model again") from error
    if manifest["files"].get(name) != _fingerprint(content):
        raise BundleError(f"bundle {path} is damaged: {name} is not what was written; compile the model again")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BundleError(f"bundle {path} is damaged: {name} is not text; compile the model again") from error


def _check_weights_size(path: Path, manifest: Mapping[str, Any]) -> None:
    try:
        size = (path / WEIGHTS).stat().st_size
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
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._folder = Path(tempfile.mkdtemp(prefix=f".{self.path.name}-", dir=self.path.parent))
        self._size = 0
        self._digest = hashlib.sha256()
        with self._cleaned_up():
            self._weights = (self._folder / WEIGHTS).open("wb", buffering=0)

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
            self._write(memoryview(bytes(-self._size % alignment)))
            offset = self._size
            flat = data if isinstance(data, bytes) else np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
            self._write(memoryview(flat))
            return offset

    def _write(self, data: memoryview) -> None:
        while len(data):
            written = self._weights.write(data[:_READ_BYTES])
            self._digest.update(data[:written])
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
            texts = {
                "program.json": json.dumps(program.to_json(), separators=(",", ":")),
                "plan.json": json.dumps(plan.to_json(), separators=(",", ":")),
                "kernels.cl": source.plain,
                "kernels_lane.cl": source.lane,
            }
            contents = {name: text.encode() for name, text in texts.items()}
            manifest = {
                "format_version": FORMAT_VERSION,
                "flashmem_version": __version__,
                "files": {name: _fingerprint(content) for name, content in contents.items()},
                "weights": {"nbytes": self._size, "sha256": self._digest.hexdigest()},
                "device": descriptor.to_dict(),
                "meta": dict(meta),
            }
            contents[MANIFEST] = json.dumps(manifest, indent=2).encode()
            os.fsync(self._weights.fileno())
            self._weights.close()
            for name, content in contents.items():
                _write_file(self._folder / name, content)
            self._folder.chmod(0o755)  # mkdtemp made it private
            _put_in_place(self._folder, self.path)

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
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._discard()


def replace_plan(bundle: Bundle, plan: OverlapPlan, meta: Mapping[str, Any], path: Path | None = None) -> Bundle:
    """The same bundle, opened anew, with another plan of its program and other `meta`; all other files stay as they are.

    A second folder is made in which only plan and manifest are new, and takes the bundle's place when it is whole; or that of
    `path`, where the two then share one file of weights if the file system can.

    Raises:
        UserError: the disk is full or fails; the bundle stays as it was.
        BundleError: the plan is not one of the bundle's program.
    """
    check_bundle(bundle.program, plan)
    manifest = _read_manifest(bundle.path)
    content = json.dumps(plan.to_json(), separators=(",", ":")).encode()
    manifest["files"]["plan.json"] = _fingerprint(content)
    manifest["meta"] = dict(meta)
    new = {"plan.json": content, MANIFEST: json.dumps(manifest, indent=2).encode()}
    path = path or bundle.path
    with _disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
        try:
            for name in (*SMALL_FILES, WEIGHTS):
                if name not in new:
                    _link_or_copy(bundle.path / name, folder / name)
            for name, text in new.items():
                _write_file(folder / name, text)
            folder.chmod(0o755)
            _put_in_place(folder, path)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    return Bundle.open(path)


def _link_or_copy(source: Path, target: Path) -> None:
    """Two names for one file where the file system has such a thing, else a copy."""
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, target)


def _put_in_place(folder: Path, path: Path) -> None:
    """`folder` becomes `path`; what was there stays whole until then."""
    if path.exists():
        aside = Path(tempfile.mkdtemp(prefix=f".{path.name}-old-", dir=path.parent))
        path.replace(aside / "bundle")
        folder.replace(path)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        folder.replace(path)


def _write_file(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"the disk is full, so {path} was not written; free some space or name another output") from error
        raise UserError(f"{path} cannot be written ({error.strerror}); name another output") from error
