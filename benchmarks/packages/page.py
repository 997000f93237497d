"""The page of `answers.py`, written from its rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from flashmem.tools.verify import TOLERANCE

Row = dict[str, Any]

_DECIDED = 0.05
"""Where ONNX Runtime's own answers are further from one another, over the range, they decide nothing."""

_INTRODUCTION = """# Files of packages

Written by `python -m benchmarks.packages.answers` from docs/research/packages.json; `--help` says how files are fetched, and
benchmarks/packages/files.toml names each with its package, version and SHA-256. The files were chosen before any was tried, by
what their packages say of themselves. Files of the list without a row have not been run yet; none has left it.
"""

_KEY = """
- *answers*: right, refused, wrong, or undecided (ONNX Runtime's own answers differ by over 5 % of the range), without a budget,
  and with *budget*: 40 % of the weights, or the smallest that works if that is more (marked ‡).
- *error*: the largest difference from ONNX Runtime on the CPU, over the range of the output; at most 1e-3, or, marked ≈, at
  most twice the distance of ONNX Runtime's own answers from one another: without its graph optimisations, and with every float
  weight and input moved by at most one unit in the last place, or by 16 units in files that round values to 8 bits. There the
  order of a sum decides some roundings. Integer outputs are equal, but where ONNX Runtime's own differ so.
- *†*: ONNX Runtime crashes on the file with its graph optimisations; the reference is without them.
- *§*: the file has signed weights in products of integers, whose sums ONNX Runtime saturates on a processor without VNNI, or
  DynamicQuantizeLSTM, which rounds states thread by thread ([onnxruntime.md](../reference/onnxruntime.md)). The reference is
  ONNX Runtime with the same weights unsigned, and with the LSTM of the dequantised weights. The number after § is the
  distance of its answer for the file as it is.
- *first*: from the model's file (ONNX Runtime) or the compiled bundle (flashmem, kernels in the program cache) to the outputs;
  *later*: the median of the next runs. Three times each: flashmem without a budget / with it / ONNX Runtime. In milliseconds,
  beside other work on the machine: a row compares engines only roughly.
"""


def page(rows: Sequence[Row], machine: str) -> str:
    """The page in Markdown."""
    shipped = [row for row in rows if row["maker"] is None]
    made = [row for row in rows if row["maker"] is not None and not _missing(row)]
    dates = sorted({row["date"] for row in rows})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    parts = [
        _INTRODUCTION,
        f"Measured {when}: {machine}.\n",
        f"- {len(shipped)} files of {len({row['file'].split('/')[0] for row in shipped})} packages: {_count(shipped)}.",
        f"- {len(made)} files made from them by other tools: {_count(made)}.",
        _KEY,
        "\n## Files as packages ship them\n",
        _table(shipped),
        "\n## Files made from them\n",
        _table(made),
    ]
    if left := [row for row in rows if _missing(row)]:
        parts += ["\n## Files that a tool did not make, or that ONNX Runtime does not load\n"]
        parts += [f"- {row['file']}, {row['maker']}: {_cell(_missing(row))}" for row in left]
    if refused := [row for row in rows if "refused" in row.get("flashmem", {})]:
        parts += ["\n## Refused\n"]
        parts += [f"- {_label(row)}: {_cell(row['flashmem']['refused'])}" for row in refused]
    return "\n".join(parts) + "\n"


def _missing(row: Row) -> str:
    """Why there is no file with an answer to compare with, empty if there is one."""
    return str(row.get("not_made") or row.get("unreadable") or "")


def _verdict(row: Row) -> str:
    """The worse of the two answers."""
    if "failed" in row:
        return "failed"
    if "refused" in row["flashmem"]:
        return "refused"
    answers = [row["flashmem"], row["budgeted"]]
    if not all(answer.get("right") for answer in answers):
        return "wrong"
    loose = row["spread"] > _DECIDED and max(answer["error"] for answer in answers) > TOLERANCE["fp32"]
    return "undecided" if loose else "right"


def _count(rows: Sequence[Row]) -> str:
    counted = Counter(map(_verdict, rows))
    kinds = ["right", "refused", "wrong", *(kind for kind in ("undecided", "failed") if counted[kind])]
    return ", ".join(f"{counted[kind]} {kind}" for kind in kinds)


def _label(row: Row) -> str:
    return row["file"] if row["maker"] is None else f"{row['file']}, {row['maker']}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _table(rows: Sequence[Row]) -> str:
    head = [
        "| file | file, MB | weights, MB | budget, MB | answers | error | first, ms | later, ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join(head + [_row(row) for row in sorted(rows, key=_label)])


def _row(row: Row) -> str:
    verdict = _verdict(row)
    size = f"{row['bytes'] / 1e6:.2f}"
    if verdict in ("failed", "refused"):
        reference = "" if verdict == "failed" else f" / / {1e3 * row['first']:.1f}"
        later = "" if verdict == "failed" else f" / / {1e3 * row['later']:.2f}"
        return f"| {_label(row)} | {size} | | | {verdict} | | {reference} | {later} |"
    plain, budgeted = row["flashmem"], row["budgeted"]
    error = max(plain["error"] or 0, budgeted.get("error") or 0)
    mark = " ≈" if error > TOLERANCE["fp32"] else ""
    if row.get("plain"):
        mark += " †"
    if row["own"] is not None:
        mark += f" § {row['own']:.1e}"
    more = " ‡" if budgeted["budget"] > row["wanted_budget"] else ""
    times = [
        " / ".join(f"{1e3 * engine[kind]:.{digits}f}" for engine in (plain, budgeted, row))
        for kind, digits in (("first", 1), ("later", 2))
    ]
    return (
        f"| {_label(row)} | {size} | {row['weights'] / 1e6:.2f} | {budgeted['budget'] / 1e6:.2f}{more} | {verdict} | "
        f"{error:.1e}{mark} | {times[0]} | {times[1]} |"
    )
