"""`flashmem tune`: measure a device's configs of contractions, and write the tuning database for the compiler.

Products are measured in the order of their value, all configs of one before the next, and results are saved at once. A call
that is stopped, or has little time, leaves a valid database for its workloads, and the next call continues.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from datetime import date
from math import exp, inf, log
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

from flashmem.base.errors import RunError, UserError
from flashmem.base.files import written_whole
from flashmem.base.types import MemoryPath, Precision
from flashmem.compiler.configs.config import KernelConfig
from flashmem.compiler.configs.listed import configs_of, listed_configs
from flashmem.compiler.configs.workload import TF32, Workload
from flashmem.compiler.kernels.contraction.configs import CODES, SlicedContraction
from flashmem.compiler.kernels.contraction.tensor_cores import CodesContraction, TensorContraction
from flashmem.compiler.lowering.generated import Generated
from flashmem.compiler.selection.configs import candidates, estimates
from flashmem.compiler.selection.tuning_database import SUFFIX, VERSION, Timing, TuningDatabase, parse_database
from flashmem.runtime.opencl.context import CompiledProgram
from flashmem.runtime.opencl.device import Device
from flashmem.runtime.opencl.devices import descriptor_for
from flashmem.runtime.request.options import device_here
from flashmem.target.descriptor import DeviceDescriptor, load_descriptor

from .descriptor import name_table
from .shapes import Attention, Batched, Convolution, Matmul, QuantizedMatmul, RowSoftmax, Shape
from .timing import Stand, generated

Progress = Callable[[str, float], None]
Storage = Literal["float32", "float16", "tf32", "uint4"]
"""`Workload.storage` of measured operators."""

_PRECISIONS: dict[Storage, Precision] = {"float32": "fp32", "float16": "fp16", "tf32": "tf32", "uint4": "fp32"}

_AHEAD = 12  # workloads whose kernels are built while others are measured, if that disturbs nothing
_LONGEST = 0.1  # fraction of the time for one workload, estimated from known rates
_LAUNCHES = 6  # the least launches of each config
_SLOW = 3.0  # times the best config's time: slower ones are not repeated
_SECONDS = 0.025  # device time for each config of a CPU
_ROWS = 3  # on a GPU, timed rows of runs


@dataclass(frozen=True)
class TuningRequest:
    """The request of a tuning. `minutes` limits this call; `families` limits it to these templates, empty for all."""

    device: str
    output: Path | None = None  # None: next to the descriptor's file, if it has one, else the current folder
    minutes: float = 4.0
    families: tuple[str, ...] = ()
    resume: bool = True


@dataclass(frozen=True)
class Case:
    """One workload to measure: an operator on a memory path, with `storage` as in `Workload`."""

    shape: Shape
    path: MemoryPath
    storage: Storage = "float32"

    @property
    def workload(self) -> Workload:
        """The workload for which the compiler selects a config."""
        return self.shape.workload(self.path, self.storage)


@dataclass(frozen=True)
class TuningResult:
    """The result of a call: the database and its file, the descriptor that names it, workloads measured, and cases left."""

    database: TuningDatabase
    path: Path
    descriptor: Path
    measured: int
    left: int


def shapes() -> tuple[Shape, ...]:
    """The measured shapes, the most useful first: sizes of transformers, convolutional networks and UNets at their own rows."""
    return (
        Matmul(128, 768, 768), Matmul(128, 768, 3072), Matmul(1, 768, 3072), Matmul(1024, 1024, 4096),
        Matmul(197, 768, 3072), Matmul(128, 2048, 8192), Convolution(64, 56, 56, 64, (3, 3)), Attention(12, 128, 64),
        Batched(12, 128, 64, 128), Matmul(128, 3072, 768), Matmul(197, 3072, 768), Matmul(197, 768, 768),
        Convolution(256, 14, 14, 256, (3, 3)), Matmul(128, 8192, 2048), Matmul(128, 2048, 2048), Matmul(1, 3072, 768),
        Convolution(128, 28, 28, 128, (3, 3)), Matmul(4096, 320, 320), Matmul(1024, 640, 640), Matmul(256, 1280, 1280),
        Convolution(512, 7, 7, 512, (3, 3)), Attention(12, 197, 64), Batched(12, 197, 64, 197), Batched(12, 197, 197, 64),
        Matmul(1500, 1024, 1024), Matmul(1500, 1024, 4096), Matmul(1500, 4096, 1024), Matmul(4096, 320, 2560),
        Matmul(4096, 1280, 320), Matmul(1024, 640, 5120), Matmul(1024, 2560, 640), Matmul(256, 1280, 10240),
        Matmul(256, 5120, 1280), Matmul(64, 1280, 1280), Matmul(64, 1280, 10240), Matmul(64, 5120, 1280),
        Convolution(256, 56, 56, 64, (1, 1)), Convolution(64, 56, 56, 256, (1, 1)), Convolution(512, 28, 28, 128, (1, 1)),
        Convolution(128, 28, 28, 512, (1, 1)), Convolution(1024, 14, 14, 256, (1, 1)), Convolution(256, 14, 14, 1024, (1, 1)),
        Convolution(2048, 7, 7, 512, (1, 1)), Convolution(512, 7, 7, 2048, (1, 1)),
        Convolution(3, 224, 224, 64, (7, 7), (2, 2)), Convolution(256, 28, 28, 256, (3, 3), (2, 2)),
        Convolution(512, 28, 28, 1024, (1, 1), (2, 2)), Convolution(256, 56, 56, 512, (1, 1), (2, 2)),
        Convolution(320, 64, 64, 320, (3, 3)), Convolution(640, 32, 32, 640, (3, 3)), Convolution(1280, 16, 16, 1280, (3, 3)),
        Convolution(1280, 8, 8, 1280, (3, 3)), Matmul(4096, 4096, 4096), Matmul(128, 768, 50257), Matmul(1, 768, 768),
        Matmul(1, 2048, 8192), Matmul(1, 8192, 2048), Matmul(1, 768, 50257), Matmul(32, 768, 3072), Matmul(32, 2048, 8192),
        Matmul(32, 768, 768), Matmul(77, 768, 640), Attention(8, 4096, 40), Attention(20, 1500, 64), Attention(8, 1024, 80),
        Attention(8, 4096, 40, 77), Batched(8, 4096, 40, 4096), Batched(8, 4096, 4096, 40), Batched(20, 1500, 64, 1500),
        Batched(20, 1500, 1500, 64), Batched(12, 128, 128, 64), Convolution(128, 56, 56, 128, (3, 3), (2, 2)),
        Convolution(512, 14, 14, 512, (3, 3), (2, 2)), Convolution(960, 64, 64, 320, (3, 3)),
        Convolution(80, 1, 3000, 1024, (1, 3)), Convolution(1024, 1, 3000, 1024, (1, 3), (1, 2)),
        Convolution(3, 224, 224, 768, (16, 16), (16, 16)), Attention(32, 2048, 128), Attention(12, 1, 64, 128),
        Attention(16, 1, 128, 1024),
        Attention(8, 256, 160), RowSoftmax(128, 768), RowSoftmax(197, 768), RowSoftmax(1500, 1024), RowSoftmax(4096, 320),
        RowSoftmax(1, 2048), RowSoftmax(32, 40960),
    )  # fmt: skip


_HALVES = (Matmul(128, 768, 3072), Matmul(1024, 1024, 4096), Matmul(1, 768, 3072), Convolution(256, 14, 14, 256, (3, 3)))


_QUANTISED = tuple(
    QuantizedMatmul(rows, *sizes)
    for rows in (1, 8, 32, 128, 4, 16, 64, 512)
    for sizes in ((2048, 2048), (2048, 8192), (8192, 2048), (4096, 4096), (2048, 32000), (768, 768))
)
"""Products of language models: of a token, of tokens that are checked together, and of parts of a prompt."""


def cases(paths: Sequence[MemoryPath], *, halves: bool = False, tf32: bool = False, quantised: bool = False) -> list[Case]:
    """All cases on the device's default path, then those with weights on other paths, then float16 weights and activations.

    `halves`: the device has configs for these alone, so all products and convolutions are measured in half. `tf32`: the same of
    `--precision tf32`. `quantised`: the device has configs for quantised weights in buffers to choose from.
    """
    first, *others = paths
    listed = [Case(shape, first) for shape in shapes()]
    listed += [Case(shape, path) for path in others for shape in shapes() if isinstance(shape, Matmul | Convolution)]
    packed = tuple(shape for shape in shapes() if isinstance(shape, Matmul | Convolution))
    listed += [Case(shape, first, "float16") for shape in dict.fromkeys((*_HALVES, *(packed if halves else ())))]
    listed += [Case(shape, first, TF32) for shape in (packed if tf32 else ())]
    return listed + [Case(shape, "buffer", "uint4") for shape in (_QUANTISED if quantised else ())]


def _rivals(descriptor: DeviceDescriptor, workload: Workload) -> list[KernelConfig]:
    """The configs among which the compiler chooses for `workload`."""
    found = candidates(descriptor, workload)
    if workload.storage not in CODES:
        return list(found)
    return [config for config in found if isinstance(config, CodesContraction | SlicedContraction)]


@dataclass
class _Work:
    """One case with its missing configs and their unfinished kernels. `refused`: why a config cannot run."""

    case: Case
    workload: Workload
    configs: list[KernelConfig]
    refused: dict[str, str] = field(default_factory=dict)  # by the config's name
    made: dict[str, Generated] = field(default_factory=dict)
    building: dict[str, Future[CompiledProgram]] = field(default_factory=dict)


def tune(request: TuningRequest, progress: Progress, every: Iterable[Case] | None = None) -> TuningResult:
    """Measure the missing configs until the time is spent. Each workload is added to NAME.tuned.csv at once.

    `every`: the cases, in order; None for `cases`. `progress(stage, fraction)` is called during the tuning.

    Raises:
        NoDeviceError: no such device.
        UserError: a database of another device exists, or the device lists no configs to choose from.
        RunError: the device is lost; the database contains the results until then.
    """
    begun = perf_counter()
    device = device_here(request.device)
    descriptor, folder = _described(request, device)
    name = descriptor.name
    about = {"device": device.name, "platform": device.platform, "driver": device.driver_version, "version": VERSION}
    database = _Growing(folder / f"{name}{SUFFIX}", about, resume=request.resume)
    units = {config.storage for config in listed_configs(descriptor) if isinstance(config, TensorContraction)}
    listed = list(
        every
        or cases(
            descriptor.memory_paths, halves="float16" in units, tf32=TF32 in units, quantised=CodesContraction.storage in units
        )
    )
    wanted = [
        case
        for case in listed
        if len(_rivals(descriptor, case.workload)) > 1 and (not request.families or case.workload.family in request.families)
    ]
    if not wanted:
        families = " or ".join(request.families) or "anything"
        raise UserError(f"device {name} lists no configs of {families}, so there is nothing to choose; add some to its configs")
    tuner = _Tuner(device, descriptor, database, begun, 60 * request.minutes)
    try:
        measured = tuner.run(wanted, progress)
    finally:
        tuner.close()
    left = sum(bool(database.missing(case.workload, descriptor)) for case in wanted)
    path = name_table(folder, descriptor, name)
    return TuningResult(database.database, database.path, path, measured, left)


def _described(request: TuningRequest, device: Device) -> tuple[DeviceDescriptor, Path]:
    """The descriptor to tune, and the folder of its files; an existing descriptor there is used."""
    own = Path(request.device) if request.device.endswith(".toml") else None
    folder = request.output or (own.parent if own else Path())
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = load_descriptor(str(own)) if own else descriptor_for(device)
    there = folder / f"{descriptor.name}.toml"
    if own is None and there.is_file():
        descriptor = load_descriptor(str(there))
    return descriptor, folder


class _Growing:
    """The unfinished tuning database."""

    def __init__(self, path: Path, about: dict[str, Any], *, resume: bool) -> None:
        """Begin a database, or continue an existing one.

        Raises:
            UserError: it is of another device, or not a database.
        """
        self.path = path
        self._mark = path.with_name(f".{path.name}.now")
        self.database = TuningDatabase({**about, "date": date.today().isoformat()}, [])
        if resume and path.is_file():
            old = parse_database(path.read_text(encoding="utf-8"), str(path))
            if any(old.about.get(key) != value for key, value in about.items()):
                raise UserError(f"{path} was measured on another device or driver; finish it there, or use --fresh")
            self.database = replace(self.database, timings=old.timings)
        if not resume:
            self._mark.unlink(missing_ok=True)

    def missing(self, workload: Workload, descriptor: DeviceDescriptor) -> list[KernelConfig]:
        """The configs not measured on `workload`."""
        known = self.database.workloads.get(workload.kind, {}).get(workload, {})
        return [config for config in _rivals(descriptor, workload) if config.code not in known]

    def add(self, timings: Sequence[Timing]) -> None:
        """Add the missing timings of one workload."""
        self.database = replace(self.database, timings=[*self.database.timings, *timings])
        with written_whole(self.path) as file:
            file.write(self.database.text().encode())

    def under_way(self, workload: Workload, config: KernelConfig) -> str:
        """Record the measurement that is about to run, and return its text."""
        text = f"{workload} {config.code}"
        self._mark.write_text(text, encoding="utf-8")
        return text

    def crashed(self, workload: Workload, config: KernelConfig) -> bool:
        """Whether an earlier process ended during this measurement."""
        try:
            return self._mark.read_text(encoding="utf-8") == f"{workload} {config.code}"
        except OSError:
            return False

    def done(self) -> None:
        """Record that no measurement is running."""
        self._mark.unlink(missing_ok=True)


class _Tuner:
    """Measures cases on a device until the time is spent."""

    def __init__(self, device: Device, descriptor: DeviceDescriptor, database: _Growing, begun: float, budget: float) -> None:
        self._device = device
        self._descriptor = descriptor
        self._database = database
        self._begun = begun
        self._budget = budget
        self._stand = Stand(device)
        self._rates: dict[tuple[str, str], float] = {}  # the best rate seen, FLOP per second, by kind of workload
        # Compiling during a measurement slows a measured CPU down, but not a GPU.
        self._ahead = _AHEAD if device.kind == "gpu" else 1
        self._builders = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="build")

    def close(self) -> None:
        """Stop building, and release all resources."""
        self._builders.shutdown(cancel_futures=True)
        self._stand.close()

    @property
    def _left(self) -> float:
        return self._budget - (perf_counter() - self._begun)

    def run(self, wanted: Sequence[Case], progress: Progress) -> int:
        """Measure all cases; returns the number of measured workloads."""
        waiting: deque[_Work] = deque()
        coming = self._works(wanted)
        done = 0
        while True:
            while len(waiting) < self._ahead and (work := next(coming, None)) is not None:
                waiting.append(work)
            if not waiting or self._left <= 0:
                return done
            work = waiting.popleft()
            progress(f"{work.workload.family} {work.case.shape}, {work.case.path}", 1 - max(0.0, self._left / self._budget))
            timings = self._measured(work)
            if timings is None:
                return done
            self._database.add(timings)
            done += 1

    def _works(self, wanted: Sequence[Case]) -> Iterator[_Work]:
        for case in wanted:
            workload = case.workload
            missing = self._database.missing(workload, self._descriptor)
            rate = self._rates.get(workload.kind, inf)
            longest = _LAUNCHES * len(missing) * case.shape.flops / rate
            if missing and longest <= _LONGEST * self._budget:
                missing.sort(key=estimates(self._descriptor, workload, missing).__getitem__)  # best estimate first
                yield self._begin(_Work(case, workload, missing))

    def _begin(self, work: _Work) -> _Work:
        """Generate and begin to build every config that fits the device."""
        precision = _PRECISIONS[work.case.storage]
        here = self._descriptor.on_path(work.case.path)
        for config in work.configs:
            why = self._too_large(config)
            if not why and self._database.crashed(work.workload, config):
                why = "the process ended while it was measured"
            if not why:
                try:
                    made = generated(work.case.shape.graph(), replace(here, only=config.name), precision)
                    if work.workload.family not in {launch.shape.family for launch in made.program.launches}:
                        why = f"no kernel of the family {work.workload.family}"
                except Exception as error:  # an error of one config must not stop the others
                    why = _sentence(error)
            if why:
                work.refused[config.name] = why
                continue
            work.made[config.name] = made
            work.building[config.name] = self._builders.submit(self._stand.build, made)
        return work

    def _too_large(self, config: KernelConfig) -> str:
        device = self._device
        if 0 < device.max_group_items < config.items:
            return f"work-groups of {config.items}; the device has {device.max_group_items}"
        if 0 < device.local_memory_bytes < config.local_bytes:
            return f"{config.local_bytes} bytes of local memory; the device has {device.local_memory_bytes}"
        return ""

    def _measured(self, work: _Work) -> list[Timing] | None:
        """Timings of all configs of one case; None if the time ran out during it."""
        timings: list[Timing] = []
        best = inf
        known = dict[object, float]()
        # All configs are built before the first one is timed.
        if wait(work.building.values(), timeout=max(0.0, self._left)).not_done:
            return None
        for config in work.configs:
            if self._left <= 0 and work.building:
                return None
            why = work.refused.get(config.name, "")
            seconds = None
            if not why:
                kernel = _kernel(work.made[config.name])
                try:
                    if kernel not in known:
                        self._database.under_way(work.workload, config)
                        known[kernel] = self._seconds(work, config, best)
                    seconds = known[kernel]
                    best = min(best, seconds)
                except Exception as error:
                    why = _sentence(error)
                    self._recover()
            timings.append(Timing(work.workload, config.name, config.code, seconds, why))
        timings, best = self._right(work, timings)
        self._database.done()
        if best < inf:
            rate = work.case.shape.flops / best
            self._rates[work.workload.kind] = max(rate, self._rates.get(work.workload.kind, 0.0))
        return timings

    def _right(self, work: _Work, timings: Sequence[Timing]) -> tuple[list[Timing], float]:
        """The timings, without seconds of configs whose kernels are wrong if they would be chosen; and the best seconds."""
        found = {timing.config: timing for timing in timings}
        while True:
            ran = {name: timing.seconds for name, timing in found.items() if timing.seconds is not None}
            if not ran:
                return list(found.values()), inf
            soonest = min(ran, key=ran.__getitem__)
            made = work.made[soonest]
            try:
                self._stand.checks.refuse_wrong(made.program, made.source)
                return list(found.values()), ran[soonest]
            except RunError as error:
                same = [name for name in ran if _kernel(work.made[name]) == _kernel(made)]
                found |= {name: replace(found[name], seconds=None, note=_sentence(error)) for name in same}

    def _seconds(self, work: _Work, config: KernelConfig, best: float) -> float:
        made = work.made[config.name]
        work.building[config.name].result()
        commands = self._stand.commands(made, self._stand.build(made))
        if self._device.kind == "gpu":
            return max(1e-9, self._stand.time_in_a_row(commands, _ROWS, _SLOW * best))
        return max(1e-9, self._stand.time(commands, _SECONDS, _SLOW * best).seconds)

    def _recover(self) -> None:
        """After a failure, replace a context in which the device refuses everything.

        Raises:
            RunError: the new one fails too; the next process will skip the config that failed.
        """
        if not self._stand.works():
            self._stand.close()
            self._stand = Stand(self._device)
            if not self._stand.works():
                raise RunError("the device refuses everything since a config failed; call flashmem tune again to go on")


def _kernel(made: Generated) -> object:
    """The identity of a kernel: configs cut to a small matrix, or to one they cannot compute, may share a kernel."""
    return made.source.plain, tuple((launch.kernel, launch.global_size, launch.local_size) for launch in made.program.launches)


def _sentence(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return " ".join((text[0] if text else type(error).__name__).split())[:200]


def summary(database: TuningDatabase, descriptor: DeviceDescriptor) -> str:
    """How often each config is the fastest, and the gain of the choice over the plain tile, as one line."""
    wins: Counter[str] = Counter()
    gains = []
    for workloads in database.workloads.values():
        for workload, timings in workloads.items():
            here = {config.code: config.name for config in configs_of(descriptor, workload.family)}
            ran = {code: timing.seconds for code, timing in timings.items() if code in here and timing.seconds is not None}
            if not ran:
                continue
            soonest = min(ran, key=lambda code: ran[code])
            wins[here[soonest]] += 1
            plain = ran.get(next(iter(here)))
            if plain:
                gains.append(log(plain / ran[soonest]))
    if not wins:
        return "nothing ran"
    listed = ", ".join(f"{name} {count}" for name, count in wins.most_common())
    gain = f"; {exp(sum(gains) / len(gains)):.2f} times as fast as the plain tile" if gains else ""
    return f"{sum(wins.values())} products, soonest with {listed}{gain}"
