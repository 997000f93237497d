"""Which config computes each contraction of one model, by what a first answer costs or by what every later one does.

A model is generated once to learn what it asks for; where the choice of all together is another one, it is generated again.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flashmem.base.types import Optimize
from flashmem.compiler.selection.configs import Product, cut, panel, seconds, transformed
from flashmem.target.descriptor import DeviceDescriptor, KernelConfig

BUILD_SECONDS = 0.1
"""Compiling one kernel, which happens when a bundle is compiled: assumed of every device."""

RUNS = 100
"""First answers that a kernel once compiled is assumed to serve."""

WORTH = 0.02
"""The least part of its time that another kernel must save in later runs."""

_ITEMSIZE = {"float32": 4.0, "float16": 2.0, "int4": 0.5, "uint4": 0.5}


@dataclass(frozen=True)
class Use:
    """A contraction as one layer has it: `ending` is what else tells kernels of one config apart, its fused operators.

    `widest`: the most columns that a panel of packed weights may have for slices to be as small as they must; None: any.
    `winograd`: a convolution of floats by 3x3 taps, one apart in both directions. `forms`: columns of a panel and depth that
    its weights are packed in already, for other shapes of the model, one of which is taken where any config reads it.
    """

    product: Product
    ending: tuple[str, ...] = ()
    widest: int | None = None
    winograd: bool = False
    forms: frozenset[tuple[int, int]] = frozenset()

    @property
    def kernel(self) -> tuple[object, ...]:
        """What uses must share to be one kernel if they take one config."""
        p = self.product
        heads = p.depth if p.family == "attention" else 0
        return p.family, p.path, p.storage, p.taps > 1, heads, self.ending


class Choices:
    """The choices for one model on one device. `limited`: its memory is; weights then take no more bytes than they must."""

    def __init__(self, descriptor: DeviceDescriptor, optimize: Optimize = "steady", *, limited: bool = False) -> None:
        self._descriptor, self._limited = descriptor, limited
        self._optimize = optimize
        self._uses: Counter[Use] = Counter()
        self._answers: dict[Use, KernelConfig] = {}
        self._settled = optimize == "steady"
        self._first: Choices | None = None

    def config(
        self,
        product: Product,
        ending: Sequence[str] = (),
        widest: int | None = None,
        winograd: bool = False,
        forms: frozenset[tuple[int, int]] = frozenset(),
    ) -> KernelConfig:
        """The config for a layer's contraction, always one of the device's list; see `Use`.

        Raises:
            UserError: the tuned table that the descriptor names is missing or damaged.
        """
        use = Use(product, tuple(ending), widest, winograd, forms)
        self._uses[use] += 1
        if use not in self._answers:
            first = self._first and self._first.config(product, ending, widest, winograd, forms)
            self._answers[use] = self._sooner(use, first) if first else self._soonest(use)
        return self._answers[use]

    def _sooner(self, use: Use, first: KernelConfig) -> KernelConfig:
        """The best for later runs that reads weights as they are packed for `first`, or `first` itself."""
        costs = {v: cost for v, cost in self._costs(use).items() if _packs_alike(v, first, use.product)}
        best = min(costs, key=lambda config: costs[config], default=first)
        return best if first not in costs or costs[best] < (1 - WORTH) * costs[first] else first

    def beside(self) -> Choices:
        """What later runs are to choose beside these: of configs that read the same packed weights the one that runs soonest,
        where it is worth another kernel.
        """
        later = Choices(self._descriptor, "steady", limited=self._limited)
        later._first = self
        return later

    def later_differ(self) -> bool:
        """Whether `beside` would choose otherwise for anything that was asked."""
        later = self.beside()
        return any(later._sooner(use, first) != first for use, first in self._answers.items())

    def settle(self) -> bool:
        """Decide for everything asked so far together; whether any answer is another than was given. Done once."""
        if self._settled:
            return False
        self._settled = True
        before = dict(self._answers)
        groups: dict[tuple[object, ...], list[Use]] = defaultdict(list)
        for use in self._uses:
            groups[use.kernel].append(use)
        for uses in groups.values():
            costs = [{v: self._uses[use] * cost for v, cost in self._costs(use).items()} for use in uses]
            for use, config in zip(uses, fewest(costs, self._build), strict=True):
                self._answers[use] = config
        return before != self._answers

    @property
    def _build(self) -> float:
        return self._descriptor.rates.kernel_seconds + BUILD_SECONDS / RUNS

    def _costs(self, use: Use) -> dict[KernelConfig, float]:
        """Seconds of one layer by config: running it, and getting what it reads."""
        product = use.product
        [plain, *_] = self._descriptor.plain(product.family)
        times = {v: time for v, time in seconds(self._descriptor, product).items() if self._allowed(v, use, plain)}
        if use.forms:
            there = [config for config in dict.fromkeys((*times, plain)) if packed_form(product, config) in use.forms]
            times = {config: times.get(config, max(times.values(), default=0.0)) for config in there} or times
        rate = self._weights_rate
        return {config: time + packed_bytes(product, config) / rate for config, time in (times or {plain: 0.0}).items()}

    @property
    def _weights_rate(self) -> float:
        """Bytes of weights per second: from the disk for a first answer; from memory for later ones, as a weight is in no cache
        any more when all others have been read. A CPU's `memory_bandwidth` may be that of its caches; a copy reads and writes.
        """
        rates, cpu = self._descriptor.rates, self._descriptor.kind == "cpu"
        if self._optimize == "cold":
            return rates.disk_bandwidth
        return min(rates.memory_bandwidth, 2 * rates.copy_bandwidth) if cpu else rates.memory_bandwidth

    def _allowed(self, config: KernelConfig, use: Use, plain: KernelConfig) -> bool:
        """Whether `config` computes such a layer and its weights take no more memory than they may."""
        if config.winograd and (self._limited or not use.winograd):
            return False
        if config.steady and self._optimize != "steady":
            return False
        return use.widest is None or config == plain or config.block[1] <= use.widest

    def _soonest(self, use: Use) -> KernelConfig:
        """The best for one use; a kernel that the model has already costs nothing to build."""
        costs = self._costs(use)
        if self._settled and self._optimize == "cold":
            here = {self._answers[other] for other in self._answers if other.kernel == use.kernel}
            costs = {config: cost + (config not in here) * self._build for config, cost in costs.items()}
        return min(costs, key=lambda config: costs[config])


def fewest(costs: Sequence[Mapping[KernelConfig, float]], build: float) -> list[KernelConfig]:
    """For each use the config that takes it soonest, of a set that is worth its kernels: each costs `build` once.

    From the set of all that are best for something, the one whose loss saves most is dropped until none does. That is the
    greedy heuristic for choosing facilities; lists are short.
    """

    def assigned(chosen: Sequence[KernelConfig]) -> tuple[float, list[KernelConfig]]:
        total, found = build * len(chosen), []
        for row in costs:
            best = min((config for config in chosen if config in row), key=lambda config: row[config], default=None)
            if best is None:
                return math.inf, []
            total += row[best]
            found.append(best)
        return total, found

    chosen = list(dict.fromkeys(min(row, key=lambda config: row[config]) for row in costs))
    total, found = assigned(chosen)
    while len(chosen) > 1:
        fewer = [[kept for kept in chosen if kept != dropped] for dropped in chosen]
        cheaper, assignment, left = min(((*assigned(kept), kept) for kept in fewer), key=lambda each: each[0])
        if cheaper >= total:
            break
        total, found, chosen = cheaper, assignment, left
    return found


def packed_form(product: Product, config: KernelConfig) -> tuple[int, int]:
    """Columns of a panel, and depth, of the weights that `config` reads."""
    return panel(cut(config, product)), (transformed(product) if config.winograd else product).depth


def _packs_alike(one: KernelConfig, other: KernelConfig, product: Product) -> bool:
    """Whether two configs read the same packed weights, if they read any."""
    if packed_bytes(product, one) == 0:
        return True
    kinds = [(config.winograd > 0, config.half, panel(cut(config, product))) for config in (one, other)]
    return kinds[0] == kinds[1]


def packed_bytes(product: Product, config: KernelConfig) -> float:
    """Bytes of the packed weights, whose last panel is filled up; 0 for products of activations."""
    if product.family not in ("matmul", "conv"):
        return 0.0
    width = panel(cut(config, product))
    product = transformed(product) if config.winograd else product
    columns = -(-product.columns // width) * width
    return product.batches * product.depth * columns * _ITEMSIZE.get(product.storage, 1.0)
