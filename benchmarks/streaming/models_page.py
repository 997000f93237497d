"""The text of docs/research/models.md, generated from the rows in docs/research/models.json."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.processes import Row

_DEVICES = {"pocl": "PoCL", "intel-cpu": "Intel's OpenCL on a CPU", "nvidia": "NVIDIA GPU"}

_INTRODUCTION = """# The models, measured

Written by `python -m benchmarks.streaming.models` from docs/research/models.json; see there (`--help`) how each number is
found, and how rows are added. Weights are seeded, fp32 and streamed in the device's own transfer mode within the budget beside
the times.

- *parameters*: floating point numbers in the file, in millions; *multiply-adds* of one answer, in 10⁹; *layers*: kernel
  launches, and the distinct kernels among them; *weights*: what a plan streams or preloads.
- *smallest budget* for which a plan exists; *budget* of the runs; *peak*: the most that was held on the device and in host
  staging together, as the ledger counted; *preloaded*: the share of the weights that is resident from the start.
- *first answer*: from opening the bundle to the outputs, its weights dropped from the page cache (cold) or in it (cached);
  *later*: the next answers of that session. Medians of as many fresh processes as the column *rounds* says.
  Others use these machines too: times of one day compare, those of different days differ by half and more.
- *error*: the largest difference from ONNX Runtime, over the range of the output.
"""

_HEAD = (
    "model", "size", "parameters, M", "multiply-adds, G", "layers / kernels", "weights, MB", "smallest budget, MB",
    "budget, MB", "peak, MB", "preloaded", "first cold, s", "first cached, s", "later, s", "rounds", "error", "measured",
)  # fmt: skip


def page(rows: Sequence[Row], order: Sequence[str]) -> str:
    """The page; models as in `order`, one table for each device, with the machines and versions below it."""
    parts = [_INTRODUCTION]
    for device in dict.fromkeys(row["device"] for row in rows):
        own = sorted((row for row in rows if row["device"] == device), key=lambda row: order.index(row["model"]))
        parts.append(f"## {_DEVICES.get(device, device)}\n")
        notes = list(dict.fromkeys(map(_circumstances, own)))
        lines = ["| " + " | ".join(_HEAD) + " |", "|" + "---|" * len(_HEAD)]
        lines += ["| " + " | ".join((*_cells(row), _mark(row, notes))) + " |" for row in own]
        parts.append("\n".join(lines) + "\n")
        parts.append("\n".join(f"{number}. {note}" for number, note in enumerate(notes, 1)) + "\n")
    return "\n".join(parts)


def _mark(row: Row, notes: list[str]) -> str:
    return f"{row['date']} ({notes.index(_circumstances(row)) + 1})"


def _circumstances(row: Row) -> str:
    """The machine, and the origin of the file."""
    versions = ", ".join(f"{name} {number}" for name, number in row["versions"].items())
    exported = f"exported ({row['exporter'] or 'exporter unknown'}) with {versions}" if versions else "exporter unknown"
    return f"{row['machine']}; flashmem {row['flashmem']}; {exported}."


def _cells(row: Row) -> tuple[str, ...]:
    error = "not finite" if row["error"] is None else f"{row['error']:.1e}"
    return (
        row["model"], str(row["size"] or ""), f"{row['parameters'] / 1e6:.1f}", f"{row['macs'] / 1e9:.1f}",
        f"{row['layers']} / {row['kernels']}", _mb(row["weights"]), _mb(row["smallest"]), _mb(row["budget"]), _mb(row["peak"]),
        f"{row['preload']:.0%}", _seconds(row["cold"]), _seconds(row["cached"]), _seconds(row["later"]), str(row["rounds"]),
        error,
    )  # fmt: skip


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:.0f}" if nbytes >= 10**7 else f"{nbytes / 1e6:.2g}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds >= 10 else f"{seconds:.3g}"
