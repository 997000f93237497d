"""The table of what `flashmem tune` measured: seconds of each config for products of several shapes.

NAME.tuned.csv lies beside the descriptor, whose key `tuned` is NAME. Comments begin with #: the first one says, as JSON, what
was measured and when. Each line is one config on one product; a config that cannot run has no seconds, and a note says why.
The descriptor is stored in bundles, the table is not: only compiling reads it.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, cast

from flashmem.base.errors import UserError
from flashmem.base.resources import read_text
from flashmem.base.types import MemoryPath
from flashmem.target.descriptor import DeviceDescriptor, KernelConfig

SUFFIX = ".tuned.csv"
VERSION = 2
NEAR = 3.0
"""Doublings, over all sizes together, up to which a measured product says something of another."""


@dataclass(frozen=True)
class Product:
    """A contraction as kernels see it: `batches` products of [rows, depth] and [depth, columns].

    Of a convolution `depth` counts every tap (a product of `taps`), `stride` is its step; of attention, `rows` are queries,
    `columns` keys, `depth` the width of a head, `batches` the heads. `storage`: what the elements of packed weights are.
    """

    family: str
    path: MemoryPath
    rows: int
    depth: int
    columns: int
    batches: int = 1
    storage: str = "float32"
    taps: int = 1
    stride: int = 1

    @property
    def macs(self) -> int:
        """Multiplications."""
        return self.batches * self.rows * self.depth * self.columns

    @property
    def kind(self) -> tuple[str, str]:
        """What products must share to say something of each other."""
        return self.family, self.path

    def distance(self, other: Product) -> float:
        """Doublings between two products of one kind; another storage, or other taps, count as much as one."""
        sizes = [(getattr(self, name), getattr(other, name)) for name in ("rows", "depth", "columns", "batches")]
        unlike = (self.storage != other.storage) + ((self.taps > 1) != (other.taps > 1)) + (self.stride != other.stride)
        return math.hypot(*(math.log2(max(1, a) / max(1, b)) for a, b in sizes), unlike)


_SIZES = ("batches", "rows", "depth", "columns", "taps", "stride")
COLUMNS = ("family", "path", "storage", *_SIZES, "config", "code", "seconds", "note")


@dataclass(frozen=True)
class Timing:
    """What one config took for one product; None with a note where it cannot run."""

    product: Product
    config: str
    code: str  # `KernelConfig.code`: what was measured, should the name come to mean another
    seconds: float | None
    note: str = ""

    def line(self) -> list[str]:
        """As the table has it."""
        p = self.product
        seconds = "" if self.seconds is None else f"{self.seconds:.4g}"
        sizes = [str(getattr(p, name)) for name in _SIZES]
        return [p.family, p.path, p.storage, *sizes, self.config, self.code, seconds, self.note]


@dataclass(frozen=True)
class Table:
    """Timings, and what the table says of itself. `digest` is of its text."""

    about: Mapping[str, Any]
    timings: Sequence[Timing]
    digest: str = ""
    _found: dict[tuple[Product, tuple[str, ...]], dict[str, float]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def text(self) -> str:
        """As `read_table` reads it."""
        lines = io.StringIO()
        lines.write("# " + json.dumps(dict(self.about), sort_keys=True) + "\n")
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(timing.line() for timing in self.timings)
        return lines.getvalue()

    @cached_property
    def products(self) -> dict[tuple[str, str], dict[Product, dict[str, Timing]]]:
        """Timings by kind, product and the config's code."""
        kinds: dict[tuple[str, str], dict[Product, dict[str, Timing]]] = defaultdict(lambda: defaultdict(dict))
        for timing in self.timings:
            kinds[timing.product.kind][timing.product][timing.code] = timing
        return kinds

    def seconds(self, product: Product, configs: Sequence[KernelConfig]) -> dict[KernelConfig, float]:
        """Seconds of those of `configs` that ran on the nearest product measured, by multiplications; {} if none is near.

        A config that failed there is left out; so is one whose numbers were changed since.
        """
        codes = tuple(config.code for config in configs)
        if (product, codes) not in self._found:
            self._found[product, codes] = self._nearest(product, codes)
        found = self._found[product, codes]
        return {config: found[code] for config, code in zip(configs, codes, strict=True) if code in found}

    def _nearest(self, product: Product, codes: Iterable[str]) -> dict[str, float]:
        wanted = set(codes)
        near = [
            (distance, known)
            for known, timings in self.products.get(product.kind, {}).items()
            if (distance := product.distance(known)) <= NEAR
            and any(code in wanted and timing.seconds is not None for code, timing in timings.items())
        ]
        if not near:
            return {}
        _, nearest = min(near, key=lambda pair: pair[0])
        scale = product.macs / max(1, nearest.macs)
        timings = self.products[product.kind][nearest].items()
        return {code: t.seconds * scale for code, t in timings if code in wanted and t.seconds is not None}


def read_table(text: str, where: str) -> Table:
    """The table in `text`.

    Raises:
        UserError: it is none, or of another version.
    """
    lines = text.splitlines()
    try:
        about = json.loads(lines[0].removeprefix("#"))
        if about["version"] != VERSION:
            raise ValueError(f"it is of version {about['version']}, not {VERSION}")
        rows = csv.DictReader(line for line in lines if not line.startswith("#"))
        if tuple(rows.fieldnames or ()) != COLUMNS:
            raise ValueError(f"its columns are not {', '.join(COLUMNS)}")
        timings = [_timing(row) for row in rows]
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, csv.Error) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{where} is not a table of tuned configs ({reason}); run flashmem tune --fresh") from error
    return Table(about, timings, hashlib.sha256(text.encode()).hexdigest()[:16])


def _timing(row: dict[str, str]) -> Timing:
    if None in row or None in row.values():
        raise ValueError(f"the line of {row.get('config')!r} has more or fewer cells than there are columns")
    if row["path"] not in ("buffer", "texture"):
        raise ValueError(f"{row['path']!r} is no memory path")
    sizes = {name: int(row[name]) for name in _SIZES}
    if min(sizes.values()) < 1:
        raise ValueError(f"a product of {sizes} has nothing to multiply")
    seconds = float(row["seconds"]) if row["seconds"] else None
    if seconds is not None and not 0 < seconds < math.inf:
        raise ValueError(f"{row['seconds']} seconds")
    product = Product(row["family"], cast(MemoryPath, row["path"]), storage=row["storage"], **sizes)
    return Timing(product, row["config"], row["code"], seconds, row["note"])


def tuned_table(descriptor: DeviceDescriptor) -> Table | None:
    """The table that `descriptor` names, read once; None if it names none.

    Raises:
        UserError: it is missing, or not a table.
    """
    if not descriptor.tuned:
        return None
    name = descriptor.tuned + SUFFIX
    stem = Path(descriptor.tuned)
    try:
        text = Path(name).read_text(encoding="utf-8") if stem.is_absolute() else read_text("devices", name)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"the table of tuned configs {name} cannot be read ({reason}); run flashmem tune") from error
    return _parsed(text, name)


_parsed = lru_cache(maxsize=8)(read_table)


def digest(descriptor: DeviceDescriptor) -> str:
    """What changes when the descriptor's table does; "" without one."""
    table = tuned_table(descriptor)
    return table.digest if table else ""
