"""`flashmem check`, `replan` and `cache`: verify a bundle, plan it again, list and clear the caches."""

from __future__ import annotations

import shutil
import time
from datetime import datetime
from pathlib import Path

from flashmem.base.errors import BudgetError, BundleError
from flashmem.base.paths import TEMPLATES, cache_folder, is_foreign
from flashmem.base.streams import say
from flashmem.base.units import format_size
from flashmem.bundle import cache as bundle_cache
from flashmem.bundle.bundle import Bundle
from flashmem.bundle.cache import Entry
from flashmem.bundle.shape_variants import port_shapes
from flashmem.cli.output.console import emit_json, print_table
from flashmem.runtime.kernels.cache_files import ProgramCache


def check_bundle(path: Path, *, as_json: bool) -> None:
    """Read all of a bundle and compare every checksum.

    Raises:
        UserError: no bundle, or a damaged one.
    """
    begun = time.perf_counter()
    bundle = Bundle.open(path)
    try:
        if bundle.binaries is None:
            raise BundleError(
                f"bundle {path} is damaged: its compiled kernels are not what was written; compile the model again"
            )
        bundle.language()
        bundle.verify_weights()
    except BundleError:
        bundle_cache.forget(bundle.files)
        raise
    nbytes = bundle.program.weights_bytes
    seconds = time.perf_counter() - begun
    slices = len({part.name for variant in bundle.variants for part in variant.program.slices})
    if as_json:
        shapes = [port_shapes(variant.program.inputs) for variant in bundle.variants]
        emit_json({"ok": True, "slices": slices, "weights_bytes": nbytes, "variants": shapes, "seconds": seconds})
    else:
        several = f", for {len(bundle.variants)} shape variants" if len(bundle.variants) > 1 else ""
        print(f"{path} is what was written: {slices} slices, {format_size(nbytes)} of weights{several}")


def replan_bundle(path: Path, budget: int, output: Path | None) -> Path:
    """Plan a bundle again for another budget. Returns the path of the bundle with the new plan.

    Raises:
        UserError: no bundle, or no plan fits the budget; the message names the smallest budget that works.
    """
    from flashmem.tools.learn import replan

    try:
        return replan(Bundle.open(path), budget, output).path
    except BudgetError as error:
        raise BudgetError(
            f"{error}, or compile the model for this budget: slices of a bundle stay as they were cut",
            smallest_bytes=error.smallest_bytes,
            binding=error.binding,
            without_patches=error.without_patches,
        ) from error


def list_cache(*, as_json: bool) -> None:
    """Print the bundles in the cache, most recently used first, and the size of the compiled kernels."""
    known = bundle_cache.entries()
    total = sum(entry.nbytes for entry in known)
    limit = bundle_cache.limit()
    programs = ProgramCache()
    count, nbytes = programs.size()
    if as_json:
        kernels = {"folder": str(programs.folder), "bytes": nbytes, "limit_bytes": programs.limit(), "kernels": count}
        bundles = [_as_json(entry) for entry in known]
        folder = str(bundle_cache.folder())
        emit_json({"folder": folder, "bytes": total, "limit_bytes": limit, "bundles": bundles, "programs": kernels})
        return
    if known:
        rows = [(entry.path.name, entry.model, format_size(entry.nbytes), _last_use(entry)) for entry in known]
        print_table(("bundle", "model", "size", "last used"), rows)
    print(f"{len(known)} bundles, {format_size(total)} of at most {format_size(limit)}, in {bundle_cache.folder()}")
    print(f"{count} compiled kernels, {format_size(nbytes)} of at most {format_size(programs.limit())}, in {programs.folder}")


def clear_cache() -> None:
    """Remove every bundle in the cache that no session has open, all compiled kernels, and the compiled templates."""
    removed, kept = bundle_cache.clear()
    count, nbytes = ProgramCache().clear()
    _clear_templates()
    say(f"removed {len(removed)} bundles, {format_size(sum(entry.nbytes for entry in removed))}")
    say(f"removed {count} compiled kernels, {format_size(nbytes)}")
    for entry in kept:
        say(f"kept {entry.path.name}, which a session has open")


def _clear_templates() -> None:
    """Remove the compiled templates of kernels. They are a few hundred kilobytes, so no list names them."""
    folder = cache_folder(TEMPLATES)
    if not is_foreign(folder):
        shutil.rmtree(folder, ignore_errors=True)


def _last_use(entry: Entry) -> str:
    when = datetime.fromtimestamp(entry.used).isoformat(" ", "minutes") if entry.used else "damaged"
    return f"{when}, open now" if entry.is_open else when


def _as_json(entry: Entry) -> dict[str, object]:
    return {
        "path": str(entry.path),
        "model": entry.model,
        "bytes": entry.nbytes,
        "last_used": datetime.fromtimestamp(entry.used).astimezone().isoformat(),
        "open": entry.is_open,
    }
