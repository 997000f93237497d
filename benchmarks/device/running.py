"""Batches of random graphs of layouts on a device: one model of many graphs, whose kernels are built together."""

from __future__ import annotations

import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

import flashmem
from benchmarks.device.drawing import Drawing, difference, joined
from benchmarks.device.layouts import drawn
from flashmem.base.errors import FlashmemWarning, RunError, UserError
from flashmem.base.types import MemoryPath, Precision, TransferMode

RUNS = 2
"""Of each session: later runs have other kernels, and loads that began in the run before."""


@dataclass
class Outcome:
    """The numbers of cases that were right, wrong, failed or refused; and a line about each that was not right."""

    counts: Counter[str] = field(default_factory=Counter)
    lines: list[str] = field(default_factory=list)

    def add(self, kind: str, line: str = "", cases: int = 1) -> None:
        """Count cases, with a line about them."""
        self.counts[kind] += cases
        if line:
            self.lines.append(f"{kind}: {line}")


@dataclass(frozen=True)
class Batch:
    """Graphs `first` to `first + count` of a seed, in one model, with its weights on one path in one transfer mode."""

    device: str
    seed: int
    first: int
    count: int
    precision: Precision
    path: MemoryPath
    mode: TransferMode
    large: bool
    findings: Path

    def __str__(self) -> str:
        return (
            f"graphs {self.first}-{self.first + self.count - 1} of seed {self.seed}, {self.precision}, {self.path}, {self.mode}"
        )


def play(batch: Batch) -> Outcome:
    """Draw the graphs of a batch, compile and run them, and compare every output."""
    warnings.simplefilter("ignore", FlashmemWarning)
    graphs = [drawn(batch.seed, batch.first + index, batch.precision, large=batch.large) for index in range(batch.count)]
    outcome = Outcome()
    for graph, kind, line in _judged(graphs, batch):
        outcome.add(kind, f"{line} ({batch})" if line else "")
        if kind in ("wrong", "failed"):
            _save(graph, line, batch.findings / f"{batch.seed}-{graph.prefix}{batch.precision}-{batch.path}-{batch.mode}")
    return outcome


def _judged(graphs: Sequence[Drawing], batch: Batch) -> Iterator[tuple[Drawing, str, str]]:
    """Each graph, whether it was right, and why not. Graphs of a model that fails are judged alone."""
    try:
        answers = _answers(graphs, batch)
    except Exception as error:
        if len(graphs) > 1:
            alone = [found for graph in graphs for found in _judged([graph], batch)]
            if all(kind == "right" for _, kind, _ in alone):
                alone[0] = (graphs[0], "failed", f"only together with others: {_described(error)}")
            yield from alone
        else:
            yield graphs[0], "refused" if isinstance(error, UserError) else "failed", f"{graphs[0].prefix}: {_described(error)}"
        return
    for graph in graphs:
        wrong = [
            f"run {number + 1}: {apart}"
            for number, run in enumerate(answers)
            for output in graph.outputs
            if (apart := difference(output, run[output.name]))
        ]
        yield graph, "wrong" if wrong else "right", "; ".join(wrong)


def _answers(graphs: Sequence[Drawing], batch: Batch) -> list[dict[str, NDArray[Any]]]:
    """The outputs of all graphs in each run."""
    feeds = {name: array for graph in graphs for name, array in graph.feeds.items()}
    with tempfile.TemporaryDirectory(prefix="flashmem-") as folder:
        file = Path(folder) / "model.onnx"
        onnx.save(joined(graphs), file)
        place: Any = {"device": batch.device, "memory_path": batch.path, "mode": batch.mode, "precision": batch.precision}
        bundle = flashmem.compile(file, file.with_suffix(".flashmem"), build=False, **place)
        with flashmem.Session(bundle, device=batch.device, mode=batch.mode, build_apart=False) as session:
            names = [output.name for graph in graphs for output in graph.outputs]
            return [dict(zip(names, session.run(names, feeds), strict=True)) for _ in range(RUNS)]


def _described(error: Exception) -> str:
    said = " ".join(str(error).split())[:300]
    if isinstance(error, UserError | RunError):
        return said
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {said} ({Path(place.filename).name}:{place.lineno})"


def _save(graph: Drawing, line: str, folder: Path) -> None:
    """Write a graph that is not right: the model, its inputs and what was expected with the bounds of errors."""
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(joined([graph]), folder / "model.onnx")
    np.savez(folder / "inputs.npz", **graph.feeds)  # type: ignore[arg-type]
    expected = {f"{output.name}.{what}": getattr(output.known, what) for output in graph.outputs for what in ("exact", "error")}
    np.savez(folder / "expected.npz", **expected)
    (folder / "finding.txt").write_text(f"{line}\n", encoding="utf-8")
