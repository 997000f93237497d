"""The requirements of an application (`app.toml`): tasks and their models, devices, budgets, and objectives.

Service-level objectives are of two kinds (CARIn, section 4.1): *broad* ones are metrics to minimise or maximise, *narrow* ones
bound a statistic of a metric. If there are only narrow ones, their metrics are the objectives too.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args

from flashmem.base.errors import MissingFileError, UserError
from flashmem.base.types import Precision
from flashmem.base.units import parse_size
from flashmem.target.descriptor import descriptor_names, load_descriptor

Metric = Literal[
    "accuracy", "latency", "first", "throughput", "memory", "size", "workload", "turnaround", "system-throughput", "fairness"
]
Statistic = Literal["average", "deviation", "minimum", "maximum", "p50", "p90", "p95", "p99"]

TOGETHER: tuple[Metric, ...] = ("turnaround", "system-throughput", "fairness")
"""Metrics of all tasks together (CARIn, section 4.1.2); the other metrics belong to one task."""

VARYING: tuple[Metric, ...] = ("latency", "throughput")
"""Metrics that vary between runs, so that a statistic of them must be named; the others have one value."""

BETTER_HIGH: tuple[Metric, ...] = ("accuracy", "throughput", "system-throughput", "fairness")

_NAME = re.compile(r"[\w.-]+")
_SECONDS = re.compile(r"([0-9.]+) *(us|ms|s)")
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Variant:
    """One model that solves a task. `accuracy` is the user's number, higher is better; None if it is not given."""

    path: Path
    precision: Precision
    shapes: Mapping[str, tuple[int, ...]]
    accuracy: float | None

    @property
    def title(self) -> str:
        """The model's name, its precision, and the requested shapes."""
        sizes = ["x".join(map(str, shape)) for shape in self.shapes.values()]
        return "-".join([self.path.parent.name if self.path.stem == "model" else self.path.stem, self.precision, *sizes])


@dataclass(frozen=True)
class Task:
    """A task and the models that solve it."""

    name: str
    variants: tuple[Variant, ...]


@dataclass(frozen=True)
class Processor:
    """A device and its processor. Devices of one processor slow each other: they are one compute engine."""

    device: str
    name: str


@dataclass(frozen=True)
class Measure:
    """A statistic of a metric, of one task or of all (None)."""

    metric: Metric
    statistic: Statistic
    task: str | None

    def __str__(self) -> str:
        words = [self.statistic, self.metric] if self.metric in VARYING else [self.metric]
        return " ".join(words) + (f" of {self.task}" if self.task else "")


@dataclass(frozen=True)
class BroadObjective:
    """A broad objective; `weight` is its importance relative to the others."""

    measure: Measure
    maximise: bool
    weight: float = 1.0


@dataclass(frozen=True)
class Constraint:
    """A narrow objective: at most or at least `bound` (seconds, bytes, or the metric's own unit)."""

    measure: Measure
    at_most: bool
    bound: float


@dataclass(frozen=True)
class Application:
    """The content of `app.toml`. `budgets` in bytes; None is no limit. Without `processors`, all devices of this machine are
    used.
    """

    tasks: tuple[Task, ...]
    processors: tuple[Processor, ...]
    budgets: tuple[int | None, ...]
    objectives: tuple[BroadObjective, ...]
    constraints: tuple[Constraint, ...]


def read_application(path: Path) -> Application:
    """Read an application from a TOML file; docs/how-to/applications.md lists the keys.

    Raises:
        MissingFileError: no such file.
        UserError: the file has an error.
    """
    if not path.is_file():
        raise MissingFileError(f"{path}: no such application")
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not TOML: {error}") from error
    return _Reader(path).application(data)


