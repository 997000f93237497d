"""`flashmem queue`: requests to several models under one budget."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from flashmem.base.errors import MissingFileError, UserError
from flashmem.base.files import check_target
from flashmem.base.units import format_size
from flashmem.bundle.bundle import Bundle
from flashmem.cli.calls.bundles import QueueCommand
from flashmem.cli.output.console import emit_json, print_facts, print_table
from flashmem.runtime.engine.inputs import complete_inputs
from flashmem.runtime.serving.requests import Answer
from flashmem.runtime.serving.runtime import Runtime
from flashmem.runtime.session import Session
from flashmem.tools.turnaround import fairness, normalised_progress, normalised_turnaround, system_throughput

_ALONE = 3
"""The most runs of each model alone."""


@dataclass(frozen=True)
class TimedRequest:
    """A request for `model` (its index among the bundles) `at` seconds after the start, with inputs drawn from `seed`."""

    model: int
    at: float
    seed: int


def play_queue(options: QueueCommand) -> None:
    """Run the requests and print their latencies and memory.

    Raises:
        UserError: a bundle, the budget or the trace is wrong.
        RunError: a run failed.
    """
    if options.plot is not None:
        check_target(options.plot, "--plot")
        from flashmem.tools.plots.figure import require_matplotlib

        require_matplotlib()
    bundles = [Bundle.open(path) for path in options.bundles]
    names = _names(options.bundles)
    if options.trace is None:
        order = [number for number in range(len(bundles)) for _ in range(options.iterations)]
        random.Random(options.seed).shuffle(order)
        requests = [TimedRequest(number, 0.0, options.seed) for number in order]
    else:
        requests = read_trace(options.trace, names, options.seed)
    _alone(bundles[0], options, 1)  # a process's first answer includes the driver's setup
    alone = [
        _alone(bundle, options, min(_ALONE, sum(request.model == number for request in requests)))
        for number, bundle in enumerate(bundles)
    ]
    answers, over_time, peak = _play(bundles, requests, options)
    report = _report(names, requests, answers, alone, options, peak)
    if options.plot is not None:
        from flashmem.tools.plots.queue import draw_queue

        rows = {"one budget": over_time, "each model preloaded": _memory_when_preloaded(bundles, requests, options.device)}
        draw_queue(options.plot, rows, report["budget_bytes"])
    if options.json:
        emit_json(report)
        return
    lines = [
        (name, len(model["latencies"]), f"{model['alone']:.3f}", f"{mean(model['latencies']):.3f}", f"{model['ntt']:.2f}")
        for name, model in report["models"].items()
    ]
    print_table(("model", "requests", "alone, s", "latency, s", "NTT"), lines)
    print_facts(
        {
            "all answered in": f"{report['seconds']:.3f} s",
            "system throughput": f"{report['stp']:.2f}, of {len(lines)} models",
            "fairness": f"{report['fairness']:.2f}",
            "peak memory": format_size(peak),
        }
    )


def read_trace(path: Path, names: Sequence[str], seed: int) -> list[TimedRequest]:
    """Read the requests in a JSON file, sorted by time. A model is named by its bundle or by its index from 0.

    Raises:
        MissingFileError: no such file.
        UserError: not a list of requests, or an unknown model.
    """
    if not path.is_file():
        raise MissingFileError(f"{path}: no such trace")
    how = 'give a list of {"model": NAME, "at": seconds, "seed": number}'
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a trace ({error}); {how}") from error
    if not isinstance(rows, list) or not rows:
        raise UserError(f"{path} holds no requests; {how}")
    requests = []
    for number, row in enumerate(rows):
        model = row.get("model") if isinstance(row, dict) else None
        at = names.index(model) if model in names else model
        if type(at) is not int or not 0 <= at < len(names):
            raise UserError(f"{path}: request {number} is for {model!r}; name one of: {', '.join(names)}")
        when = row.get("at", 0.0)
        chosen = row.get("seed", seed)
        if type(when) not in (int, float) or not 0 <= when < float("inf") or type(chosen) is not int or chosen < 0:
            raise UserError(f"{path}: request {number} has no sensible time or seed; {how}")
        requests.append(TimedRequest(at, float(when), chosen))
    return sorted(requests, key=lambda request: request.at)


def _names(paths: Sequence[Path]) -> list[str]:
    names = [path.stem for path in paths]
    return [name if names.count(name) == 1 else f"{name}#{number}" for number, name in enumerate(names)]


def _alone(bundle: Bundle, options: QueueCommand, runs: int) -> float:
    """The average latency in seconds of a model that uses the whole budget."""
    with Runtime(options.budget, device=options.device, host_budget=options.host_budget) as runtime:
        model = runtime.open(bundle)
        seconds = []
        for number in range(runs):
            inputs = complete_inputs(bundle.program, {}, options.seed + number)
            begun = time.perf_counter()
            model.run(None, inputs)
            seconds.append(time.perf_counter() - begun)
        return mean(seconds) if seconds else 0.0


def _play(
    bundles: Sequence[Bundle], requests: Sequence[TimedRequest], options: QueueCommand
) -> tuple[list[Answer], list[tuple[float, int]], int]:
    with Runtime(options.budget, device=options.device, host_budget=options.host_budget) as runtime:
        models = [runtime.open(bundle) for bundle in bundles]
        answers = []
        begun = time.perf_counter()
        for request in requests:
            inputs = complete_inputs(bundles[request.model].program, {}, request.seed)
            time.sleep(max(0.0, request.at - (time.perf_counter() - begun)))
            answers.append(models[request.model].submit(inputs))
        wait(answers)
        for answer in answers:
            if (error := answer.exception()) is not None:
                raise error
        return answers, [(at - begun, held) for at, held in runtime.over_time()], runtime.peak


def _report(
    names: Sequence[str],
    requests: Sequence[TimedRequest],
    answers: Sequence[Answer],
    alone: Sequence[float],
    options: QueueCommand,
    peak: int,
) -> dict[str, Any]:
    begun = answers[0].submitted
    models: dict[str, dict[str, Any]] = {}
    progress = []
    for number, name in enumerate(names):
        asked = zip(requests, answers, strict=True)
        latencies = [answer.finished - answer.submitted for request, answer in asked if request.model == number]
        if not latencies:
            continue
        models[name] = {
            "alone": alone[number],
            "latencies": latencies,
            "ntt": normalised_turnaround(alone[number], mean(latencies)),
        }
        progress.append(normalised_progress(alone[number], mean(latencies)))
    return {
        "budget_bytes": options.budget if isinstance(options.budget, int) else None,
        "peak_bytes": peak,
        "seconds": max(answer.finished for answer in answers) - begun,
        "models": models,
        "stp": system_throughput(progress),
        "fairness": fairness(progress),
        "requests": [
            {
                "model": names[request.model],
                "submitted": answer.submitted - begun,
                "started": answer.started - begun,
                "finished": answer.finished - begun,
            }
            for request, answer in zip(requests, answers, strict=True)
        ],
    }


def _memory_when_preloaded(bundles: Sequence[Bundle], requests: Sequence[TimedRequest], device: str) -> list[tuple[float, int]]:
    """Memory over time if each model is fully loaded for its request, and freed before the next request."""
    begun = time.perf_counter()
    over_time = list[tuple[float, int]]()
    session: Session | None = None
    last = -1
    try:
        for request in requests:
            if request.model != last:
                if session is not None:
                    session.close()
                    over_time.append((time.perf_counter() - begun, 0))
                session = Session(bundles[request.model], device=device, strategy="preload")
                last = request.model
            assert session is not None
            session.run(None, complete_inputs(bundles[request.model].program, {}, request.seed))
            report = session.last_run
            assert report is not None
            over_time += [(at - begun, held) for at, held in report.memory.over_time]
    finally:
        if session is not None:
            session.close()
    return [*over_time, (time.perf_counter() - begun, 0)]
