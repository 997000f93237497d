"""Measures a device: its rates, the launches of models, and sampled ones until the time is spent.

Needs numpy and pyopencl, and compiled launches (`target.Supply`): a phone measures with a kit. Each stage resumes where an
earlier call was killed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields, replace
from datetime import date
from pathlib import Path
from time import perf_counter
from typing import Any

from flashmem.base.errors import RunError
from flashmem.base.files import written_whole
from flashmem.base.types import MemoryPath, TransferMode
from flashmem.planning.capacity.basis import Basis
from flashmem.planning.capacity.features import MAX_RATIO, launch_features
from flashmem.runtime.opencl.device import Device
from flashmem.runtime.opencl.processor import processor_of
from flashmem.schedule.modes import INTERLEAVE
from flashmem.target.descriptor import DeviceDescriptor, Rates

from .bench import Bench, Measured, Pace, Prepared
from .dataset import SAMPLE, SUFFIX, Growing, Row, write_dataset
from .launches import recording_pays
from .rates import MachineRates, lane_contention, measure_rates
from .target import Draw, Supply, Target

Progress = Callable[[str, float], None]

_MODEL_RATIOS = (0.25, 0.5, 1.0, 2.0, MAX_RATIO)
_SAMPLE_RATIOS = (0.12, 0.4, 1.1, MAX_RATIO)
_STEPS_BELOW = 3  # quarters of the least ratio that are measured where C_l is below it
_TOLERATED = 0.20  # what a reusable launch may be slowed down by: see `planning.capacity.model`, which is not on a phone
_MODELS_SHARE = 0.45
OTHER_PATH = 4  # one in so many sampled kernels is measured on a path other than the default
_MOST_REFUSED = 20  # consecutive sampled kernels: then the device is at fault, not the kernels
_LOADED = 5  # one in so many with load: that takes ten times as long, and latency alone needs the most launches


@dataclass(frozen=True)
class ProfileRequest:
    """The request of a profile. `minutes` limits rates and launches over all calls; `seed` determines the sampled kernels."""

    device: str
    output: Path
    minutes: float = 15.0
    name: str = ""  # of the files; "": the descriptor's name
    models: tuple[Path, ...] = ()
    resume: bool = True
    seed: int = 0


LEAST_LAUNCHES = 20
"""The least number of launches from which a predictor can be trained."""


class Measurement:
    """Results of measuring a device, not yet written. `done` removes the files for resuming."""

    def __init__(
        self, device: Device, descriptor: DeviceDescriptor, machine: MachineRates, growing: Growing, seed: int
    ) -> None:
        self.device = device
        self.growing = growing
        self.seed = seed
        contention = dict(machine.rates.contention)
        laned = next((path for path in descriptor.memory_paths if INTERLEAVE.name in descriptor.modes[path]), None)
        if laned is not None:
            in_lanes = lane_contention(growing.rows, machine.mode_rates, laned)
            if in_lanes is not None:
                contention[INTERLEAVE.name] = in_lanes
        rates = replace(machine.rates, contention=contention)
        today = date.today().isoformat()
        self.source = f"flashmem profile, {today}, {device.platform} {device.name}, driver {device.driver_version}"
        self.machine = replace(machine, rates=rates)
        self.basis = Basis(rates.gemm_flops, rates.memory_bandwidth, rates.launch_seconds, machine.mode_rates, self.source)
        self.descriptor = replace(descriptor, rates=rates, measured=True, measured_on=processor_of(device))

    @property
    def about(self) -> dict[str, Any]:
        """Description of the dataset. It includes the descriptor, so that another machine can write it."""
        return {
            "source": self.source,
            "rates": self.machine.to_dict(),
            "basis": vars(self.basis),
            "seed": self.seed,
            "descriptor": self.descriptor.portable.to_dict(),
        }

    def write(self, folder: Path, name: str) -> Path:
        """Write the dataset NAME.profile.csv.gz atomically, and return its path."""
        path = folder / f"{name}{SUFFIX}"
        write_dataset(path, self.about, self.growing.rows)
        return path

    def done(self) -> None:
        """Remove the files for resuming."""
        self.growing.path.unlink()
        _rates_file(self.growing).unlink()


def measure(
    request: ProfileRequest,
    device: Device,
    descriptor: DeviceDescriptor,
    models: Sequence[Sequence[Target]],
    progress: Progress,
    supplies: Callable[[MemoryPath], Supply | None] = lambda path: None,
) -> Measurement:
    """Measure `device` until the time is spent. `supplies`: launches for each memory path; None to compile them here.

    Raises:
        UserError: an interrupted profile of another device or seed exists.
        RunError: the device fails.
    """
    request.output.mkdir(parents=True, exist_ok=True)
    about = {"device": device.key, "seed": request.seed}
    name = request.name or descriptor.name
    growing = Growing(request.output / f".{name}.profile.partial.csv", about, resume=request.resume)
    rates_file = _rates_file(growing)
    if not request.resume:
        rates_file.unlink(missing_ok=True)
    with ExitStack() as stack:
        benches = [
            stack.enter_context(Bench(device, descriptor.on_path(path), request.output, supplies(path)))
            for path in descriptor.memory_paths
        ]
        machine, spent = _kept_rates(rates_file) or _measured_rates(rates_file, benches, request.device, progress)
        descriptor = replace(
            descriptor, command_buffers=recording_pays(benches[0].context, benches[0].queue, descriptor.probed)
        )
        _measure(request, growing, benches, models, spent, progress)
    return Measurement(device, descriptor, machine, growing, request.seed)


def _rates_file(growing: Growing) -> Path:
    return growing.path.with_suffix(".rates.json")


def _kept_rates(file: Path) -> tuple[MachineRates, float] | None:
    """The rates that an earlier call kept, and the seconds they took; None if they are missing, or of another version."""
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        if kept["rates"].keys() != {field.name for field in fields(Rates)}:
            return None
        return MachineRates.from_dict(kept), float(kept["spent"])
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _measured_rates(file: Path, benches: Sequence[Bench], device: str, progress: Progress) -> tuple[MachineRates, float]:
    """Measure the rates; returns them and the seconds they took, and keeps both in `file` for a later call."""
    begun = perf_counter()
    machine = measure_rates(benches, device, lambda what: progress(f"rates ({what})", 0.0))
    spent = perf_counter() - begun
    with written_whole(file) as kept:
        kept.write(json.dumps({"spent": spent, **machine.to_dict()}).encode())
    return machine, spent


def _measure(
    request: ProfileRequest,
    growing: Growing,
    benches: Sequence[Bench],
    models: Sequence[Sequence[Target]],
    spent: float,
    progress: Progress,
) -> None:
    """Measure launches until the time is spent: first those of the models, then sampled ones.

    Raises:
        RunError: the device refuses one sampled kernel after another.
    """
    budget = 60 * request.minutes
    spent += sum(row.spent for row in growing.rows)
    done = growing.cases
    refused = 0
    begun = perf_counter()
    for bench, target, ratios, limit in _plan(request, benches, models):
        if spent >= budget:
            break
        if target is None or target.case in done or spent >= limit * budget:
            continue
        progress(f"{target.origin}: {target.operator}, {bench.path}", min(1.0, spent / budget))
        try:
            rows = _measure_launch(bench, target, ratios, len(done), benches[0].pace)
            refused = 0
        except RunError as error:  # for its size or its kernel: other launches may still work
            rows = []
            refused += target.origin == SAMPLE
            if refused == _MOST_REFUSED:
                raise RunError(f"the device refuses one launch after the other, the last because {error}") from error
        took = perf_counter() - begun  # includes drawing and compiling
        begun += took
        spent += took
        done.add(target.case)
        if rows:
            growing.append([replace(row, spent=took if i == len(rows) - 1 else 0.0) for i, row in enumerate(rows)])


def _plan(
    request: ProfileRequest, benches: Sequence[Bench], models: Sequence[Sequence[Target]]
) -> Iterator[tuple[Bench, Target | None, tuple[float, ...], float]]:
    """Yield (bench, launch, ratios, latest start as a fraction of the time).

    There are as many as the supply has, without end if they are compiled here.
    """
    for i, launches in enumerate(models, start=1):
        for target in launches:
            yield benches[0], target, _MODEL_RATIOS, _MODELS_SHARE * i / len(models)
    index = 0
    most = min((bench.supply.count for bench in benches if bench.supply.count is not None), default=None)
    while most is None or index < most:
        other = len(benches) > 1 and index % OTHER_PATH == OTHER_PATH - 1
        bench = benches[1] if other else benches[0]
        draw = Draw(index, request.seed + 1000)
        ratios = tuple(ratio * (0.6 + 0.4 * draw.unit()) for ratio in _SAMPLE_RATIOS) if index % _LOADED == 0 else ()
        yield bench, bench.supply.sampled(index, request.seed), ratios, 1.0
        index += 1


def _measured_beside(prepared: Prepared, mode: TransferMode, ratios: Sequence[float], own_bytes: int) -> Iterator[Measured]:
    """Measure with load at `ratios`, and at lower ones while the least amount slows the launch down beyond the tolerance.

    C_l is where the slowdown exceeds a threshold; below the least measured amount, it would be pure extrapolation.
    """
    least: Measured | None = None
    for ratio in (*ratios, *(ratios[0] / 4**step for step in range(1, _STEPS_BELOW + 1) if ratios)):
        if ratio < min(ratios) and (least is None or least.slowdown <= 1 + _TOLERATED):
            return
        found = prepared.measure(mode, ratio * own_bytes)
        if found is None or found.streamed_bytes > 1.05 * MAX_RATIO * own_bytes:
            continue
        if ratio < min(ratios) and least is not None and found.streamed_bytes >= least.streamed_bytes:
            return
        least = found if least is None or found.streamed_bytes < least.streamed_bytes else least
        yield found


def _measure_launch(bench: Bench, target: Target, ratios: Sequence[float], number: int, pace: Callable[[], Pace]) -> list[Row]:
    """The rows of one launch: alone, and with load at `ratios` in the path's default mode and in one other mode, in rotation.

    If a mode fails during this launch, its rows end there.

    Raises:
        RunError: the device refuses the launch itself.
    """
    prepared = bench.prepare(target)
    features = launch_features(target.launch, prepared.weight_bytes, bench.path)
    before = pace()
    prepared.measure_alone()
    loaded: list[tuple[TransferMode, Measured]] = []
    if not prepared.too_slow:
        default, *others = bench.descriptor.modes[bench.path]
        modes: list[TransferMode] = [default, *others[number % len(others) :][:1]] if others else [default]
        for mode in modes:
            with suppress(RunError):
                for found in _measured_beside(prepared, mode, ratios, features.own_bytes):
                    loaded.append((mode, found))
    after = pace()
    alone = Row(
        target.origin, target.case, target.operator, features, "none", 0.0, prepared.alone_seconds(), 1.0, 0.0, 0.0,
        (before.gemm + after.gemm) / 2, (before.traffic + after.traffic) / 2,
    )  # fmt: skip
    return [
        alone,
        *(
            replace(alone, mode=mode, streamed_bytes=found.streamed_bytes, slowdown=found.slowdown, spread=found.spread)
            for mode, found in loaded
        ),
    ]