@dataclass
class _Reader:
    path: Path
    tasks: list[str] = field(default_factory=list)

    def application(self, data: Mapping[str, Any]) -> Application:
        self._known(data, "the top level", "budgets", "task", "device", "objective", "constraint")
        tasks = tuple(self._task(each) for each in self._tables(data, "task"))
        if not tasks:
            raise UserError(f"{self.path} has no [[task]]; name at least one, with its models")
        if len(set(self.tasks)) < len(tasks):
            raise UserError(f"{self.path} has two tasks of one name; each needs its own")
        processors = tuple(self._processor(each) for each in self._tables(data, "device"))
        budgets = tuple(parse_size(each, what="budget") for each in self._list(data, "budgets")) or (None,)
        constraints = tuple(each for table in self._tables(data, "constraint") for each in self._constraint(table))
        objectives = tuple(each for table in self._tables(data, "objective") for each in self._objective(table))
        if not objectives:  # CARIn, section 4.1: the inner functions of the constraints
            objectives = tuple(BroadObjective(each.measure, each.measure.metric in BETTER_HIGH) for each in constraints)
        if not objectives:
            raise UserError(f"{self.path} has no objective; add an [[objective]] or a [[constraint]]")
        measures = [*(each.measure for each in objectives), *(each.measure for each in constraints)]
        self._accuracy_is_given(tasks, measures)
        return Application(tasks, processors, budgets, objectives, constraints)

    def _task(self, table: Mapping[str, Any]) -> Task:
        self._known(table, "[[task]]", "name", "model")
        name = str(self._require(table, "[[task]]", "name"))
        if not _NAME.fullmatch(name):
            raise UserError(f"{self.path}: task {name!r} is part of files' names; use letters, digits, '.', '-' and '_'")
        self.tasks.append(name)
        variants = tuple(each for model in self._tables(table, "model") for each in self._variants(name, model))
        if not variants:
            raise UserError(f"{self.path}: task {name!r} has no [[task.model]]; name at least one")
        titles = [each.title for each in variants]
        for title in titles:
            if titles.count(title) > 1:
                raise UserError(f"{self.path}: task {name!r} has two models {title}; leave one out, or name its file otherwise")
        return Task(name, variants)

    def _variants(self, task: str, table: Mapping[str, Any]) -> list[Variant]:
        where = f"a model of task {task!r}"
        self._known(table, where, "path", "precision", "accuracy", "shape")
        path = self.path.parent / str(self._require(table, where, "path"))
        if not path.is_file():
            raise MissingFileError(f"{self.path}: {where} is {path}, which is no file")
        accuracy = table.get("accuracy")
        precisions = [str(each) for each in self._list(table, "precision")] or ["fp32"]
        for each in precisions:
            if each not in get_args(Precision):
                raise UserError(
                    f"{self.path}: precision {each!r} of {where} is unknown; name one of: {', '.join(get_args(Precision))}"
                )
        shapes = {str(name): tuple(int(size) for size in shape) for name, shape in dict(table.get("shape", {})).items()}

        def of(precision: str) -> float | None:
            found = accuracy.get(precision) if isinstance(accuracy, dict) else accuracy
            return None if found is None else float(found)

        return [Variant(path, cast(Precision, each), shapes, of(each)) for each in precisions]

    def _processor(self, table: Mapping[str, Any]) -> Processor:
        self._known(table, "[[device]]", "name", "processor")
        name = str(self._require(table, "[[device]]", "name"))
        is_cpu = name in descriptor_names() and load_descriptor(name).kind == "cpu"
        return Processor(name, str(table.get("processor", "cpu" if is_cpu else name)))

    def _objective(self, table: Mapping[str, Any]) -> list[BroadObjective]:
        where = "[[objective]]"
        self._known(table, where, "minimise", "maximise", "statistic", "task", "weight")
        goals = [goal for goal in ("minimise", "maximise") if goal in table]
        if len(goals) != 1:
            raise UserError(f'{self.path}: an {where} has one of: minimise = "METRIC", maximise = "METRIC"')
        weight = float(table.get("weight", 1.0))
        if weight <= 0:
            raise UserError(f"{self.path}: the weight of an {where} is {weight:g}; give one above 0")
        measures = self._measures(table, where, str(table[goals[0]]))
        return [BroadObjective(measure, goals[0] == "maximise", weight) for measure in measures]

    def _constraint(self, table: Mapping[str, Any]) -> list[Constraint]:
        where = "[[constraint]]"
        self._known(table, where, "metric", "statistic", "task", "at_most", "at_least")
        bounds = [bound for bound in ("at_most", "at_least") if bound in table]
        if len(bounds) != 1:
            raise UserError(f"{self.path}: a {where} has one of: at_most, at_least")
        measures = self._measures(table, where, str(self._require(table, where, "metric")))
        return [Constraint(each, bounds[0] == "at_most", self._bound(each.metric, table[bounds[0]])) for each in measures]

    def _measures(self, table: Mapping[str, Any], where: str, metric: str) -> list[Measure]:
        if metric not in get_args(Metric):
            raise UserError(f"{self.path}: metric {metric!r} of {where} is unknown; name one of: {', '.join(get_args(Metric))}")
        statistic = str(table.get("statistic", "average"))
        if statistic not in get_args(Statistic):
            names = ", ".join(get_args(Statistic))
            raise UserError(f"{self.path}: statistic {statistic!r} of {where} is unknown; name one of: {names}")
        if "statistic" in table and metric not in VARYING:
            raise UserError(f"{self.path}: {metric} of {where} has one value; leave its statistic out")
        task = table.get("task")
        if task is not None and (metric in TOGETHER or task not in self.tasks):
            raise UserError(
                f"{self.path}: {metric} of {where} is of task {task!r}, "
                + ("but it is of all together; leave the task out" if metric in TOGETHER else "which is unknown")
            )
        known = cast(Metric, metric)
        of = [None] if known in TOGETHER else [str(task)] if task is not None else list(self.tasks)
        return [Measure(known, cast(Statistic, statistic), each) for each in of]

    def _bound(self, metric: Metric, value: Any) -> float:
        if metric in ("memory", "size"):
            return float(parse_size(value, what=metric))
        if isinstance(value, str) and metric in ("latency", "first"):
            found = _SECONDS.fullmatch(value.strip())
            if found is None:
                raise UserError(f"{self.path}: {value!r} is no {metric}; write 100ms or 0.1s")
            return float(found[1]) * _UNITS[found[2]]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"{self.path}: the bound {value!r} of {metric} is not a number")
        return float(value)

    def _accuracy_is_given(self, tasks: Sequence[Task], measures: Sequence[Measure]) -> None:
        asked = {measure.task for measure in measures if measure.metric == "accuracy"}
        for task in tasks:
            for variant in task.variants:
                if task.name in asked and variant.accuracy is None:
                    raise UserError(
                        f"{self.path}: an objective is accuracy, but {variant.path.name} in {variant.precision} "
                        f"of task {task.name!r} has none; give it"
                    )

    def _known(self, table: Mapping[str, Any], where: str, *names: str) -> None:
        for name in table:
            if name not in names:
                raise UserError(f"{self.path}: {name!r} is not known at {where}; there may be: {', '.join(names)}")

    def _require(self, table: Mapping[str, Any], where: str, name: str) -> Any:
        if name not in table:
            raise UserError(f"{self.path}: {where} lacks {name!r}")
        return table[name]

    def _tables(self, table: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
        found = table.get(name, [])
        if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
            raise UserError(f"{self.path}: {name!r} is one table there; write [[{name}]]")
        return found

    def _list(self, table: Mapping[str, Any], name: str) -> list[Any]:
        found = table.get(name, [])
        return found if isinstance(found, list) else [found]
