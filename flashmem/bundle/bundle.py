"""The bundle: a compiled model on disk, with everything that a device needs to run it. The offline half writes it.

A bundle is a folder, NAME.flashmem. It holds a manifest and the version directory that the manifest names
(flashmem.bundle.version_directories explains why):

    manifest.json        format version, sizes and hashes of the other files, device, origin; a hash of itself
    3f2a90c1d5e7b846/
        program.json     the device program: tensors, slices, launches (flashmem.program)
        plan.json        when weights are loaded (flashmem.schedule.plan)
        kernels.cl       OpenCL C of the program: one part for each kernel (flashmem.program.kernel_text.kernel_texts)
        kernels_lane.cl  the same kernels, each with a stream lane
        checksums.bin    a checksum of every range of weights.bin that is read on its own (flashmem.bundle.checksums)
        weights.bin      weights, packed as the kernels read them, and constants
        binaries.bin     optional: compiled kernels for one device, as entries of the program cache
                         (flashmem.runtime.kernels.cache)
        language.json    of a language model: its tokenizer and chat template (flashmem.bundle.language)

A bundle for CPUs has program, kernels.cl and kernels_lane.cl again for instruction sets with another tile (program.avx2.json
...), over the same weights and plan. `Bundle.for_instruction_set` reads them.

A model compiled for several shapes has the first five files again for each further *shape variant* (program.1.json ...). All
variants share one weights.bin: a weight that two of them read is stored once. Their constants begin at the same offset; each
variant reads as many bytes from there as it needs.

The writer creates a bundle next to its destination and moves it into place by one rename (flashmem.bundle.writer). Opening a
bundle checks everything but the content of weights.bin. A session checks the constants, and on request each weight when it is
read. `verify_weights` reads the whole file. Compiled kernels that are damaged, or made for another device or driver, are
ignored; the kernels are compiled again.
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
from flashmem.base.json import parse_json
from flashmem.base.units import budget_text, format_size
from flashmem.bundle.checksums import ChecksummedRange, Checksums, checksum, checksummed_ranges, unpack_checksums
from flashmem.bundle.field_types import check_types
from flashmem.bundle.kernel_bounds import check_bounds
from flashmem.bundle.kernel_source import check_options, check_source
from flashmem.bundle.lane_bounds import check_lanes
from flashmem.bundle.language import Language
from flashmem.bundle.manifest import (
    LANGUAGE,
    WEIGHTS,
    check_weights_size,
    instruction_set_files,
    read_binaries,
    read_checked,
    read_manifest,
    read_same_manifest,
    variant_files,
)
from flashmem.bundle.validation import check_bundle, check_elsewhere, check_variants
from flashmem.bundle.version_directories import MANIFEST, current_version
from flashmem.program.kernel_text import Source
from flashmem.program.program import Program
from flashmem.schedule.plan import OverlapPlan
from flashmem.target.descriptor import DeviceDescriptor, without_compiler_part
from flashmem.target.instruction_set import other_tiles, same_tile

READ_BYTES = 8 << 20
"""Bytes of weights that one system call reads or writes."""

OWN = ("shapes", "layers", "learned")
"""The keys of `meta` that belong to one shape variant. All others belong to the bundle."""


@dataclass(frozen=True)
class ProgramCode:
    """A program and its kernels."""

    program: Program
    source: Source


@dataclass(frozen=True)
class ShapeVariant:
    """A program, its plan and its kernels for one set of input shapes. `own` is the metadata of this variant alone.

    `elsewhere`: the code for CPUs with another tile, by instruction set, when a bundle is written.
    """

    program: Program
    plan: OverlapPlan
    source: Source
    own: Mapping[str, Any]
    elsewhere: Mapping[str, ProgramCode] = field(default_factory=dict)
    checksums: Checksums = field(default_factory=lambda: Checksums(0, {}, (), {}))  # empty before the bundle is written


@dataclass(frozen=True, repr=False)
class Bundle:
    """An opened and checked bundle, with one of its shape variants selected, at first variant 0.

    `program`, `plan`, `source`, `checksums` and `meta` are those of the selected variant. `files` is the version directory that
    the manifest named when the bundle was opened. `common` is the metadata of all variants (model, budget_bytes, ...).
    """

    path: Path
    files: Path
    descriptor: DeviceDescriptor
    common: Mapping[str, Any]
    variants: tuple[ShapeVariant, ...]
    weights_sha256: str
    binaries: bytes | None = b""  # compiled kernels; None if they are damaged
    index: int = 0

    def __repr__(self) -> str:
        weights = format_size(self.program.weights_bytes)
        budget = budget_text(self.budget_bytes)
        return f"<Bundle {self.path} of {self.model} for {self.descriptor.name}: {weights} of weights, {budget}>"

    @property
    def program(self) -> Program:
        """The device program of the selected variant."""
        return self.variants[self.index].program

    @property
    def plan(self) -> OverlapPlan:
        """The overlap plan of the selected variant: when each weight is loaded."""
        return self.variants[self.index].plan

    @property
    def source(self) -> Source:
        """The OpenCL C text of the kernels."""
        return self.variants[self.index].source

    @property
    def checksums(self) -> Checksums:
        """The checksums of the weights that the program reads."""
        return self.variants[self.index].checksums

    @property
    def meta(self) -> Mapping[str, Any]:
        """Metadata from the compiler: the model, the budget, the shapes and so on."""
        return {**self.common, **self.variants[self.index].own}

    @property
    def weights_path(self) -> Path:
        """The path of the weight file."""
        return self.files / WEIGHTS

    @property
    def model(self) -> str:
        """The model's name; the name of the bundle if it does not record one."""
        return str(self.common.get("model") or self.path.name)

    @property
    def budget_bytes(self) -> int | None:
        """The budget that the bundle was compiled for, in bytes; None if it has none."""
        budget = self.common.get("budget_bytes")
        return budget if type(budget) is int and budget > 0 else None

    def language(self) -> Language | None:
        """The tokenizer and the chat template of a language model; None for other models.

        Raises:
            BundleError: they are damaged, or the bundle was replaced since it was opened.
        """
        manifest = read_same_manifest(self.path, self.files)
        if LANGUAGE not in manifest["files"]:
            return None
        return Language.from_json(read_checked(self.path, LANGUAGE, manifest))

    def variant(self, index: int) -> Bundle:
        """The same bundle with shape variant `index` selected."""
        return self if index == self.index else replace(self, index=index)

    def for_instruction_set(self, name: str) -> Bundle:
        """The bundle with the launches and kernels for a CPU with instruction set `name`, over the same weights and plans.

        It is the same if it was compiled for that tile, or has no other. Then `descriptor.instruction_set` stays.

        Raises:
            BundleError: the files for it are damaged, or the bundle was replaced since it was opened.
        """
        own = self.descriptor.instruction_set
        if not name or not own or same_tile(name, own):
            return self
        manifest = read_same_manifest(self.path, self.files)
        stored = next((each for each in other_tiles(own) if same_tile(each, name)), None)
        names = [] if stored is None else [instruction_set_files(index, stored)[0] for index in range(len(self.variants))]
        if stored is None or not any(each in manifest["files"] for each in names):
            return self
        variants = tuple(
            _read_elsewhere(self.path, manifest, index, stored, variant) for index, variant in enumerate(self.variants)
        )
        return replace(self, variants=variants, descriptor=self.descriptor.for_instruction_set(stored))

    def with_plan(self, plan: OverlapPlan, meta: Mapping[str, Any]) -> Bundle:
        """A copy in memory with another plan for the selected variant. The files do not change."""
        changed = replace(self.variants[self.index], plan=plan, own=own_part(meta))
        variants = (*self.variants[: self.index], changed, *self.variants[self.index + 1 :])
        return replace(self, variants=variants, common=common_part(meta))

    @classmethod
    def open(cls, path: str | Path) -> Bundle:
        """Open and check the bundle in the folder `path`.

        Raises:
            MissingFileError: no such folder.
            BundleError: the folder is not a bundle, has another format version, is truncated or was tampered with.
        """
        path = Path(path)
        if not path.exists():
            raise MissingFileError(f"bundle {path} does not exist; make it with: flashmem compile model.onnx -o {path.name}")
        while True:
            manifest = read_manifest(path)
            try:
                return cls._open(path, manifest)
            except BundleError:
                if current_version(path) in (None, manifest["version_directory"]):
                    raise
                # Another process replaced the bundle during the read and removed the old files: read the new one.

    @staticmethod
    def device_name(path: str | Path) -> str | None:
        """The name of the device that a bundle was compiled for, before the bundle is checked; None if it cannot be read."""
        try:
            name = read_manifest(Path(path))["device"]["name"]
        except (BundleError, KeyError, TypeError):  # `open` says what is wrong
            return None
        return name if isinstance(name, str) else None

    @classmethod
    def _open(cls, path: Path, manifest: Mapping[str, Any]) -> Bundle:
        try:
            descriptor = DeviceDescriptor.from_dict(without_compiler_part(manifest["device"]), where=f"{path}/{MANIFEST}")
        except _UNREADABLE as error:
            raise _damage_error(path, error) from error
        check_types(descriptor, f"the device in {MANIFEST}")
        check_weights_size(path, manifest)
        variants = tuple(_read_variant(path, manifest, index, own) for index, own in enumerate(manifest["variants"]))
        check_variants([variant.program for variant in variants])
        return cls(
            path,
            path / manifest["version_directory"],
            descriptor,
            manifest["meta"],
            variants,
            manifest["weights"]["sha256"],
            read_binaries(path, manifest),
        )

    def verify_weights(self) -> None:
        """Read all of weights.bin and compare its SHA-256.

        Raises:
            BundleError: the file is damaged; the message names the first damaged range.
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
                    for part, stored in zip(checksummed_ranges(variant.program), variant.checksums.all(), strict=True)
                )
                wrong = (part.name for part, stored in parts if checksum_of_file(file.fileno(), part) != stored)
                what = next(wrong, "the bytes between its slices")
        except OSError as error:
            raise BundleError(f"{self.weights_path} cannot be read ({error.strerror}); compile the model again") from error
        raise BundleError(f"{self.weights_path} is damaged: {what} is not what was written; compile the model again")


def _read_elsewhere(path: Path, manifest: Mapping[str, Any], index: int, name: str, variant: ShapeVariant) -> ShapeVariant:
    """`variant` with the code for the tile of instruction set `name`, checked. It has its own code if it needs no other."""
    files = instruction_set_files(index, name)
    if files[0] not in manifest["files"]:
        return variant
    text, plain, lane = (read_checked(path, each, manifest).decode() for each in files)
    try:
        program = Program.from_json(parse_json(text))
    except _UNREADABLE as error:
        raise _damage_error(path, error) from error
    check_code(program, plain, lane)
    check_bundle(program, variant.plan)
    check_elsewhere(variant.program, program)
    return replace(variant, program=program, source=_source(program, plain, lane))


def check_code(program: Program, plain: str, lane: str) -> None:
    """Raise BundleError unless a program's kernels are harmless, and access only its memory."""
    check_options(program.build_options)
    for text in (plain, lane):
        check_source(text)
    check_bounds(program, plain)
    check_lanes(program, lane)


