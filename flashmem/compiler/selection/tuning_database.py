"""The tuning database of a device: measured seconds of each kernel config for several workloads, from `flashmem tune`.

It is the file NAME.tuned.csv in the folder of the descriptor, whose key `tuned` is NAME. Comments begin with #; the first one
is JSON: the measured device, and the date. Each line is one config on one workload. A config that cannot run has no seconds,
and a note says why. Bundles contain the descriptor and not the database: only the compiler reads it.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, cast

from flashmem.base.errors import UserError
from flashmem.base.resources import read_text
from flashmem.base.types import MemoryPath
from flashmem.compiler.configs.config import KernelConfig
from flashmem.compiler.configs.workload import Workload
from flashmem.target.descriptor import DeviceDescriptor

SUFFIX = ".tuned.csv"
VERSION = 2
NEAR = 3.0
"""The largest distance, in doublings of sizes, from a workload to a measured one whose times predict it."""


_SIZES = ("batches", "rows", "depth", "columns", "taps", "stride")
COLUMNS = ("family", "path", "storage", *_SIZES, "config", "code", "seconds", "note")


@dataclass(frozen=True)
class Timing:
    """The time of one config on one workload; None, with a note, if it cannot run."""

    workload: Workload
    config: str
    code: str  # `KernelConfig.code` of the measured config, because a name may change its meaning
    seconds: float | None
    note: str = ""

    def line(self) -> list[str]:
        """The row of the CSV file."""
        p = self.workload
        seconds = "" if self.seconds is None else f"{self.seconds:.4g}"
        sizes = [str(getattr(p, name)) for name in _SIZES]
        return [p.family, p.path, p.storage, *sizes, self.config, self.code, seconds, self.note]


@dataclass(frozen=True)
class TuningDatabase:
    """Timings, with the conditions of their measurement. `content_hash`: a hash of the file's text."""

    about: Mapping[str, Any]
    timings: Sequence[Timing]
    content_hash: str = ""
    _found: dict[tuple[Workload, tuple[str, ...]], dict[str, float]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def text(self) -> str:
        """The text of the file, which `parse_database` reads."""
        lines = io.StringIO()
        lines.write("# " + json.dumps(dict(self.about), sort_keys=True) + "\n")
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(timing.line() for timing in self.timings)
        return lines.getvalue()

    @cached_property
    def workloads(self) -> dict[tuple[str, str], dict[Workload, dict[str, Timing]]]:
        """Timings by kind, workload and the config's code."""
        kinds: dict[tuple[str, str], dict[Workload, dict[str, Timing]]] = defaultdict(lambda: defaultdict(dict))
        for timing in self.timings:
            kinds[timing.workload.kind][timing.workload][timing.code] = timing
        return kinds

    def seconds(self, workload: Workload, configs: Sequence[KernelConfig]) -> dict[KernelConfig, float]:
        """Seconds of `configs` on the nearest measured workload, scaled by multiplications; {} if none is near.

        Configs that failed there, and configs whose numbers have changed since, are excluded.
        """
        codes = tuple(config.code for config in configs)
        if (workload, codes) not in self._found:
            self._found[workload, codes] = self._scaled(workload, codes)
        found = self._found[workload, codes]
        return {config: found[code] for config, code in zip(configs, codes, strict=True) if code in found}

    def unknown(self, workload: Workload, configs: Sequence[KernelConfig]) -> list[KernelConfig]:
        """The configs that cannot compute the workload whose times `seconds` uses, because it is stored otherwise."""
        nearest = self._nearest(workload, [config.code for config in configs])
        return [] if nearest is None else [config for config in configs if not config.fits(nearest)]

    def _nearest(self, workload: Workload, codes: Iterable[str]) -> Workload | None:
        """The nearest measured workload on which any config with one of `codes` ran; None if none is near."""
        wanted = set(codes)
        near = [
            (distance, known)
            for known, timings in self.workloads.get(workload.kind, {}).items()
            if (distance := workload.distance(known)) <= NEAR
            and any(code in wanted and timing.seconds is not None for code, timing in timings.items())
        ]
        return min(near, key=lambda pair: pair[0])[1] if near else None

    def _scaled(self, workload: Workload, codes: Collection[str]) -> dict[str, float]:
        nearest = self._nearest(workload, codes)
        if nearest is None:
            return {}
        scale = workload.macs / max(1, nearest.macs)
        timings = self.workloads[workload.kind][nearest].items()
        return {code: t.seconds * scale for code, t in timings if code in codes and t.seconds is not None}


def parse_database(text: str, where: str) -> TuningDatabase:
    """Parse the database in `text`; `where` names the file.

    Raises:
        UserError: the text is not a tuning database, or of another version.
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
        raise UserError(f"{where} is not a tuning database ({reason}); run flashmem tune --fresh") from error
    return TuningDatabase(about, timings, hashlib.sha256(text.encode()).hexdigest()[:16])


def _timing(row: dict[str, str]) -> Timing:
    if None in row or None in row.values():
        raise ValueError(f"the line of {row.get('config')!r} has more or fewer cells than there are columns")
    if row["path"] not in ("buffer", "texture"):
        raise ValueError(f"{row['path']!r} is no memory path")
    sizes = {name: int(row[name]) for name in _SIZES}
    if min(sizes.values()) < 1:
        raise ValueError(f"a workload of {sizes} has nothing to multiply")
    seconds = float(row["seconds"]) if row["seconds"] else None
    if seconds is not None and not 0 < seconds < math.inf:
        raise ValueError(f"{row['seconds']} seconds")
    workload = Workload(row["family"], cast(MemoryPath, row["path"]), storage=row["storage"], **sizes)
    return Timing(workload, row["config"], row["code"], seconds, row["note"])


def load_database(descriptor: DeviceDescriptor) -> TuningDatabase | None:
    """Load the database that `descriptor` names, once; None if it names none.

    Raises:
        UserError: it is missing, or not a tuning database.
    """
    if not descriptor.tuned:
        return None
    name = descriptor.tuned + SUFFIX
    stem = Path(descriptor.tuned)
    try:
        text = Path(name).read_text(encoding="utf-8") if stem.is_absolute() else read_text("devices", name)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"the tuning database {name} cannot be read ({reason}); run flashmem tune") from error
    return _parsed(text, name)


_parsed = lru_cache(maxsize=8)(parse_database)


def content_hash(descriptor: DeviceDescriptor) -> str:
    """A hash of the descriptor's tuning database; "" without one."""
    database = load_database(descriptor)
    return database.content_hash if database else ""
