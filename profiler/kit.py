"""A kit: all data to measure a device without the compiler, in one file made elsewhere for a descriptor.

It is a zip file. `kit.json` describes the kit and maps launches to members. A launch is its program and its kernels as JSON,
and its constants; bundles to open are in separate folders. Reading needs numpy only.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from flashmem.base.errors import MissingFileError, UserError
from flashmem.base.files import written_whole
from flashmem.base.types import MemoryPath, TransferMode
from flashmem.bundle.manifest import FORMAT_VERSION
from flashmem.program.kernel_text import Source
from flashmem.program.program import Program
from flashmem.target.descriptor import DeviceDescriptor

from .target import Openings, Supply, Target

SUFFIX = ".kit"
_ABOUT = "kit.json"
_OPENINGS = "openings"


class Kit:
    """A kit opened for reading."""

    def __init__(self, path: Path) -> None:
        """Open the file.

        Raises:
            MissingFileError: the file is missing.
            UserError: not a kit of this version.
        """
        if not path.is_file():
            raise MissingFileError(f"{path}: no such kit; flashmem profile --kit makes one, where the compiler is")
        self.path = path
        try:
            self._file = zipfile.ZipFile(path)
            self.about: dict[str, Any] = json.loads(self._file.read(_ABOUT))
            version = self.about["version"]
            self.descriptor = DeviceDescriptor.from_dict(self.about["descriptor"], where=str(path))
        except (OSError, zipfile.BadZipFile, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path} is not a kit ({error}); make one with flashmem profile --kit, where the compiler is"
            ) from error
        if version != FORMAT_VERSION:
            raise UserError(f"{path} is of format version {version}, this flashmem reads {FORMAT_VERSION}; make the kit again")

    @property
    def seed(self) -> int:
        """The seed of the sampled launches."""
        return int(self.about["seed"])

    def supply(self, path: MemoryPath) -> Supply:
        """The launches of one memory path.

        Raises:
            UserError: the kit has none.
        """
        if path not in self.about["paths"]:
            raise UserError(f"{self.path} has no launches of the {path} path, which this device has; make it for this device")
        return _Packed(self, self.about["paths"][path])

    def models(self) -> list[list[Target]]:
        """The launches of each model in the kit."""
        return [[self.target(member) for member in members] for members in self.about["models"]]

    def target(self, member: str) -> Target:
        """Read a launch by its member name.

        Raises:
            UserError: the kit is damaged.
        """
        try:
            held = json.loads(self._file.read(f"{member}.json"))
            constants = np.frombuffer(self._file.read(f"{member}.constants"), np.uint8)
            program = Program.from_json(held["program"])
            source = Source(held["plain"], held["lane"], tuple(held["kernels"]))
            return Target(
                held["origin"], held["case"], held["operator"], program.launches[held["launch"]], program, source, constants
            )
        except (KeyError, TypeError, ValueError, IndexError, zipfile.BadZipFile) as error:
            raise UserError(f"{self.path} is damaged ({member}: {error}); copy it again, or make it again") from error

    def openings(self, folder: Path) -> Openings:
        """Unpack the bundles to open into `folder`."""
        names = [name for name in self._file.namelist() if name.startswith(f"{_OPENINGS}/")]
        for name in names:
            parts = PurePosixPath(name).parts
            if ".." in parts or name.endswith("/"):
                continue
            target = folder.joinpath(*parts[1:])
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(self._file.read(name))
        held = self.about["openings"]
        return Openings({key: folder / name for key, name in held["bundles"].items()}, held["kernels"], held["layers"])


@dataclass(frozen=True)
class _Packed:
    """The launches of one path, by kind (`held`: member names under "matmul", "elementwise" and "sampled")."""

    kit: Kit
    held: Mapping[str, Any]

    @property
    def count(self) -> int | None:
        """Number of sampled launches."""
        return len(self.held["sampled"])

    def matmul(self, rows: int, depth: int, columns: int) -> Target:
        """A plain product."""
        return self.kit.target(self._member("matmul", f"{rows}x{depth}x{columns}"))

    def elementwise(self, size: int) -> Target:
        """A sum of two activations."""
        return self.kit.target(self._member("elementwise", str(size)))

    def sampled(self, index: int, seed: int) -> Target | None:
        """A sampled launch; the kit's own seed applies."""
        member = self.held["sampled"][index]
        return None if member is None else self.kit.target(member)

    def openings(self, folder: Path, mode: TransferMode) -> Openings:
        """The bundles to open; they serve every mode."""
        return self.kit.openings(folder)

    def _member(self, kind: str, key: str) -> str:
        if key not in self.held[kind]:
            raise UserError(f"{self.kit.path} has no {kind} of {key}: it is of another version of flashmem; make the kit again")
        member: str = self.held[kind][key]
        return member


class KitWriter:
    """Writes a kit: launches one by one, then `finish`."""

    def __init__(self) -> None:
        self._content = io.BytesIO()
        self._file = zipfile.ZipFile(self._content, "w", zipfile.ZIP_DEFLATED)
        self._count = 0

    def add(self, target: Target) -> str:
        """Add a launch; returns its member name."""
        member = f"launches/{self._count}"
        self._count += 1
        held = {
            "origin": target.origin,
            "case": target.case,
            "operator": target.operator,
            "launch": target.program.launches.index(target.launch),
            "program": target.program.to_json(),
            "plain": target.source.plain,
            "lane": target.source.lane,
            "kernels": target.source.kernels,
        }
        self._write(f"{member}.json", json.dumps(held, separators=(",", ":")).encode())
        self._write(f"{member}.constants", target.constants.tobytes())
        return member

    def add_folder(self, folder: Path, names: Iterable[str]) -> None:
        """Add the bundles `names` of `folder`."""
        for name in names:
            for file in sorted((folder / name).rglob("*")):
                if file.is_file():
                    self._write(f"{_OPENINGS}/{file.relative_to(folder).as_posix()}", file.read_bytes())

    def finish(self, path: Path, about: Mapping[str, Any]) -> None:
        """Write the file atomically."""
        self._write(_ABOUT, json.dumps({"version": FORMAT_VERSION, **about}, indent=1).encode())
        self._file.close()
        with written_whole(path) as file:
            file.write(self._content.getvalue())

    def _write(self, name: str, content: bytes) -> None:
        self._file.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), content, zipfile.ZIP_DEFLATED)


def as_data(openings: Openings, folder: Path) -> dict[str, Any]:
    """`openings` as data for `kit.json`."""
    held = asdict(openings)
    held["bundles"] = {key: path.relative_to(folder).as_posix() for key, path in openings.bundles.items()}
    return held