def _source(program: Program, plain: str, lane: str) -> Source:
    return Source(plain, lane, tuple(sorted({launch.kernel for launch in program.launches})))


def own_part(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of `meta` about one shape variant."""
    return {key: meta[key] for key in OWN if key in meta}


def common_part(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of `meta` about all shape variants."""
    return {key: value for key, value in meta.items() if key not in OWN}


def _read_variant(path: Path, manifest: Mapping[str, Any], index: int, own: Mapping[str, Any]) -> ShapeVariant:
    """Read shape variant `index` and check it."""
    *texts, stored = (read_checked(path, name, manifest) for name in variant_files(index))
    try:
        plain, lane = (text.decode() for text in texts[2:])
        program = Program.from_json(parse_json(texts[0].decode()))
        plan = OverlapPlan.from_json(parse_json(texts[1].decode()))
    except _UNREADABLE as error:
        raise _damage_error(path, error) from error
    del texts
    check_bundle(program, plan)
    check_code(program, plain, lane)
    if program.weights_bytes != manifest["weights"]["nbytes"]:
        raise BundleError(f"bundle {path} is damaged: its program is for another {WEIGHTS}; compile the model again")
    return ShapeVariant(program, plan, _source(program, plain, lane), own, checksums=unpack_checksums(stored, program))


_UNREADABLE = (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""Exceptions that building a program or a plan from foreign JSON can raise."""


def _damage_error(path: Path, error: Exception) -> BundleError:
    return BundleError(f"bundle {path} is damaged ({type(error).__name__}: {error}); compile the model again")


def checksum_of_file(descriptor: int, part: ChecksummedRange) -> int:
    """The checksum of a range of an open file, up to the end of the file."""
    value = checksum(b"")
    for block in blocks_of_file(descriptor, part):
        value = checksum(block, value)
    return value


def blocks_of_file(descriptor: int, part: ChecksummedRange) -> Iterator[bytes]:
    """The bytes of a range of an open file, up to the end of the file, in blocks of `READ_BYTES`."""
    end = part.offset + part.nbytes
    return (os.pread(descriptor, min(READ_BYTES, end - offset), offset) for offset in range(part.offset, end, READ_BYTES))
