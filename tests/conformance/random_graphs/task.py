"""One graph of the command: arguments and result of a worker process."""

from __future__ import annotations

import random
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

from . import graph, values
from .judge import Precision, judge, save
from .listed import listed


@dataclass(frozen=True)
class Task:
    """One graph to judge."""

    seed: int
    index: int
    device: str
    path: str
    folder: str
    precision: Precision = "fp32"

    @property
    def name(self) -> str:
        """The name of its finding."""
        return f"{self.seed}-{self.index}-{self.device}-{self.path}-{self.precision}"


@dataclass(frozen=True)
class Result:
    """The result of a task. `doubts` are the nodes that were rejected because the evaluators disagree."""

    kind: str
    reasons: tuple[str, ...]
    culprit: str
    nodes: int
    doubts: tuple[tuple[str, int], ...]
    drawing_seconds: float


def work(task: Task) -> Result:
    """Draw and judge one graph, in a worker."""
    begun = time.monotonic()
    values.disagreements.clear()
    values.set_precision(task.precision)
    rng = random.Random(f"{task.seed} {task.index}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy's warnings about the computations of a graph
        drawn = graph.draw(rng, rng.randint(5, 20), listed)
        seconds = time.monotonic() - begun
        verdict = judge(drawn, task.device, task.path, task.precision)
    if verdict.kind in ("wrong", "traceback"):
        about = f"seed {task.seed} graph {task.index} {task.device} {task.path} {task.precision}"
        save(drawn, verdict, Path(task.folder) / task.name, about)
    doubts = tuple(values.disagreements.items())
    return Result(verdict.kind, verdict.reasons, verdict.culprit, len(drawn.model.graph.node), doubts, seconds)
