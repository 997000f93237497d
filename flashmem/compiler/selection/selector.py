"""Kernel selector: chooses a config for each workload of one model, by the cost of a first answer or of later ones.

A model is generated once to collect its requests. If the best configs for all of them together differ, it is generated again.
So it is if one of its kernels is known to be miscompiled, with the next best config for that kernel's requests. The last one,
or the third, is the config that asks the least of a compiler: no local memory, no work-groups, tiles of one row.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from flashmem.base.types import Optimize
from flashmem.compiler.configs.config import KernelConfig
from flashmem.compiler.configs.kinds import least_config
from flashmem.compiler.configs.listed import configs_of, plain_configs
from flashmem.compiler.configs.workload import TF32, Workload
from flashmem.compiler.kernels.contraction.configs import Contraction, Winograd
from flashmem.compiler.options import RefusedKernel
from flashmem.compiler.selection.configs import seconds
from flashmem.target.descriptor import DeviceDescriptor

BUILD_SECONDS = 0.1
"""Seconds to compile one kernel when a bundle is compiled: assumed for every device."""

RUNS = 100
"""The number of first answers for which a compiled kernel is assumed to be used."""

WORTH = 0.02
"""The least fraction of its time that another kernel must save in later runs."""

MOST_WRONG = 2
"""Configs for one request whose kernels are wrong, before the least one is tried: each takes another compilation."""

MOST_PADDING = 2
"""The most bytes of packed weights of a grouped convolution, as a multiple of their elements."""

_ITEMSIZE = {"float32": 4.0, TF32: 4.0, "float16": 2.0, "bfloat16": 2.0, "int4": 0.5, "uint4": 0.5}


@dataclass(frozen=True)
class KernelRequest:
    """A request for a config: the workload of one operator, with all limits on its config.

    `ending`: its fused operators, which also distinguish kernels. `widest`: the most columns of a panel of packed weights, so
    that slices can be as small as required; None: any. `winograd`: a convolution of floats by 3x3 taps with dilation 1 in both
    directions. `forms`: (columns of a panel, depth) in which its weights are already packed, for other shapes of the model; one
    of these is used if any config reads it. `halves`: both operands are stored in half.
    """

    workload: Workload
    ending: tuple[str, ...] = ()
    widest: int | None = None
    winograd: bool = False
    forms: frozenset[tuple[int, int]] = frozenset()
    halves: bool = False

    @property
    def kernel(self) -> tuple[object, ...]:
        """The key of a kernel: requests with equal keys and the same config share a kernel."""
        p = self.workload
        heads = p.depth if p.family == "attention" else 0
        return p.family, p.path, p.storage, p.taps > 1, heads, self.ending


class KernelSelector:
    """Selects kernel configs for one model on one device. `limited`: memory is limited, so no config may enlarge weights.

    `refused`: kernels that the device's driver miscompiles, by name.
    """

    def __init__(
        self,
        descriptor: DeviceDescriptor,
        optimize: Optimize = "steady",
        *,
        limited: bool = False,
        refused: Mapping[str, RefusedKernel] = MappingProxyType({}),
    ) -> None:
        self._descriptor = descriptor
        self._limited = limited
        self._optimize = optimize
        self.refused = refused
        self._avoided: dict[KernelRequest, dict[KernelConfig, RefusedKernel]] = defaultdict(dict)
        self._recent: set[KernelRequest] = set()
        self.left_out: dict[str, None] = {}
        """Names of refused kernels for which other configs were looked for."""
        self._requests: Counter[KernelRequest] = Counter()
        self._answers: dict[KernelRequest, KernelConfig] = {}
        self._selected = optimize == "steady"
        self._first: KernelSelector | None = None

    def config(
        self,
        workload: Workload,
        ending: Sequence[str] = (),
        widest: int | None = None,
        winograd: bool = False,
        forms: frozenset[tuple[int, int]] = frozenset(),
        halves: bool = False,
    ) -> KernelConfig:
        """The config for an operator's workload: from the device's list, or the plain tile where none of it fits.

        Raises:
            UserError: the tuning database that the descriptor names is missing or damaged.
        """
        request = KernelRequest(workload, tuple(ending), widest, winograd, forms, halves)
        self._requests[request] += 1
        self._recent.add(request)
        if request not in self._answers:
            self._answers[request] = self._answer(request)
        return self._answers[request]

    def _answer(self, request: KernelRequest) -> KernelConfig:
        if self._first is None:
            return self._soonest(request)
        asked = request.workload, request.ending, request.widest, request.winograd, request.forms, request.halves
        return self._sooner(request, self._first.config(*asked))

    def recent(self) -> frozenset[KernelRequest]:
        """The requests since the last call."""
        recent = frozenset(self._recent)
        self._recent = set()
        return recent

    def avoid(self, kernel: str, requests: Iterable[KernelRequest]) -> bool:
        """Select other configs for these requests, of which the refused `kernel` came. Returns whether any has another one.

        A request of which all configs were refused has the best one again of those that are right without optimisation.
        """
        before = dict(self._answers)
        self.left_out[kernel] = None
        for request in requests:
            if request in self._answers:
                self._avoided[request][self._answers.pop(request)] = self.refused[kernel]
                self._answers[request] = self._answer(request)
        return before != self._answers

    def _sooner(self, request: KernelRequest, first: KernelConfig) -> KernelConfig:
        """The best config for later runs that reads the weights packed for `first`, or `first` itself."""
        costs = {v: cost for v, cost in self._costs(request).items() if _packs_alike(v, first, request.workload)}
        best = min(costs, key=lambda config: costs[config], default=first)
        return best if first not in costs or costs[best] < (1 - WORTH) * costs[first] else first

    def for_later_runs(self) -> KernelSelector:
        """A selector for later runs.

        Of configs that read the same packed weights, it chooses the fastest, if that is worth another kernel.
        """
        later = KernelSelector(self._descriptor, "steady", limited=self._limited, refused=self.refused)
        later._first = self
        later._avoided = self._avoided
        later.left_out = self.left_out
        return later

    def on_device(self, descriptor: DeviceDescriptor) -> KernelSelector:
        """A new selector for another device, for which the same counts."""
        return KernelSelector(descriptor, self._optimize, limited=self._limited)

    @property
    def limited(self) -> bool:
        """Whether memory is limited, so that no config may enlarge weights, or exchange sums through memory."""
        return self._limited

    def differs_later(self) -> bool:
        """Whether `for_later_runs` selects another config for any request."""
        later = self.for_later_runs()
        return any(later._sooner(request, first) != first for request, first in self._answers.items())

    def select(self) -> bool:
        """Select configs for all requests so far together, once. Returns whether any differs from the config given before."""
        if self._selected:
            return False
        self._selected = True
        before = dict(self._answers)
        groups: dict[tuple[object, ...], list[KernelRequest]] = defaultdict(list)
        for request in self._requests:
            groups[request.kernel].append(request)
        for requests in groups.values():
            costs = [{v: self._requests[request] * cost for v, cost in self._costs(request).items()} for request in requests]
            for request, config in zip(requests, fewest(costs, self._build), strict=True):
                self._answers[request] = config
        return before != self._answers

    @property
    def _build(self) -> float:
        return self._descriptor.rates.kernel_seconds + BUILD_SECONDS / RUNS

    def _costs(self, request: KernelRequest) -> dict[KernelConfig, float]:
        """Seconds of one launch by config: its execution, and loading its weights."""
        workload = request.workload
        [plain, *_] = plain_configs(self._descriptor, workload.family)
        times = {v: time for v, time in seconds(self._descriptor, workload).items() if self._allowed(v, request, plain)}
        if request.forms:
            listed = dict.fromkeys((*times, *configs_of(self._descriptor, workload.family), plain))
            there = [config for config in listed if packed_form(workload, config) in request.forms]
            times = {config: times.get(config, max(times.values(), default=0.0)) for config in there} or times
        right = self._right(request, times or {plain: 0.0}, plain)
        rate = self._weights_rate
        return {config: time + packed_bytes(workload, config) / rate for config, time in right.items()}

    def _right(
        self, request: KernelRequest, times: Mapping[KernelConfig, float], plain: KernelConfig
    ) -> Mapping[KernelConfig, float]:
        """The configs of `times` whose kernels are not known to be wrong; the least one after `MOST_WRONG` of them, or all.

        Where none is left, those that are right without optimisation.
        """
        avoided = self._avoided.get(request)
        if not avoided:
            return times
        least = least_config(request.workload.family) or plain
        left = {config: time for config, time in times.items() if config not in avoided}
        fits = not request.forms or packed_form(request.workload, least) in request.forms
        if fits and least not in avoided and (len(avoided) >= MOST_WRONG or not left):
            return {least: max(times.values())}
        times = {**times, **({least: max(times.values())} if fits else {})}
        return (
            left
            or {config: time for config, time in times.items() if config in avoided and avoided[config].unoptimised}
            or times
        )

    @property
    def _weights_rate(self) -> float:
        """Bytes of weights per second: from the disk for a first answer, from memory for later ones.

        In later runs no weight is still in a cache after all others have been read. A CPU's `memory_bandwidth` may be that of
        its caches; a copy reads and writes.
        """
        rates = self._descriptor.rates
        cpu = self._descriptor.kind == "cpu"
        if self._optimize == "cold":
            return rates.disk_bandwidth
        return min(rates.memory_bandwidth, 2 * rates.copy_bandwidth) if cpu else rates.memory_bandwidth

    def _allowed(self, config: KernelConfig, request: KernelRequest, plain: KernelConfig) -> bool:
        """Whether `config` computes such an operator, and its weights stay within the limits on memory."""
        if isinstance(config, Winograd) and (
            self._limited or not request.winograd or (config.steady and self._optimize != "steady")
        ):
            return False
        if self._limited and isinstance(config, Contraction) and config.groups_deep > 1:  # its sums are a tensor
            return False
        if "mma" in config.needs and not (request.halves or request.workload.storage == TF32):
            return False
        wide = isinstance(config, Contraction) and request.widest is not None and config.block[1] > request.widest
        return config == plain or not (wide or self._pads_groups(config, request.workload))

    def _pads_groups(self, config: KernelConfig, workload: Workload) -> bool:
        """Whether panels of `config` are mostly padding, once for each group of a convolution; no time is worth that memory."""
        elements = workload.batches * workload.depth * workload.columns
        most = MOST_PADDING * elements * _ITEMSIZE.get(workload.storage, 1.0)
        return workload.family == "conv" and workload.batches > 1 and packed_bytes(workload, config) > most

    def _soonest(self, request: KernelRequest) -> KernelConfig:
        """The best config for one request; kernels that the model already has cost nothing to build."""
        costs = self._costs(request)
        if self._selected and self._optimize == "cold":
            here = {self._answers[other] for other in self._answers if other.kernel == request.kernel}
            costs = {config: cost + (config not in here) * self._build for config, cost in costs.items()}
        return min(costs, key=lambda config: costs[config])


def fewest(costs: Sequence[Mapping[KernelConfig, float]], build: float) -> list[KernelConfig]:
    """The fastest config for each use, from a set whose kernels are worth their cost: each costs `build` once.

    Starts with all configs that are best for some use. Repeatedly drops the one whose removal saves most, until none does. This
    is the greedy heuristic for facility location; lists are short.
    """

    def assigned(chosen: Sequence[KernelConfig]) -> tuple[float, list[KernelConfig]]:
        total = build * len(chosen)
        found = []
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
        total = cheaper
        found = assignment
        chosen = left
    return found


def packed_form(workload: Workload, config: KernelConfig) -> tuple[int, int]:
    """Columns of a panel, and depth, of the packed weights that `config` reads; zeros if it reads none."""
    if workload.family not in ("matmul", "conv") or not isinstance(config, Contraction):
        return 0, 0
    return config.cut(workload).panel, config.product(workload).depth


def _packs_alike(one: KernelConfig, other: KernelConfig, workload: Workload) -> bool:
    """Whether two configs read the same packed weights, if they read any; sums in half also determine their folds."""
    forms = packed_form(workload, one), packed_form(workload, other)
    return forms[0] == forms[1] and (not any(forms[0]) or _half_run(one) == _half_run(other))


def _half_run(config: KernelConfig) -> int:
    return config.half_run if isinstance(config, Contraction) else 0


def packed_bytes(workload: Workload, config: KernelConfig) -> float:
    """Bytes of the packed weights with a padded last panel; 0 for products of activations."""
    width, depth = packed_form(workload, config)
    columns = -(-workload.columns // max(1, width)) * width
    return workload.batches * depth * columns * _ITEMSIZE.get(workload.storage, 1.0)
