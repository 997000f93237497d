"""Which variant computes each contraction of one model, by what a first answer costs or by what every later one does.

A model is generated once to learn what it asks for; where the choice of all together is another one, it is generated again.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flashmem.base.types import Optimize
from flashmem.compiler.selection.configs import Product, cut, panel, seconds, transformed
from flashmem.target.descriptor import DeviceDescriptor, Variant

BUILD_SECONDS = 0.1
"""Compiling one kernel, which happens when a bundle is compiled: assumed of every device."""

RUNS = 100
"""First answers that a kernel once compiled is assumed to serve."""

WORTH = 0.02
"""The least part of its time that another kernel must save in later runs."""

_ITEMSIZE = {"float32": 4.0, "float16": 2.0, "int4": 0.5, "uint4": 0.5}


@dataclass(frozen=True)
class Use:
    """A contraction as one layer has it: `ending` is what else tells kernels of one variant apart, its fused operators.

    `widest`: the most columns that a panel of packed weights may have for slices to be as small as they must; None: any.
    `winograd`: a convolution of floats by 3x3 taps, one apart in both directions. `forms`: columns of a panel and depth that
    its weights are packed in already, for other shapes of the model, one of which is taken where any variant reads it.
    """

    product: Product
    ending: tuple[str, ...] = ()
    widest: int | None = None
    winograd: bool = False
    forms: frozenset[tuple[int, int]] = frozenset()

    @property
    def kernel(self) -> tuple[object, ...]:
        """What uses must share to be one kernel if they take one variant."""
        p = self.product
        heads = p.depth if p.family == "attention" else 0
        return p.family, p.path, p.storage, p.taps > 1, heads, self.ending


class Choices:
    """The choices for one model on one device. `limited`: its memory is; weights then take no more bytes than they must."""

    def __init__(self, descriptor: DeviceDescriptor, optimize: Optimize = "steady", *, limited: bool = False) -> None:
        self._descriptor, self._limited = descriptor, limited
        self._optimize = optimize
        self._uses: Counter[Use] = Counter()
        self._answers: dict[Use, Variant] = {}
        self._settled = optimize == "steady"
        self._first: Choices | None = None

    def variant(
        self,
        product: Product,
        ending: Sequence[str] = (),
        widest: int | None = None,
        winograd: bool = False,
        forms: frozenset[tuple[int, int]] = frozenset(),
    ) -> Variant:
        """The variant for a layer's contraction, always one of the device's list; see `Use`.

        Raises:
            UserError: the tuned table that the descriptor names is missing or damaged.
        """
        use = Use(product, tuple(ending), widest, winograd, forms)
        self._uses[use] += 1
        if use not in self._answers:
            first = self._first and self._first.variant(product, ending, widest, winograd, forms)
            self._answers[use] = self._sooner(use, first) if first else self._soonest(use)
        return self._answers[use]

    def _sooner(self, use: Use, first: Variant) -> Variant:
        """The best for later runs that reads weights as they are packed for `first`, or `first` itself."""
        costs = {v: cost for v, cost in self._costs(use).items() if _packs_alike(v, first, use.product)}
        best = min(costs, key=lambda variant: costs[variant], default=first)
        return best if first not in costs or costs[best] < (1 - WORTH) * costs[first] else first

    def beside(self) -> Choices:
        """What later runs are to choose beside these: of variants that read the same packed weights the one that runs soonest,
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
            for use, variant in zip(uses, fewest(costs, self._build), strict=True):
                self._answers[use] = variant
        return before != self._answers

    @property
    def _build(self) -> float:
        return self._descriptor.rates.kernel_seconds + BUILD_SECONDS / RUNS

    def _costs(self, use: Use) -> dict[Variant, float]:
        """Seconds of one layer by variant: running it, and getting what it reads."""
        product = use.product
        [plain, *_] = self._descriptor.plain(product.family)
        times = {v: time for v, time in seconds(self._descriptor, product).items() if self._allowed(v, use, plain)}
        if use.forms:
            there = [variant for variant in dict.fromkeys((*times, plain)) if packed_form(product, variant) in use.forms]
            times = {variant: times.get(variant, max(times.values(), default=0.0)) for variant in there} or times
        rate = self._weights_rate
        return {variant: time + packed_bytes(product, variant) / rate for variant, time in (times or {plain: 0.0}).items()}

    @property
    def _weights_rate(self) -> float:
        """Bytes of weights per second: from the disk for a first answer; from memory for later ones, as a weight is in no cache
        any more when all others have been read. A CPU's `memory_bandwidth` may be that of its caches; a copy reads and writes.
        """
        rates, cpu = self._descriptor.rates, self._descriptor.kind == "cpu"
        if self._optimize == "cold":
            return rates.disk_bandwidth
        return min(rates.memory_bandwidth, 2 * rates.copy_bandwidth) if cpu else rates.memory_bandwidth

    def _allowed(self, variant: Variant, use: Use, plain: Variant) -> bool:
        """Whether `variant` computes such a layer and its weights take no more memory than they may."""
        if variant.winograd and (self._limited or not use.winograd):
            return False
        if variant.steady and self._optimize != "steady":
            return False
        return use.widest is None or variant == plain or variant.block[1] <= use.widest

    def _soonest(self, use: Use) -> Variant:
        """The best for one use; a kernel that the model has already costs nothing to build."""
        costs = self._costs(use)
        if self._settled and self._optimize == "cold":
            here = {self._answers[other] for other in self._answers if other.kernel == use.kernel}
            costs = {variant: cost + (variant not in here) * self._build for variant, cost in costs.items()}
        return min(costs, key=lambda variant: costs[variant])


