"""How good boosters of phones' GPU families are on what they were not trained on, beside other estimates.

    python -m benchmarks.planning.boosters [adreno7xx ...] [--devices DIR]

The truth is the pipeline model of compiled code (docs/research/boosters.md): no phone was measured. Three things are held
out in turn: a fifth of the kernels' texts, each model, and one GPU, whose facts no training pair has (its kernels are the
same). Latency: the median and the mean error of launches alone, in their own shapes on shipped GPUs. C_l: the share within 25 %
of the truth, of launches whose class allows some, in `alias` and in `interleave`. The lookup is the table of counted kernel
configs (`benchmarks.paper.lookup`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.command import Arguments, run_command
from benchmarks.paper.lookup import CompiledCode
from flashmem.base.types import TransferMode
from flashmem.planning.capacity.classes import DEFAULT
from flashmem.planning.capacity.family import FamilyPredictor
from flashmem.planning.capacity.features import LaunchFeatures
from flashmem.planning.capacity.model import CapacityModel
from flashmem.planning.capacity.roofline import Roofline
from flashmem.profiler.dataset import SAMPLE
from flashmem.profiler.phone_compilers.boosters import gpus_of
from flashmem.profiler.phone_compilers.compiled_dataset import SUFFIX, KernelRow, read_rows, texts_of
from flashmem.profiler.phone_compilers.families import FAMILIES, Family
from flashmem.profiler.phone_compilers.pairs import Pair, pairs
from flashmem.profiler.phone_compilers.training import train
from flashmem.program.launches import KernelShape, Launch
from flashmem.target.descriptor import load_descriptor

MODES: tuple[TransferMode, ...] = ("alias", "interleave")
WITHIN = 0.25
_FOLDS = 5
_MOST_SLOWDOWN = 6.0


@dataclass(frozen=True)
class Judged:
    """Predictions of one model, or reference, for held-out pairs: (truth, predicted)."""

    seconds: list[tuple[float, float]]
    capacities: dict[TransferMode, list[tuple[float, float]]]

    def cells(self) -> list[str]:
        """Median and mean error of latency; C_l within 25 % in each mode."""
        errors = [abs(found / true - 1) for true, found in self.seconds]
        within = [
            f"{np.mean([abs(found - true) <= WITHIN * true for true, found in self.capacities[mode]]):.0%}" for mode in MODES
        ]
        return [f"{np.median(errors):.1%} / {np.mean(errors):.1%}", *within]


def launch_of(features: LaunchFeatures) -> Launch:
    """A launch with these features, for models that are asked for launches."""
    shape = {name: getattr(features, name) for name in KernelShape.__dataclass_fields__}
    sizes = (features.across, max(1, features.items // max(1, features.across)))
    return Launch(
        "", "", sizes, (features.group,), (), features.operator_class, (), features.macs, features.bytes, KernelShape(**shape)
    )


def true_capacity(pair: Pair, mode: TransferMode, slowdown: float) -> float:
    """C_l of the pipeline model, in bytes."""
    model, limit = pair.model, (1 + slowdown) * pair.model.seconds(pair.launch)
    low, high = 0.0, _MOST_SLOWDOWN * pair.gpu.last[mode] * pair.model.seconds(pair.launch)
    if model.loaded_seconds(pair.launch, high, mode) <= limit:
        return high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if model.loaded_seconds(pair.launch, middle, mode) <= limit else (low, middle)
    return low


Capacity = Callable[[Pair, TransferMode, float], float]
"""Bytes within a slowdown."""


def judged(held: Sequence[Pair], seconds: Callable[[Pair], float], capacity: Capacity) -> Judged:
    """Compare predictions with the pipeline model."""
    alone = [(pair.model.seconds(pair.launch), seconds(pair)) for pair in held]
    found: dict[TransferMode, list[tuple[float, float]]] = {mode: [] for mode in MODES}
    for pair, (true_seconds, _) in zip(held, alone, strict=True):
        threshold = DEFAULT.slowdown(pair.launch.operator_class)
        for mode in MODES if threshold else ():
            most = _MOST_SLOWDOWN * pair.gpu.last[mode] * true_seconds
            found[mode].append((true_capacity(pair, mode, threshold), min(capacity(pair, mode, threshold), most)))
    return Judged(alone, found)


def by_booster(known: Sequence[Pair], held: Sequence[Pair]) -> Judged:
    """Train on `known`, and judge on `held`."""
    trees = train(known, "a part of the dataset")

    def model(pair: Pair) -> FamilyPredictor:
        return FamilyPredictor(*trees, pair.gpu, pair.launch.memory_path)

    def capacity(pair: Pair, mode: TransferMode, slowdown: float) -> float:
        return model(pair).streamable_of(pair.launch, slowdown, mode)

    return judged(held, lambda pair: model(pair).seconds_of(pair.launch), capacity)


def by_reference(held: Sequence[Pair], made: Callable[[Pair], CapacityModel]) -> Judged:
    """Judge the roofline or the lookup."""

    def capacity(pair: Pair, mode: TransferMode, slowdown: float) -> float:
        return made(pair).streamable_bytes(launch_of(pair.launch), pair.launch.weight_bytes, slowdown, mode)

    return judged(held, lambda pair: made(pair).seconds(launch_of(pair.launch), pair.launch.weight_bytes), capacity)


def by_lookup(pair: Pair) -> CompiledCode:
    """The lookup for the GPU of a pair."""
    return CompiledCode.load(load_descriptor(pair.device), pair.launch.memory_path)


def splits(family: Family, found: Sequence[Pair]) -> Iterable[tuple[str, list[Pair], list[Pair]]]:
    """What is held out, the pairs to train on, and the held-out ones, in their own shapes on shipped GPUs."""

    def parted(what: str, out: Callable[[Pair], bool]) -> tuple[str, list[Pair], list[Pair]]:
        held = [pair for pair in found if out(pair) and pair.own and pair.device]
        unknown = {pair.row.text for pair in held} if what != "the GPU" else set()
        return what, [pair for pair in found if not out(pair) and pair.row.text not in unknown], held

    texts = sorted({pair.row.text for pair in found})
    last = set(texts[::_FOLDS])
    yield parted("a fifth of the kernels", lambda pair: pair.row.text in last)
    for model in dict.fromkeys(pair.row.origin for pair in found if pair.row.origin != SAMPLE):
        yield parted(model, lambda pair, model=model: pair.row.origin == model)  # type: ignore[misc]
    if len(family.devices) > 1:
        _, known, held = parted("the GPU", lambda pair: pair.device == family.held)
        yield f"the GPU {family.held}", known, held


def rows_of(family: Family, rows: Sequence[KernelRow]) -> Iterable[list[str]]:
    """Rows of the table."""
    gpus = gpus_of(family)
    if len(gpus) > 1:  # drawn GPUs around the held-out one would tell its facts
        shown = {name: gpu for name, gpu in gpus.items() if name != family.held}
        found = [*pairs(rows, shown), *(pair for pair in pairs(rows, {family.held: gpus[family.held]}) if pair.device)]
    else:
        found = list(pairs(rows, gpus))
    for what, known, held in splits(family, found):
        if not held:
            continue
        references = [by_booster(known, held), by_reference(held, lambda pair: Roofline(load_descriptor(pair.device)))]
        if load_descriptor(family.writes).counted:
            references.append(
                by_reference(held, lambda pair: CompiledCode.load(load_descriptor(pair.device), pair.launch.memory_path))
            )
        for name, each in zip(("booster", "roofline", "lookup"), references, strict=False):
            yield [family.name, what, str(len(held)), name, *each.cells()]


def main() -> None:
    """Command line; see the module."""
    parser = Arguments(__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(FAMILIES)}; all by default")
    parser.add_argument("--devices", type=Path, default=Path("devices"), metavar="DIR", help="where the datasets are")
    args = parser.parse_args()
    print("| family | held out | launches | by | latency, median / mean error | C_l within 25 %, alias | interleave |")
    print("|---|---|---|---|---|---|---|")
    for name in args.families or FAMILIES:
        _, rows = read_rows(args.devices / f"{name}{SUFFIX}")
        for row in rows_of(FAMILIES[name], rows):
            print(f"| {' | '.join(row)} |", flush=True)
        print(f"<!-- {name}: {len(rows)} launches of {texts_of(rows)} texts -->")


if __name__ == "__main__":
    run_command(main)
