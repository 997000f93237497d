"""Replacing the plan or the compiled kernels of a bundle, which the device does; only the compiler writes whole bundles."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashmem.base.errors import BundleError, UserError
from flashmem.base.files import open_regular
from flashmem.bundle.bundle import (
    READ_BYTES,
    Bundle,
    common_part,
    own_part,
)
from flashmem.bundle.manifest import (
    BINARIES,
    WEIGHTS,
    compact,
    disk_errors,
    fingerprint,
    manifest_text,
    read_same_manifest,
    variant_files,
)
from flashmem.bundle.validation import check_bundle
from flashmem.bundle.version_directories import MANIFEST, Draft
from flashmem.schedule.plan import OverlapPlan


def check_replaceable(path: Path) -> None:
    """Raise UserError if there is something at `path` that a bundle must not replace."""
    if path.exists() and not (path / MANIFEST).is_file():
        raise UserError(f"{path} exists and is not a bundle; remove it or name another output")


def replace_plan(bundle: Bundle, plan: OverlapPlan, meta: Mapping[str, Any], path: Path | None = None) -> Bundle:
    """Replace the plan and the metadata of the selected shape variant on disk, and return the bundle opened again.

    The result is written to `path`, by default over the bundle itself. The weight file is hard-linked if the file system
    permits it, else copied.

    Raises:
        UserError: `path` exists and is not a bundle; or the disk is full or fails. The bundle is unchanged.
        BundleError: the plan does not fit the program, or another process replaced the bundle meanwhile.
    """
    return replace_plans(bundle, {bundle.index: plan}, {bundle.index: meta}, path)


def replace_plans(
    bundle: Bundle, plans: Mapping[int, OverlapPlan], metas: Mapping[int, Mapping[str, Any]], path: Path | None = None
) -> Bundle:
    """Replace plans and metadata of several shape variants, by index. The last of `metas` provides the common entries.

    Raises:
        UserError, BundleError: as for `replace_plan`.
    """
    common = dict(bundle.common)
    owns = [dict(variant.own) for variant in bundle.variants]
    contents: dict[str, bytes] = {}
    for index, plan in plans.items():
        check_bundle(bundle.variants[index].program, plan)
        contents[variant_files(index)[1]] = compact(plan.to_json())
        common = common_part(metas[index])
        owns[index] = own_part(metas[index])
    return _with_files(bundle, contents, {"meta": common, "variants": owns}, path or bundle.path)


def replace_binaries(bundle: Bundle, binaries: bytes) -> Bundle:
    """Store the compiled kernels `binaries` in the bundle (`cache_files.packed_entries`), and return it opened again.

    Raises:
        UserError: the disk is full or fails; the bundle is unchanged.
        BundleError: another process replaced the bundle meanwhile.
    """
    return bundle if bundle.binaries == binaries else _with_files(bundle, {BINARIES: binaries}, {}, bundle.path)


def _with_files(bundle: Bundle, contents: Mapping[str, bytes], entries: Mapping[str, Any], path: Path) -> Bundle:
    """Write a copy of `bundle` to `path` with new `contents` of some files and new `entries` in the manifest, and open it."""
    check_replaceable(path)
    manifest = read_same_manifest(bundle.path, bundle.files)
    with disk_errors(path):
        draft = Draft(path)
        try:
            kept = [name for name in manifest["files"] if name != BINARIES or bundle.binaries]
            for name in (*kept, WEIGHTS):
                if name not in contents:
                    _link_or_copy(bundle.files / name, draft.folder / name)
            for name, content in contents.items():
                draft.write(name, content)
            files = {name: manifest["files"][name] for name in kept}
            files |= {name: fingerprint(content) for name, content in contents.items()}
            draft.publish(manifest_text({**manifest, "version_directory": draft.version, "files": files, **entries}))
        finally:
            draft.discard()
    return Bundle.open(path).variant(bundle.index)


def _link_or_copy(source: Path, target: Path) -> None:
    """Hard-link a file, or copy it where the file system has no hard links, and wait until it is on the disk.

    No link is followed, and no file is overwritten.

    Raises:
        BundleError: `source` is no regular file, or cannot be read.
        OSError: `target` exists, or cannot be written.
    """
    try:
        descriptor = open_regular(source, links=False)
    except OSError as error:
        raise BundleError(f"{source} cannot be copied ({error.strerror}); compile the model again") from error
    with os.fdopen(descriptor, "rb") as file:
        if _is_linked(source, target, file.fileno()):
            os.fsync(file.fileno())  # a downloaded file may be in memory only
            return
        with target.open("xb") as copy:
            shutil.copyfileobj(file, copy, READ_BYTES)
            copy.flush()
            os.fsync(copy.fileno())


def _is_linked(source: Path, target: Path, descriptor: int) -> bool:
    """Hard-link the file that is open as `descriptor`; returns whether that was possible."""
    try:
        os.link(source, target, follow_symlinks=False)
    except (OSError, NotImplementedError):
        return False
    if os.path.samestat(target.lstat(), os.fstat(descriptor)):
        return True
    target.unlink()  # `source` was replaced since it was opened
    return False
