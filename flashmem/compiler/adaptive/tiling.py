"""Patch-based tiling for budgets that are too small for a graph: computes chains in patches (`compiler.tiling.patches`).

The limit on activations follows from the missing bytes. Patches for exactly that limit are tried, then those for a few fixed
limits below it. The last of these is the least possible. All limits near the least (`NEAR`) are tried before a budget is
refused, and only these if a budget requires so little. So the smallest budget does not depend on the requested one: it is found
again, and none below it works.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flashmem.base.errors import BudgetError
from flashmem.base.types import ITEMSIZE, Precision, StoredType
from flashmem.base.units import format_size
from flashmem.compiler.ir.blocks.constant import BlockConstant
from flashmem.compiler.ir.fusion_group import FusedGraph
from flashmem.compiler.ir.graph import Value
from flashmem.compiler.ir.quantised import QuantizedConstant
from flashmem.compiler.memory.aliases import AliasAnalysis
from flashmem.compiler.memory.buffers import least_alive
from flashmem.compiler.memory.constants import host_indices
from flashmem.compiler.memory.precision import stored_in_half
from flashmem.compiler.options import Options
from flashmem.compiler.stages.pipeline import GroupedGraph, Watch
from flashmem.compiler.stages.stages import PATCH
from flashmem.compiler.tiling.choice import PatchChoice
from flashmem.compiler.tiling.estimate import Memory
from flashmem.compiler.tiling.patches import Chain
from flashmem.compiler.weights.slicing import Slicing, finest
from flashmem.target.descriptor import DeviceDescriptor

STEPS = (4.0, 3.0, 2.25, 1.75, 1.4, 1.2, 1.1, 1.0)
"""The fixed limits, as multiples of the least live bytes."""

NEAR = 1.25
"""Fixed limits up to this multiple of the least live bytes may give the smallest budget.

Live bytes are estimated. Planning a program determines the size of the arena and of the slices.
"""

NAMED = 6
"""The most chains that a plan's note names one by one."""

LEAST_PATCH_BYTES = {"cpu": 1 << 20, "gpu": 4 << 20}
"""The least size of the largest result inside a patch, because a smaller launch leaves a device idle."""

LEAST_PART = 16
"""If activations are small, the largest result inside a patch may be smaller: the most bytes that are live, divided by this."""


class Patches:
    """The chains of a graph that may run in patches, on a device and in a precision.

    `slicing`: the smallest slices of its weights.
    """

    def __init__(self, fused: FusedGraph, descriptor: DeviceDescriptor, precision: Precision) -> None:
        self.groups = fused.groups
        self.aliases = AliasAnalysis(fused.graph, half=precision == "fp16")
        self.memory, self.slicing = _memory(fused, self.aliases, precision == "fp16", descriptor)
        self._choice = PatchChoice(fused.graph, self.groups, self.aliases, self.memory)

    @property
    def alive(self) -> int:
        """The most bytes of activations that are live at once without patches."""
        return max(self.memory.alive, default=0)

    def choose(self, limit: int) -> tuple[tuple[Chain, ...], int]:
        """Chains with which activations need at most `limit` bytes, or as few as possible, and the estimated bytes."""
        chains, alive = self._choice.chains(limit)
        return tuple(chains), alive

    def described(self, chains: Sequence[Chain], without: int) -> str:
        """`chains` as text, for the notes of a plan; `without` is the budget in bytes that works without them."""
        texts = []
        for chain in chains:
            end = self.groups[chain.last].output
            names = f"{self.groups[chain.first].main.name} to {end.name}" if chain.first < chain.last else end.name
            size = chain.starts[1] if len(chain.starts) > 1 else end.shape[chain.axis]
            texts.append(f"{names} in {len(chain.starts)} of {size}")
        left = [f"{len(texts) - NAMED} more"] if len(texts) > NAMED else []
        taken = f"without patches the smallest budget is {format_size(without)}"
        return f"{len(chains)} chains of operators computed in patches: {'; '.join(texts[:NAMED] + left)}; {taken}"


