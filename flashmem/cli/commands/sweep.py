"""`flashmem sweep`: measure or simulate a grid of limits and parameters over models and devices."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import groupby
from typing import get_args

from flashmem.base.errors import MissingFileError, RunError, UserError
from flashmem.base.extras import offline_half
from flashmem.base.files import check_target
from flashmem.base.streams import say
from flashmem.base.types import Precision
from flashmem.base.units import parse_shape, parse_size
from flashmem.cli.calls.devices import SweepCommand
from flashmem.cli.commands.temporary_cache import have_cache
from flashmem.cli.output.console import ProgressCallback, progress
from flashmem.schedule.modes import INTERLEAVE, MODES
from flashmem.schedule.objectives import AUTO, KINDS, PAPER
from flashmem.tools.sweep.grid import Grid, Point, Row, numbers, sizes, words
from flashmem.tools.sweep.results import ResultFile, read_rows
from flashmem.tools.sweep.settings import FIXED_BY_BUNDLES, combinations
from flashmem.tools.zoo.names import architecture


def grid_of(options: SweepCommand) -> Grid:
    """The axes of the grid. Raises UserError for invalid text."""
    options = as_the_paper(options) if options.paper else options
    if options.m_peak is None and options.budget is None:
        raise UserError("a sweep needs limits; give --m-peak 64MB,128MB,... or --budget 64MB,128MB,...")
    for model in options.models:
        if architecture(model) is None and not model.exists():
            raise MissingFileError(f"{model}: no such file; name an .onnx model, a bundle, or zoo:NAME")
    for text in options.shape:
        parse_shape(text)
    mus = numbers(options.mu, "--mu", low=0, high=float("inf"))
    bundle = next((model for model in options.models if model.is_dir()), None)
    if bundle is not None and len(set(mus)) > 1:
        raise UserError(f"layers were split when {bundle} was compiled: name the .onnx model, or give --mu one value")
    for text in options.vary:
        if bundle is not None and text.partition("=")[0] in FIXED_BY_BUNDLES:
            raise UserError(f"layers were split when {bundle} was compiled: name the .onnx model, or leave out --vary {text}")
    return Grid(
        models=[str(model) for model in options.models],
        devices=words(options.device, "--device"),
        precisions=words(options.precision, "--precision", get_args(Precision)),
        m_peaks=sizes(options.m_peak, "--m-peak"),
        budgets=sizes(options.budget, "--budget"),
        lambdas=None if options.lambda_ is None else numbers(options.lambda_, "--lambda", low=0, high=1),
        mus=mus,
        shape=" ".join(sorted(options.shape)),
        chunk_bytes=0 if options.chunk == "auto" else parse_size(options.chunk, what="--chunk"),
        objectives=words(options.objective, "--objective", (AUTO, *KINDS)),
        modes=words(options.mode, "--mode", ("auto", *MODES)),
        settings=combinations(options.vary),
        disk=options.disk,
        source="measured" if options.measured else "simulated",
    )


_PAPER = {
    "m_peak": "500MB", "lambda_": "0.9", "objective": PAPER.name, "mode": INTERLEAVE.name,
}  # fmt: skip
_PAPER_VARIED = ("units=printed", "unfusion=yes", "solver=cp-sat")
"""The paper's reading: limits of its section 5, its weighted sum in chunks and layers, kernels that copy while they compute."""


def as_the_paper(options: SweepCommand) -> SweepCommand:
    """`options` with the paper's reading of those that were not given."""
    unset = {name: value for name, value in _PAPER.items() if name not in options.given}
    if options.budget is not None:
        unset.pop("m_peak", None)
    given = {text.partition("=")[0] for text in options.vary}
    vary = (*options.vary, *(text for text in _PAPER_VARIED if text.partition("=")[0] not in given))
    return options.replace(**unset, vary=vary, paper=False)