def fewest(costs: Sequence[Mapping[Variant, float]], build: float) -> list[Variant]:
    """For each use the variant that takes it soonest, of a set that is worth its kernels: each costs `build` once.

    From the set of all that are best for something, the one whose loss saves most is dropped until none does. That is the
    greedy heuristic for choosing facilities; lists are short.
    """

    def assigned(chosen: Sequence[Variant]) -> tuple[float, list[Variant]]:
        total, found = build * len(chosen), []
        for row in costs:
            best = min((variant for variant in chosen if variant in row), key=lambda variant: row[variant], default=None)
            if best is None:
                return math.inf, []
            total += row[best]
            found.append(best)
        return total, found

    chosen = list(dict.fromkeys(min(row, key=lambda variant: row[variant]) for row in costs))
    total, found = assigned(chosen)
    while len(chosen) > 1:
        fewer = [[kept for kept in chosen if kept != dropped] for dropped in chosen]
        cheaper, assignment, left = min(((*assigned(kept), kept) for kept in fewer), key=lambda each: each[0])
        if cheaper >= total:
            break
        total, found, chosen = cheaper, assignment, left
    return found


def packed_form(product: Product, variant: Variant) -> tuple[int, int]:
    """Columns of a panel, and depth, of the weights that `variant` reads."""
    return panel(cut(variant, product)), (transformed(product) if variant.winograd else product).depth


def _packs_alike(one: Variant, other: Variant, product: Product) -> bool:
    """Whether two variants read the same packed weights, if they read any."""
    if packed_bytes(product, one) == 0:
        return True
    kinds = [(variant.winograd > 0, variant.half, panel(cut(variant, product))) for variant in (one, other)]
    return kinds[0] == kinds[1]


def packed_bytes(product: Product, variant: Variant) -> float:
    """Bytes of the packed weights, whose last panel is filled up; 0 for products of activations."""
    if product.family not in ("matmul", "conv"):
        return 0.0
    width = panel(cut(variant, product))
    product = transformed(product) if variant.winograd else product
    columns = -(-product.columns // width) * width
    return product.batches * product.depth * columns * _ITEMSIZE.get(product.storage, 1.0)