def fitting_patches(
    grouped: GroupedGraph,
    options: Options,
    refused: BudgetError,
    attempt: Callable[[GroupedGraph, Slicing], object],
    watch: Watch,
) -> tuple[GroupedGraph, str]:
    """The graph with as few chains in patches as fit the budget that was `refused` without them; and a note for its plan.

    `attempt` plans a graph with the slices that are given, and raises a BudgetError if it does not fit.

    Raises:
        BudgetError: no plan fits; the error names the smallest budget with patches, and the one without.
    """
    budget = options.request.budget
    assert budget is not None
    with watch("patches"):
        patches = Patches(grouped.fused, options.descriptor, options.request.precision)
        least = patches.choose(0)
    wanted = patches.alive - (refused.smallest_bytes - budget)
    smallest = refused
    tried: set[tuple[Chain, ...]] = {()}
    for limit in _limits(wanted, least[1], patches.alive):
        with watch("patches"):
            chains = patches.choose(limit)[0] if limit else least[0]
            if chains in tried:
                continue
            tried.add(chains)
            tiled = GroupedGraph.of(PATCH(grouped.fused, chains), options)
        try:
            attempt(tiled, patches.slicing)
        except BudgetError as error:
            if limit <= NEAR * least[1] and error.smallest_bytes < smallest.smallest_bytes:
                smallest = error
            continue
        return tiled, patches.described(chains, refused.smallest_bytes)
    raise _too_small(budget, refused, smallest)


def _limits(wanted: int, least: int, alive: int) -> list[int]:
    """The limits to try, in bytes; 0 means as few as possible.

    `wanted` bytes are enough, `alive` or more do not help, and fewer than `least` are impossible.
    """
    fixed = [limit for step in STEPS if (limit := int(least * step)) < alive]
    near = [limit for limit in fixed if limit <= NEAR * least]
    exact = [wanted] if wanted > NEAR * least else []
    return [*exact, *(limit for limit in fixed if limit < wanted), 0, *(limit for limit in reversed(near) if limit >= wanted)]


def _too_small(budget: int, without: BudgetError, smallest: BudgetError) -> BudgetError:
    if smallest is without:
        return without
    return BudgetError(
        f"budget of {budget} bytes is too small: {smallest.smallest_bytes} bytes are needed with chains of operators in "
        f"patches ({without.smallest_bytes} without), bound by launch {smallest.binding!r}; raise the budget to "
        f"{smallest.smallest_bytes} bytes or more",
        smallest_bytes=smallest.smallest_bytes,
        without_patches=without.smallest_bytes,
        binding=smallest.binding,
    )


def _memory(fused: FusedGraph, aliases: AliasAnalysis, half: bool, descriptor: DeviceDescriptor) -> tuple[Memory, Slicing]:
    graph = fused.graph
    halves = stored_in_half(fused, aliases, activations=half)

    def storage(value: Value) -> StoredType:
        return "float16" if aliases.base(value) in halves else value.dtype

    def nbytes(value: Value) -> int:
        return ITEMSIZE[storage(value)] * value.size

    def weight_bytes(value: Value) -> int:
        if isinstance(value.constant, QuantizedConstant):
            return value.size * value.constant.bits // 8
        if isinstance(value.constant, BlockConstant):
            return value.constant.nbytes
        return (2 if half else 4) * value.size

    alive = _alive(fused, aliases, storage)
    weights = {value for node in graph.nodes for value in node.inputs if value is not None and value.constant is not None}
    slicing = finest(sum(map(weight_bytes, weights)))
    least = min(LEAST_PATCH_BYTES[descriptor.kind], max(alive, default=0) // LEAST_PART)
    return Memory(alive, nbytes, weight_bytes, 2 * slicing.least, least), slicing


def _alive(fused: FusedGraph, aliases: AliasAnalysis, storage: Callable[[Value], StoredType]) -> list[int]:
    """The live bytes at each group, without patches; those of one that is not launched are those of the group before it."""
    graph, groups = fused.graph, fused.groups
    gathered = [group.main.outputs[0] for group in groups if host_indices(group.main, graph) is not None]
    launched = [group for group in groups if group.main.outputs[0] not in gathered and not aliases.is_alias(group.main)]
    early = [*(port.value for port in graph.inputs), *gathered]
    needed = iter(least_alive(launched, early, [port.value for port in graph.outputs if port.value.size], aliases, storage))
    known = {group: next(needed) for group in launched}
    alive: list[int] = []
    for group in groups:
        alive.append(known.get(group, alive[-1] if alive else 0))
    return alive
