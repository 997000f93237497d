"""Kernels of the zoo's models through the compiler of a phone's GPU, by kernel family and by model, in fp32 and fp16.

    python -m flashmem.profiler.phone_compilers.models adreno750 [mali-g710 ...] [--models NAME,...] [--json o.json]
    python -m flashmem.profiler.phone_compilers.models adreno750 mali-g710 --before old.json     # old and new in one table

Each distinct kernel is compiled once, and the compiler's output is kept in the user's cache: an interrupted command continues.
To compare two versions of flashmem with the same compiler, write the kernels of the old one with `--write-kernels DIR`. Then
compile them with `--kernels FILE` in the new one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flashmem.base.errors import UserError
from flashmem.base.streams import exit_codes
from flashmem.profiler.phone_compilers.gpus import gpu_of
from flashmem.profiler.phone_compilers.model_kernels import MODELS, ModelKernel, ModelKernels
from flashmem.profiler.phone_compilers.report import examine
from flashmem.profiler.phone_compilers.results import StoredResults, results_folder
from flashmem.target.descriptor import load_descriptor

_COUNTS = ("registers", "threads", "spills", "emulated", "local_bytes")
_HEADER = ("kernels", "MACs", "slots/MAC", "registers", "waves", "spills", "stack in main loops", "emulated")


@dataclass(frozen=True)
class Code:
    """What a table shows of one kernel's code. `slots_per_mac` and `stack` are of its main loop."""

    slots_per_mac: float | None
    stack: int
    registers: int
    threads: int
    spills: int
    emulated: int
    local_bytes: int


@dataclass(frozen=True)
class ModelReport:
    """The kernels of models on one device. `code` by text; `failures` are errors of texts that do not compile."""

    device: str
    mesa: str
    kernels: tuple[ModelKernel, ...]
    code: dict[str, Code]
    failures: dict[str, str]

    @classmethod
    def of(cls, data: dict[str, Any]) -> ModelReport:
        """The inverse of `dataclasses.asdict`."""
        kernels = tuple(ModelKernel(**each) for each in data["kernels"])
        code = {key: Code(**each) for key, each in data["code"].items()}
        return cls(data["device"], data["mesa"], kernels, code, data["failures"])


@dataclass(frozen=True)
class Summary:
    """Several kernels: how many texts they are, and of their code the extremes or sums.

    `slots` is the least, the median, the mean and the most of the slots for each multiply-add, weighted by multiply-adds; None
    if no main loop has any. `registers` is the most of a kernel, `threads` the fewest. The others are sums over texts.
    """

    texts: int
    macs: int
    slots: tuple[float, float, float, float] | None
    registers: int
    threads: int
    spills: int
    stack: int
    emulated: int


def summary(report: ModelReport, kernels: Sequence[ModelKernel]) -> Summary | None:
    """The summary of those of `kernels` that compile; None if none does."""
    code = {each.text: report.code[each.text] for each in kernels if each.text in report.code}
    if not code:
        return None
    weighted = [
        (ratio, each.macs)
        for each in kernels
        if each.text in code and each.macs and (ratio := code[each.text].slots_per_mac) is not None
    ]
    return Summary(
        texts=len(code),
        macs=sum(each.macs for each in kernels),
        slots=_spread(sorted(weighted)),
        registers=max(each.registers for each in code.values()),
        threads=min(each.threads for each in code.values()),
        spills=sum(each.spills for each in code.values()),
        stack=sum(each.stack for each in code.values()),
        emulated=sum(each.emulated for each in code.values()),
    )


def _spread(weighted: Sequence[tuple[float, int]]) -> tuple[float, float, float, float] | None:
    """The least, the median, the mean and the most of sorted (value, weight)."""
    total = sum(weight for _, weight in weighted)
    if not total:
        return None
    before = 0
    median = weighted[-1][0]
    for value, weight in weighted:
        before += weight
        if 2 * before >= total:
            median = value
            break
    return weighted[0][0], median, sum(value * weight for value, weight in weighted) / total, weighted[-1][0]


