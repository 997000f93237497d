"""The dataset of a GPU family: launches, and the counted instructions of their kernels, alone and with a copy stream.

It is FAMILY.kernels.csv.gz. Boosters are trained on pairs of a kernel and a shape, which `pairs` makes of it.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

from flashmem.base.errors import MissingFileError, UserError
from flashmem.base.files import written_whole
from flashmem.planning.capacity.features import LaunchFeatures, launch_features
from flashmem.profiler.phone_compilers.cases import lane_kernels_of
from flashmem.profiler.phone_compilers.families import Family
from flashmem.profiler.phone_compilers.interleaved import step_bytes
from flashmem.profiler.phone_compilers.pipeline import CodeCounts, CompiledKernel, stream_places
from flashmem.profiler.phone_compilers.report import CompilerReport
from flashmem.profiler.phone_compilers.statistics import KernelStatistics
from flashmem.profiler.target import Target
from flashmem.program.kernel_text import kernel_texts
from flashmem.target.descriptor import load_descriptor

SUFFIX = ".kernels.csv.gz"
_LANE_BYTES = 64
"""Bytes that a work-item of a kernel which only copies moves at a time."""

Examine = Callable[[Mapping[str, str]], CompilerReport]
"""Compiles texts by name."""


@dataclass(frozen=True)
class KernelRow:
    """A launch and its compiled kernel. `text`: a hash of the plain kernel's text; launches share many texts."""

    origin: str  # `SAMPLE`, or a model
    case: str
    operator: str
    text: str
    features: LaunchFeatures
    compiled: CompiledKernel


_OWN = ("origin", "case", "operator", "text")
_CODES = ("plain", "lane")
_FEATURES = get_type_hints(LaunchFeatures)
_COMPILED = {name: kind for name, kind in get_type_hints(CompiledKernel).items() if name not in _CODES}
_COUNTS = tuple(field.name for field in fields(CodeCounts))


def collect(family: Family, examine: Examine) -> tuple[dict[str, Any], list[KernelRow]]:
    """Compile the kernels of `family`. Returns what the file says of itself, and its rows.

    A kernel that does not build is left out, and counted.
    """
    descriptor = load_descriptor(family.writes)
    targets = list(family.targets())
    texts: dict[str, str] = {f"copies {name}": text for name, text in lane_kernels_of(descriptor).items()}
    for target in targets:
        for text in _texts(target):
            texts[_name(text)] = text
    report = examine(texts)
    found = {each.kernel: each for each in report.kernels}
    drained = {name: _drained(found[name]) for name in found if name.startswith("copies ")}
    waves = 16 if family.compiler.driver == "freedreno" else 0
    rows = [row for target in targets if (row := _row(target, found, drained, waves)) is not None]
    about = {
        "family": family.name, "gpu": report.gpu.name, "mesa": report.mesa, "texts": len(texts), "failed": len(report.failures),
    }  # fmt: skip
    return about, rows


def _texts(target: Target) -> tuple[str, str]:
    kernel = target.launch.kernel
    return kernel_texts(target.source.plain)[kernel], kernel_texts(target.source.lane)[kernel]


def _name(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _drained(kernel: KernelStatistics) -> float:
    assert kernel.main_loop is not None  # its one loop moves _LANE_BYTES at a time
    return kernel.main_loop.slots / _LANE_BYTES


def _row(target: Target, found: Mapping[str, KernelStatistics], drained: Mapping[str, float], waves: int) -> KernelRow | None:
    plain, lane = _texts(target)
    if _name(plain) not in found or _name(lane) not in found:
        return None
    sizes = {part.name: part.nbytes for part in target.program.slices}
    read = sum(sizes[str(arg.value)] for arg in target.launch.args if arg.kind == "slice")
    path = target.program.memory_path
    features = launch_features(target.launch, read, path)
    storage = "half" if read and read < 3 * features.depth * features.columns else "float"
    copying = f"copies lane_copy_{'buffer' if path == 'buffer' else storage}"
    compiled = CompiledKernel(
        CodeCounts.of(found[_name(plain)]), CodeCounts.of(found[_name(lane)]), step_bytes(lane), *stream_places(lane),
        drained[copying], waves,
    )  # fmt: skip
    return KernelRow(target.origin, target.case, target.operator, _name(plain), features, compiled)


def write_rows(path: Path, about: Mapping[str, Any], rows: Iterable[KernelRow]) -> None:
    """Write the dataset whole."""
    text = io.StringIO()
    names = [*_OWN, *_FEATURES, *_COMPILED, *(f"{code}_{name}" for code in _CODES for name in _COUNTS)]
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        line: dict[str, Any] = {name: getattr(row, name) for name in _OWN} | asdict(row.features)
        line |= {name: getattr(row.compiled, name) for name in _COMPILED}
        for code in _CODES:
            line |= {f"{code}_{name}": value for name, value in asdict(getattr(row.compiled, code)).items()}
        writer.writerow(line)
    content = "# " + json.dumps(dict(about), sort_keys=True) + "\n" + text.getvalue()
    with written_whole(path) as file:
        file.write(gzip.compress(content.encode(), 9, mtime=0))


def read_rows(path: Path) -> tuple[dict[str, Any], list[KernelRow]]:
    """What `write_rows` has written.

    Raises:
        MissingFileError: no such file.
        UserError: it is something else.
    """
    if not path.is_file():
        raise MissingFileError(f"{path}: no such dataset; python -m flashmem.profiler.phone_compilers.boosters writes one")
    try:
        head, _, table = gzip.decompress(path.read_bytes()).decode().partition("\n")
        return json.loads(head.removeprefix("# ")), [_parsed(line) for line in csv.DictReader(io.StringIO(table))]
    except (OSError, EOFError, ValueError, KeyError, TypeError, zlib.error) as error:
        raise UserError(f"{path} is not a dataset of compiled kernels ({error!r}); collect it again") from error


def _parsed(line: Mapping[str, str]) -> KernelRow:
    features = LaunchFeatures(**_values(_FEATURES, line))
    plain, lane = (CodeCounts(**{name: int(line[f"{code}_{name}"]) for name in _COUNTS}) for code in _CODES)
    compiled = CompiledKernel(plain, lane, **_values(_COMPILED, line))
    return KernelRow(line["origin"], line["case"], line["operator"], line["text"], features, compiled)


def _values(kinds: Mapping[str, Any], line: Mapping[str, str]) -> dict[str, Any]:
    return {name: kind(line[name]) if kind in (int, float) else line[name] for name, kind in kinds.items()}


def texts_of(rows: Sequence[KernelRow]) -> int:
    """The number of different kernels' texts."""
    return len({row.text for row in rows})
