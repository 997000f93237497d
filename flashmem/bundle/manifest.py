"""The manifest of a bundle and the names of its files, read with checks. `bundle.bundle` describes the format."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flashmem.base.errors import BundleError, UserError
from flashmem.base.files import open_regular, read_regular
from flashmem.bundle.version_directories import MANIFEST, MANIFEST_BYTES, is_version_name
from flashmem.target.instruction_set import INSTRUCTION_SETS

FORMAT_VERSION = 23
WEIGHTS = "weights.bin"
BINARIES = "binaries.bin"
LANGUAGE = "language.json"
_SMALL_BYTES = 1 << 30
"""The largest size of a file other than weights.bin, since it is read into memory as a whole."""
_VARIANT_FILES = ("program.json", "plan.json", "kernels.cl", "kernels_lane.cl", "checksums.bin")


def variant_files(index: int) -> tuple[str, ...]:
    """File names of shape variant `index`: program, plan, kernels, kernels with stream lanes, checksums."""
    if not index:
        return _VARIANT_FILES
    return tuple(f"{name}.{index}.{ending}" for name, _, ending in (each.partition(".") for each in _VARIANT_FILES))


def instruction_set_files(index: int, name: str) -> tuple[str, ...]:
    """File names of shape variant `index` for CPUs with the tile of instruction set `name`: program, kernels, kernels with
    stream lanes.
    """
    program, _, plain, lane, _ = variant_files(index)
    return tuple(f"{stem}.{name}.{ending}" for stem, _, ending in (each.rpartition(".") for each in (program, plain, lane)))


def read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest of the bundle at `path` and check the types of its fields. Raises BundleError."""
    if path.suffix == ".onnx" and path.is_file():
        raise BundleError(f"{path} is an ONNX file, not a bundle; make one of it with flashmem compile")
    try:
        manifest = json.loads(read_regular(path / MANIFEST, MANIFEST_BYTES, links=False).decode())
    except OSError as error:
        raise BundleError(
            f"{path} is not a bundle: {MANIFEST} cannot be read ({error.strerror}); compile the model again"
        ) from error
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path} is not a bundle: it has no readable {MANIFEST}; compile the model again") from error
    version = manifest.get("format_version") if isinstance(manifest, dict) else None
    if type(version) is not int or version != FORMAT_VERSION:
        raise BundleError(
            f"bundle {path} has format version {version!r}, this flashmem reads {FORMAT_VERSION}; compile the model again"
        )
    if manifest.get("checksum") != _manifest_checksum(manifest):
        raise BundleError(f"bundle {path} is damaged: {MANIFEST} is not what was written; compile the model again")
    shape = {"version_directory": str, "device": dict, "files": dict, "weights": dict, "meta": dict, "variants": list}
    for key, kind in shape.items():
        if not isinstance(manifest.get(key), kind):
            raise BundleError(f"bundle {path} is damaged: its manifest lacks {key!r}; compile the model again")
    weights = manifest["weights"]
    if type(weights.get("nbytes")) is not int or weights["nbytes"] < 0 or not isinstance(weights.get("sha256"), str):
        raise BundleError(f"bundle {path} is damaged: its manifest does not describe {WEIGHTS}; compile the model again")
    if not manifest["variants"] or not all(isinstance(own, dict) for own in manifest["variants"]):
        raise BundleError(f"bundle {path} is damaged: its manifest does not describe its programs; compile the model again")
    if (unknown := _unknown_file(manifest)) is not None:
        raise BundleError(
            f"bundle {path} is damaged: its manifest names the file {unknown[:60]!r}, which no bundle has; "
            "compile the model again"
        )
    if not is_version_name(manifest["version_directory"]):
        raise BundleError(f"bundle {path} is damaged: its manifest names no folder; compile the model again")
    checked: dict[str, Any] = manifest
    return checked


def read_same_manifest(path: Path, files: Path) -> dict[str, Any]:
    """Read the manifest of an open bundle again, whose version directory is `files`.

    Raises:
        BundleError: it is damaged, or the bundle was replaced since it was opened.
    """
    manifest = read_manifest(path)
    if path / manifest["version_directory"] != files:
        raise BundleError(f"bundle {path} was replaced since it was opened; open it again")
    return manifest


def _unknown_file(manifest: Mapping[str, Any]) -> str | None:
    """A name among the files of a manifest that is not of the format, if there is one: files are copied under these names."""
    files = manifest["files"]
    count = len(manifest["variants"])
    known = {LANGUAGE, BINARIES}
    for index in range(min(count, len(files))):  # a variant without files is refused when it is read
        known.update(variant_files(index))
        for name in INSTRUCTION_SETS:
            known.update(instruction_set_files(index, name))
    return next((name for name in files if name not in known), None)


def _manifest_checksum(manifest: Mapping[str, Any]) -> str:
    """The SHA-256 of a manifest without its `checksum` entry, independent of the layout of the JSON text."""
    rest = {key: value for key, value in manifest.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def manifest_text(manifest: Mapping[str, Any]) -> bytes:
    """The content of manifest.json."""
    plain = json.loads(json.dumps(manifest))  # tuples become lists, as in the manifest that is read back
    return json.dumps({**plain, "checksum": _manifest_checksum(plain)}, indent=2).encode()


def read_checked(path: Path, name: str, manifest: Mapping[str, Any]) -> bytes:
    """Read a file other than weights.bin and compare its size and hash with the manifest. Raises BundleError."""
    try:
        content = read_regular(path / manifest["version_directory"] / name, _SMALL_BYTES, links=False)
    except OSError as error:
        raise BundleError(f"bundle {path} has no readable {name} ({error.strerror}); compile the model again") from error
    if manifest["files"].get(name) != fingerprint(content):
        raise BundleError(f"bundle {path} is damaged: {name} is not what was written; compile the model again")
    return content


def read_binaries(path: Path, manifest: Mapping[str, Any]) -> bytes | None:
    """The compiled kernels in the bundle; empty if it has none, None if they are damaged."""
    if BINARIES not in manifest["files"]:
        return b""
    try:
        return read_checked(path, BINARIES, manifest)
    except BundleError:
        return None


def check_weights_size(path: Path, manifest: Mapping[str, Any]) -> None:
    """Raise BundleError unless weights.bin exists in the version directory with the size in the manifest."""
    files = path / manifest["version_directory"]
    if files.is_symlink():
        raise BundleError(f"bundle {path} is damaged: its folder {files.name} is a link; compile the model again")
    try:
        descriptor = open_regular(files / WEIGHTS, links=False)
    except OSError as error:
        raise BundleError(f"bundle {path} has no readable {WEIGHTS} ({error.strerror}); compile the model again") from error
    size = os.fstat(descriptor).st_size
    os.close(descriptor)
    expected = manifest["weights"]["nbytes"]
    if size != expected:
        raise BundleError(f"bundle {path} is damaged: {WEIGHTS} has {size} bytes, not {expected}; compile the model again")


def fingerprint(content: bytes) -> dict[str, Any]:
    """The manifest's entry for a file: its size and SHA-256."""
    return {"nbytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn OSErrors of the body into UserErrors about `path`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"the disk is full, so {path} was not written; free some space or name another output") from error
        raise UserError(f"{path} cannot be written ({error.strerror}); name another output") from error


def compact(data: Mapping[str, Any]) -> bytes:
    """JSON text without spaces."""
    return json.dumps(data, separators=(",", ":")).encode()