def sweep(options: SweepCommand) -> None:
    """Compute the points that the file lacks, append a row for each, and draw the plots.

    Raises:
        UserError: a file or an option is invalid.
        RunError: some points could not be measured; all others are in the file.
    """
    points = grid_of(options).points()
    check_target(options.output, "--output")
    if options.measured:
        have_cache()
    if options.plot is not None:
        check_target(options.plot, "--plot")
        from flashmem.tools.plots.figure import require_matplotlib

        require_matplotlib()
    with ResultFile(options.output) as file:
        pending = [point for point in points if not file.has(point)]
        if len(pending) < len(points):
            say(f"{len(points) - len(pending)} of {len(points)} points are in {options.output} already")
        failed = _do(pending, file, options) if pending else []
    _conclude(options)
    if failed:
        raise RunError(f"{len(failed)} of {len(pending)} points could not be measured, the first because {failed[0]}")


def _do(pending: list[Point], file: ResultFile, options: SweepCommand) -> list[str]:
    """Compute the points; returns the reasons why some could not be measured."""
    with progress("sweeping") as report:
        work = _Work(pending, file, report)
        _refuse_early(work)
        if options.measured:
            return _measure(work, options.runs)
        _simulate(work, options)
        return []


class _Work:
    """The points to compute, grouped by subject, and the progress."""

    def __init__(self, points: list[Point], file: ResultFile, report: ProgressCallback) -> None:
        self._points = points
        self._file = file
        self._report = report
        self._finished = 0

    def groups(self) -> list[tuple[str, list[Point]]]:
        """The points of each subject, with its title."""

        def subject(point: Point) -> tuple[str, ...]:
            return point.model, point.device, point.precision, point.mode

        return [(", ".join(key), list(points)) for key, points in groupby(self._points, subject)]

    def begin(self, stage: str) -> None:
        """Show the current stage."""
        self._report(stage, self._finished / len(self._points))

    def finish(self, stage: str, row: Row | None) -> None:
        """Count a finished point; `row` is None if it failed."""
        if row is not None:
            self._file.add(row)
        self._finished += 1
        self.begin(stage)


def _refuse_early(work: _Work) -> None:
    """Raise UserError for an invalid subject before hours are spent on others."""
    with offline_half("planning"):
        from flashmem.tools.sweep.subjects import target_of
    for _, points in work.groups():
        target_of(points[0])


def _simulate(work: _Work, options: SweepCommand) -> None:
    from flashmem.tools.sweep.points import simulated
    from flashmem.tools.sweep.subjects import subject_of

    with _processes(options.jobs or max(1, (os.cpu_count() or 1) // 2)) as pool:  # the solver has threads of its own
        for name, points in work.groups():
            work.begin(name)
            subject = subject_of(points[0])
            try:
                for future in as_completed([pool.submit(simulated, subject, point) for point in points]):
                    work.finish(name, future.result())
            except BrokenProcessPool as error:
                raise RunError(
                    "a process of the pool was ended from outside, for lack of memory perhaps; finished points are kept, "
                    "so run the sweep again, with fewer --jobs"
                ) from error


@contextmanager
def _processes(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """A pool that forgets what has not begun when the body fails. Spawned, not forked: this process has threads."""
    pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _measure(work: _Work, runs: int) -> list[str]:
    """Measure one point at a time, so that measurements do not disturb each other; returns the reasons of failures."""
    from flashmem.tools.sweep.points import measured
    from flashmem.tools.sweep.subjects import subject_of

    failed = []
    for name, points in work.groups():
        work.begin(name)
        subject = subject_of(points[0])
        for point in points:
            row = None
            try:
                row = measured(subject, point, runs)
            except RunError as error:
                failed.append(str(error))
            work.finish(name, row)
    return failed


def _conclude(options: SweepCommand) -> None:
    rows = read_rows(options.output)
    infeasible = sum(row["status"] == "infeasible" for row in rows)
    say(f"{len(rows)} points in {options.output}" + (f", {infeasible} of them infeasible" if infeasible else ""))
    if options.plot is not None:
        from flashmem.tools.plots.sweep import draw_sweep

        for path in draw_sweep(options.plot, rows):
            say(f"drew {path}")
