"""The dataset: one row for each launch, transfer mode and amount of streamed bytes.

During a measurement it is a CSV file to which the rows of one launch at a time are appended. A row that a kill leaves
incomplete is dropped when the profile resumes. Finished, it is NAME.profile.csv.gz. The record of a phone kit, a JSON file,
contains one.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any, get_type_hints

from flashmem.base.errors import MissingFileError, UserError
from flashmem.base.files import written_whole
from flashmem.planning.capacity.basis import Basis
from flashmem.planning.capacity.features import LaunchFeatures

SUFFIX = ".profile.csv.gz"
SAMPLE = "sample"
"""The origin of sampled kernels."""


@dataclass(frozen=True)
class Row:
    """A measurement. `seconds`: the launch alone; `slowdown`: the factor by `streamed_bytes` beside it; `spread`: see bench.py.

    `mode` is "none" in the one row of each launch without streaming. `spent`: seconds that the measurement took. `gemm_pace`
    and `traffic_pace`: seconds of the two reference launches around this one.
    """

    origin: str  # `SAMPLE`, or the model of the launch
    case: str
    operator: str
    features: LaunchFeatures
    mode: str
    streamed_bytes: float
    seconds: float
    slowdown: float
    spread: float
    spent: float
    gemm_pace: float = 1.0
    traffic_pace: float = 1.0


_FEATURES = get_type_hints(LaunchFeatures)
_OWN = {name: kind for name, kind in get_type_hints(Row).items() if name != "features"}

_KINDS = {**_OWN, **_FEATURES}
_COLUMNS = (*(f.name for f in fields(Row) if f.name != "features"), *_FEATURES)


def _as_line(row: Row) -> dict[str, Any]:
    line: dict[str, Any] = {**{name: getattr(row, name) for name in _OWN}, **asdict(row.features)}
    return {name: f"{value:.6g}" if _KINDS[name] is float else value for name, value in line.items()}


def _as_row(line: dict[str, str]) -> Row:
    values = {name: _parse(kind, line[name]) for name, kind in _OWN.items()}
    return Row(features=LaunchFeatures(**{name: _parse(kind, line[name]) for name, kind in _FEATURES.items()}), **values)


def _parse(kind: Any, text: str) -> Any:
    return kind(text) if kind in (int, float) else text


_BY_ARITHMETIC = (0.4, 0.5)
_BY_TRAFFIC = (0.0, 0.65)
"""Exponents with which latencies follow the two references: see docs/reference/internals/profile.md."""


def at_usual_pace(rows: Sequence[Row], basis: Basis) -> list[Row]:
    """The rows with latencies scaled to the machine's usual pace: that of the median launch.

    The speed of shared machines varies from minute to minute. Launches limited by arithmetic follow it differently from others.
    """
    alone = [row for row in rows if row.mode == "none"]
    if not alone:
        return list(rows)
    gemm, traffic = (median(values) for values in zip(*((row.gemm_pace, row.traffic_pace) for row in alone), strict=True))

    def pace(row: Row) -> float:
        by_gemm, by_traffic = _BY_ARITHMETIC if basis.limited_by_arithmetic(row.features) else _BY_TRAFFIC
        return float((row.gemm_pace / gemm) ** by_gemm * (row.traffic_pace / traffic) ** by_traffic)

    return [replace(row, seconds=row.seconds / pace(row)) for row in rows]


class Growing:
    """The dataset of an unfinished profile. Its first line identifies the device, so that two devices are never mixed."""

    def __init__(self, path: Path, about: dict[str, Any], *, resume: bool) -> None:
        """Begin a file, or continue an existing one.

        Raises:
            UserError: the file is of another device or seed.
        """
        self.path = path
        self.rows: list[Row] = []
        head = "# " + json.dumps(about, sort_keys=True) + "\n"
        if resume and path.is_file():
            self._take_up(head)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        self._write(head + ",".join(_COLUMNS) + "\n")

    def _take_up(self, head: str) -> None:
        text = self.path.read_text(encoding="utf-8")
        if not text.startswith(head):
            raise UserError(f"{self.path} was begun on another device or with another seed; finish it there, or use --fresh")
        whole = text[: text.rindex("\n") + 1]
        rows = _read(whole[len(head) :], self.path)
        if whole != text and rows:  # killed in the middle of a line: the last launch may be incomplete
            rows = [row for row in rows if row.case != rows[-1].case]
            whole = head + _written(rows)
        if whole != text:
            self._write(whole)
        self.rows = rows

    def _write(self, text: str) -> None:
        with written_whole(self.path) as file:
            file.write(text.encode())

    @property
    def cases(self) -> set[str]:
        """The cases that are done."""
        return {row.case for row in self.rows}

    def append(self, rows: Sequence[Row]) -> None:
        """Append all rows of one launch in one write. They are kept as read back, so that a resumed profile trains equally."""
        self.rows += _read(_written(rows), self.path)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_written(rows, header=False))


def _written(rows: Iterable[Row], *, header: bool = True) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, _COLUMNS, lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(_as_line(row) for row in rows)
    return text.getvalue()


def _read(text: str, where: Path) -> list[Row]:
    try:
        return [_as_row(line) for line in csv.DictReader(io.StringIO(text))]
    except (KeyError, ValueError, TypeError) as error:
        raise UserError(f"{where} is not a profile of this version ({error!r}); profile the device again") from error


def write_dataset(path: Path, about: dict[str, Any], rows: Iterable[Row]) -> None:
    """Write the finished dataset atomically. `about`: the device and its rates."""
    content = "# " + json.dumps(about, sort_keys=True) + "\n" + _written(rows)
    with written_whole(path) as file:
        file.write(gzip.compress(content.encode(), 9, mtime=0))


def is_record(path: Path) -> bool:
    """Whether a file is the record of a phone kit (`phone_kit.measuring`)."""
    return path.suffix == ".json"


def stem_of(path: Path) -> Path:
    """The path of a dataset or of a record, without its suffix."""
    return path.with_name(path.name.removesuffix(SUFFIX).removesuffix(".json"))


def probes_in_record(path: Path) -> Any:
    """The results of probes in a phone kit's record, as JSON data (`runtime.opencl.probes.results`); {} without any."""
    return json.loads(path.read_text(encoding="utf-8"))["steps"].get("probes", {}).get("result") or {}


def _in_record(path: Path) -> str:
    """The text of the dataset in a phone kit's record.

    Raises:
        UserError: the phone measured none.
        ValueError: not a record.
    """
    try:
        step = json.loads(path.read_text(encoding="utf-8"))["steps"]["rates"]
        text = step["result"]
        said = step["said"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{error!r}") from error
    if not isinstance(text, str):
        raise UserError(f"{path} has no rates of the phone ({said}); run the kit again")
    return text


def read_dataset(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """Read a dataset, or that in the record of a phone kit: its description, and its rows.

    Raises:
        MissingFileError: no such file.
        UserError: not a dataset of this version, or a record without one.
    """
    if not path.is_file():
        raise MissingFileError(f"{path}: no such dataset; flashmem profile writes one")
    try:
        text = _in_record(path) if is_record(path) else gzip.decompress(path.read_bytes()).decode()
        head, _, table = text.partition("\n")
        about = json.loads(head.removeprefix("# "))
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise UserError(f"{path} is not a profile dataset ({error}); flashmem profile writes one") from error
    return about, _read(table, path)
