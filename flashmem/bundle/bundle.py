"""The bundle: everything a device needs to run a model, and nothing it does not. Where the offline and online halves meet.

A bundle is a folder, NAME.flashmem, with a manifest and the folder that it names (flashmem.bundle.version_directories says
why):

    manifest.json        format version, sizes and hashes of the other files, device, origin; a digest of itself
    3f2a90c1d5e7b846/
        program.json     what the device executes (flashmem.program)
        plan.json        when weights are loaded (flashmem.schedule.plan)
        kernels.cl       OpenCL C of the program: one part for each kernel (flashmem.program.kernel_text.kernel_texts)
        kernels_lane.cl  the same kernels, each with a stream lane
        digests.bin      a digest of every part of weights.bin that is read on its own (flashmem.bundle.checksums)
        weights.bin      weights, packed as the kernels read them, and constants
        binaries.bin     compiled kernels for one device, if it was asked to carry them: entries of the program cache
                         (flashmem.runtime.kernels.cache)

A model compiled for several shapes has the first five once more for each further *shape variant* (program.1.json ...), and one
weights.bin: a weight that two variants read is there once. Their constants begin at the same place; each has as many of these
bytes as it needs.

It is written beside its destination and put in place by one rename (flashmem.bundle.writer). Opening it checks everything but
the content of weights.bin: a session checks the constants, and the weights as they come in where it is asked to;
`verify_weights` reads all of it. Compiled kernels that are not what was written, or for another device or driver, are not used:
kernels are compiled then.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flashmem.base.errors import BundleError, MissingFileError
from flashmem.base.files import open_regular
from flashmem.base.json import parsed
from flashmem.bundle import checksums as digests
from flashmem.bundle.checksums import Digests, Piece, digest
from flashmem.bundle.kernel_bounds import check_reach
from flashmem.bundle.kernel_source import check_options, check_source
from flashmem.bundle.lane_bounds import check_lanes
from flashmem.bundle.manifest import WEIGHTS, check_weights_size, read_binaries, read_checked, read_manifest, variant_files
from flashmem.bundle.validation import check_bundle, check_types, check_variants
from flashmem.bundle.version_directories import MANIFEST, named_generation
from flashmem.program.kernel_text import Source
from flashmem.program.program import Program
from flashmem.schedule.plan import OverlapPlan
from flashmem.target.descriptor import DeviceDescriptor

READ_BYTES = 8 << 20
"""Bytes of weights that are read or written at a time."""

OWN = ("shapes", "layers", "learned")
"""What `meta` says of one shape variant alone."""


@dataclass(frozen=True)
class ShapeVariant:
    """What runs for one set of input shapes; `own` is what `meta` says of it alone."""

    program: Program
    plan: OverlapPlan
    source: Source
    own: Mapping[str, Any]
    digests: Digests = field(default_factory=lambda: Digests(0, {}, (), {}))  # once it is read


@dataclass(frozen=True)
class Bundle:
    """A bundle that has been checked. It stands for one of its shape variants, the first when it is opened: `program`, `plan`,
    `source` and `digests` are that one's, and so is what `meta` says.

    `files` is the folder that its manifest named when it was opened. `common` is what the compiler said of the origin of all
    variants (model, budget_bytes, ...).
    """

    path: Path
    files: Path
    descriptor: DeviceDescriptor
    common: Mapping[str, Any]
    variants: tuple[ShapeVariant, ...]
    weights_sha256: str
    binaries: bytes | None = field(default=b"", repr=False)  # compiled kernels; None if they are damaged
    index: int = 0

    @property
    def program(self) -> Program:
        """What the device executes."""
        return self.variants[self.index].program

    @property
    def plan(self) -> OverlapPlan:
        """When weights are loaded."""
        return self.variants[self.index].plan

    @property
    def source(self) -> Source:
        """The kernels."""
        return self.variants[self.index].source

    @property
    def digests(self) -> Digests:
        """Of what the program reads from the weight file."""
        return self.variants[self.index].digests

    @property
    def meta(self) -> Mapping[str, Any]:
        """What the compiler said of its origin."""
        return {**self.common, **self.variants[self.index].own}

    @property
    def weights_path(self) -> Path:
        """The weight file."""
        return self.files / WEIGHTS

    @property
    def budget_bytes(self) -> int | None:
        """The budget it was compiled for, in bytes."""
        budget = self.common.get("budget_bytes")
        return budget if type(budget) is int and budget > 0 else None

    def variant(self, index: int) -> Bundle:
        """The same bundle, standing for shape variant `index`."""
        return self if index == self.index else replace(self, index=index)

    def with_plan(self, plan: OverlapPlan, meta: Mapping[str, Any]) -> Bundle:
        """The same bundle with another plan of the variant that it stands for; its files stay as they are."""
        changed = replace(self.variants[self.index], plan=plan, own=own_part(meta))
        variants = (*self.variants[: self.index], changed, *self.variants[self.index + 1 :])
        return replace(self, variants=variants, common=common_part(meta))

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
            manifest = read_manifest(path)
            try:
                return cls._open(path, manifest)
            except BundleError:
                if named_generation(path) in (None, manifest["generation"]):
                    raise
                # It was replaced while it was read, and the files of the old one are gone.

    @classmethod
    def _open(cls, path: Path, manifest: Mapping[str, Any]) -> Bundle:
        try:
            descriptor = DeviceDescriptor.from_dict(manifest["device"], where=f"{path}/{MANIFEST}")
        except _UNREADABLE as error:
            raise _damaged(path, error) from error
        check_types(descriptor, f"the device in {MANIFEST}")
        check_weights_size(path, manifest)
        variants = tuple(_read_variant(path, manifest, index, own) for index, own in enumerate(manifest["variants"]))
        check_variants([variant.program for variant in variants])
        return cls(
            path,
            path / manifest["generation"],
            descriptor,
            manifest["meta"],
            variants,
            manifest["weights"]["sha256"],
            read_binaries(path, manifest),
        )

    def verify_weights(self) -> None:
        """Read all of weights.bin and compare its hash.

        Raises:
            BundleError: it is not what was written; the first part that is damaged is named.
        """
        whole = hashlib.sha256()
        try:
            with os.fdopen(open_regular(self.weights_path, links=False), "rb", buffering=0) as file:
                while block := file.read(READ_BYTES):
                    whole.update(block)
                if whole.hexdigest() == self.weights_sha256:
                    return
                parts = (
                    (part, stored)
                    for variant in self.variants
                    for part, stored in zip(digests.pieces(variant.program), variant.digests.all(), strict=True)
                )
                wrong = (part.name for part, stored in parts if digest_of_file(file.fileno(), part) != stored)
                what = next(wrong, "what lies between its slices")
        except OSError as error:
            raise BundleError(f"{self.weights_path} cannot be read ({error.strerror}); compile the model again") from error
        raise BundleError(f"{self.weights_path} is damaged: {what} is not what was written; compile the model again")


def own_part(meta: Mapping[str, Any]) -> dict[str, Any]:
    """What of `meta` is said of one shape variant."""
    return {key: meta[key] for key in OWN if key in meta}


def common_part(meta: Mapping[str, Any]) -> dict[str, Any]:
    """What of `meta` is said of all of them."""
    return {key: value for key, value in meta.items() if key not in OWN}


def _read_variant(path: Path, manifest: Mapping[str, Any], index: int, own: Mapping[str, Any]) -> ShapeVariant:
    """Shape variant `index`, checked by itself."""
    *texts, stored = (read_checked(path, name, manifest) for name in variant_files(index))
    try:
        plain, lane = (text.decode() for text in texts[2:])
        program, plan = Program.from_json(parsed(texts[0].decode())), OverlapPlan.from_json(parsed(texts[1].decode()))
    except _UNREADABLE as error:
        raise _damaged(path, error) from error
    del texts
    check_bundle(program, plan)
    check_options(program.build_options)
    for text in (plain, lane):
        check_source(text)
    check_reach(program, plain)
    check_lanes(program, lane)
    if program.weights_bytes != manifest["weights"]["nbytes"]:
        raise BundleError(f"bundle {path} is damaged: its program is for another {WEIGHTS}; compile the model again")
    source = Source(plain, lane, tuple(sorted({launch.kernel for launch in program.launches})))
    return ShapeVariant(program, plan, source, own, digests.read(stored, program))


_UNREADABLE = (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""What JSON that is not ours raises as it is read."""


def _damaged(path: Path, error: Exception) -> BundleError:
    return BundleError(f"bundle {path} is damaged ({type(error).__name__}: {error}); compile the model again")


def digest_of_file(descriptor: int, part: Piece) -> int:
    """The digest of a part of an open file, as far as the file goes."""
    value = digest(b"")
    for block in blocks_of_file(descriptor, part):
        value = digest(block, value)
    return value


def blocks_of_file(descriptor: int, part: Piece) -> Iterator[bytes]:
    """The bytes of a part of an open file, as far as the file goes."""
    end = part.offset + part.nbytes
    return (os.pread(descriptor, min(READ_BYTES, end - offset), offset) for offset in range(part.offset, end, READ_BYTES))