def examined(kernels: ModelKernels, jobs: int = 0) -> ModelReport:
    """Compile `kernels` for the GPU of their device.

    Raises:
        UserError: the compilers cannot be set up or started on this machine, or the device has none.
    """
    report = examine(kernels.texts, gpu_of(kernels.device), jobs, StoredResults(results_folder()))
    code = {}
    for each in report.kernels:
        loop = each.main_loop
        ratio, stack = (None, 0) if loop is None else (loop.slots_per_mac, loop.stack)
        shown = None if ratio is None else round(ratio, 3)
        code[each.kernel] = Code(shown, stack, **{name: getattr(each, name) for name in _COUNTS})
    return ModelReport(kernels.device, report.mesa, kernels.kernels, code, dict(report.failures))


def tables(now: ModelReport, before: ModelReport | None = None) -> str:
    """Two tables as Markdown: by family and precision, and by model and precision; with `before`, each cell has both."""
    title = f"{now.device}, Mesa {now.mesa}" + (" (before → now)" if before else "")
    reports = [each for each in (before, now) if each is not None]
    rows = []
    for family, precision in sorted({(each.family, each.precision) for each in now.kernels}, key=lambda key: (key[0], key[1])):
        found = [
            summary(report, [each for each in report.kernels if (each.family, each.precision) == (family, precision)])
            for report in reports
        ]
        rows.append([f"{family}, {precision}", *_cells(found)])
    models = []
    for model, precision in dict.fromkeys((each.model, each.precision) for each in now.kernels):
        found = [
            summary(report, [each for each in report.kernels if (each.model, each.precision) == (model, precision)])
            for report in reports
        ]
        models.append([f"{model}, {precision}", *_cells(found)])
    failed = [f"{each.device}: {text}: {' '.join(error.split())}" for each in reports for text, error in each.failures.items()]
    return "\n".join([title, "", *_markdown(("family", *_HEADER), rows), "", *_markdown(("model", *_HEADER), models), *failed])


def _cells(found: Sequence[Summary | None]) -> list[str]:
    columns = zip(*(_shown(each) for each in found), strict=True)
    return [" → ".join(dict.fromkeys(column)) for column in columns]  # equal ones once


def _shown(each: Summary | None) -> tuple[str, ...]:
    if each is None:
        return ("-",) * len(_HEADER)
    least, median, mean, most = each.slots or (0.0,) * 4
    slots = f"{mean:.2f} ({least:.2f} to {most:.2f}, median {median:.2f})" if each.slots else "-"
    counts = (each.registers, each.threads, each.spills, each.stack, each.emulated)
    return (str(each.texts), f"{each.macs / 1e9:.1f} G", slots, *map(str, counts))


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]


def main() -> int:
    """Parse the command line, compile, and print the tables; 1 if a kernel does not compile."""
    parser = argparse.ArgumentParser(
        prog="python -m flashmem.profiler.phone_compilers.models", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("devices", nargs="*", metavar="DEVICE", help="device descriptors of phones' GPUs")
    parser.add_argument("--models", default=",".join(MODELS), metavar="NAME,...", help="of the zoo's configurations")
    parser.add_argument("--kernels", type=Path, action="append", default=[], metavar="FILE", help="from --write-kernels")
    parser.add_argument("--write-kernels", type=Path, metavar="DIR", help="write DEVICE.json there, and do not compile")
    parser.add_argument("--before", type=Path, metavar="FILE", help="a file of --json, for a table with both")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("-j", "--jobs", type=int, default=0, help="compilers at a time; as many as processors by default")
    args = parser.parse_args()
    if not args.devices and not args.kernels:
        raise UserError("name a device, or a file with --kernels")
    found = [ModelKernels.rendered(args.models.split(","), load_descriptor(device)) for device in args.devices]
    if args.write_kernels:
        for each in found:
            each.write(args.write_kernels / f"{each.device}.json")
        return 0
    before = {report.device: report for report in _read(args.before)} if args.before else {}
    reports = []
    for kernels in (*found, *map(ModelKernels.read, args.kernels)):
        print(f"{kernels.device}: {len(kernels.texts)} kernels", file=sys.stderr)
        reports.append(examined(kernels, args.jobs))
        print(tables(reports[-1], before.get(kernels.device)), end="\n\n")
    if args.json:
        args.json.write_text(json.dumps([asdict(each) for each in reports], separators=(",", ":")), encoding="utf-8")
    return 1 if any(each.failures for each in reports) else 0


def _read(path: Path) -> list[ModelReport]:
    try:
        return [ModelReport.of(each) for each in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} has no figures of models ({error}); name a file that --json wrote") from error


if __name__ == "__main__":
    with exit_codes():
        sys.exit(main())
