"""Lowering of a placed graph: kernels, packed weights and launches of its groups, and its activations in an arena."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from flashmem.base.types import SLACK, TENSOR_ALIGNMENT
from flashmem.compiler.ir.graph import Value
from flashmem.compiler.lowering.context import LoweringContext
from flashmem.compiler.lowering.generated import Generated, Lowering, constants_place
from flashmem.compiler.lowering.host_embedding import place_rows
from flashmem.compiler.lowering.outputs import read_early
from flashmem.compiler.lowering.registry import lower_group
from flashmem.compiler.lowering.templates import KernelLibrary
from flashmem.compiler.memory.arena import LiveBytes, place_blocks, shapes
from flashmem.compiler.memory.placement import PlacedGraph
from flashmem.compiler.selection.selector import KernelRequest
from flashmem.compiler.weights.packing_list import PackingList
from flashmem.program.lanes import lane_kind
from flashmem.program.launches import first_and_last
from flashmem.program.program import Program
from flashmem.program.tensors import HostEmbeddingLookup, Port, State, Tensor


def lower(placed: PlacedGraph, lowering: Lowering) -> Generated:
    """The program of `placed`, with the configs that are the best ones for all of its products together.

    `Generated.write` reads the weights later.
    """
    made = lower_once(placed, lowering)
    return lower_once(placed, lowering) if lowering.selector.select() else made


def lower_once(placed: PlacedGraph, lowering: Lowering) -> Generated:
    """The program of `placed`, with the configs that the selector knows so far; with others as long as a kernel of theirs is
    refused, and others are left.
    """
    selector = lowering.selector
    while True:
        made = _lowered(placed, lowering)
        refused = [name for name in made.chosen if name in selector.refused]
        if not any([selector.avoid(name, made.chosen[name]) for name in refused]):  # each of them
            return made


def _lowered(placed: PlacedGraph, lowering: Lowering) -> Generated:
    context = _context(placed, lowering)
    for value in (*placed.lookups, *(state.port.value for state in placed.states)):
        context.tensor(value)
    chosen = _lower_groups(context, placed)
    lookups = [
        place_rows(context, node, indices, str(context.tensor(value).value))
        for value, (node, indices) in placed.lookups.items()
    ]
    program = _program(placed, lowering, context, lookups)
    channels = {part.channel for part in program.slices if part.is_image}
    return Generated(
        program,
        context.kernels.source(lane_kind(program), channels),
        context.weights,
        _constants(context),
        context.placements,
        {key: tuple(part for _, part in parts) for key, parts in context.packed.items()},
        chosen,
        placed,
        lowering,
    )


def _lower_groups(context: LoweringContext, placed: PlacedGraph) -> dict[str, frozenset[KernelRequest]]:
    """Lower all groups; by kernel, what their lowerings requested of the selector."""
    chosen: dict[str, frozenset[KernelRequest]] = {}
    for group in placed.launched:
        first = len(context.launches)
        lower_group(context, group)
        if requests := context.selector.recent():
            for name in {launch.kernel for launch in context.launches[first:]}:
                chosen[name] = chosen.get(name, frozenset()) | requests
    return chosen


def _context(placed: PlacedGraph, lowering: Lowering) -> LoweringContext:
    """The program under construction, still empty."""
    descriptor = lowering.descriptor
    precision = placed.precision
    return LoweringContext(
        descriptor,
        descriptor.memory_paths[0],
        precision == "fp16",
        precision == "tf32",
        lowering.slicing,
        KernelLibrary(descriptor.code),
        lowering.selector,
        placed.buffers,
        PackingList(descriptor.page_bytes, lowering.earlier.size),
        lowering.earlier,
        before=lowering.before,
    )


def _program(
    placed: PlacedGraph, lowering: Lowering, context: LoweringContext, lookups: Sequence[HostEmbeddingLookup]
) -> Program:
    """The program of all launches in `context`, with the places of tensors and constants."""
    descriptor = lowering.descriptor
    touched = first_and_last(context.launches, "tensor")
    inputs = _inputs(placed, context)
    outputs = _outputs(placed, context)
    if not descriptor.uses_host_memory:
        outputs = read_early(context.tensors, touched, outputs, lookups)
    states = [
        State(each.port.name, each.output, each.port.value.shape, each.port.dtype, str(context.tensor(each.after).value))
        for each in placed.states
    ]
    in_states, states_bytes = _states(context, states)
    tensors, arena_bytes, live_bytes = _arena(context, touched, inputs, outputs, lookups, in_states)
    constants_bytes = _constants(context).nbytes
    constants_offset, end = constants_place(context.weights, constants_bytes)
    return Program(
        memory_path=context.memory_path,
        precision=placed.precision,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        tensors=(*tensors, *in_states.values()),
        slices=tuple(context.slices),
        launches=tuple(context.launches),
        host_embeddings=tuple(lookups),
        arena_bytes=max(arena_bytes, lowering.least.arena_bytes),
        constants_offset=constants_offset,
        constants_bytes=max(constants_bytes, lowering.least.constants_bytes),
        weights_bytes=end,
        hands_over=descriptor.uses_host_memory,
        status=None if context.status_value is None else str(context.status().value),
        order=placed.fused.order,
        live_bytes=live_bytes,
        page_bytes=descriptor.page_bytes,
        states=tuple(states),
        states_bytes=states_bytes,
    )


def _constants(context: LoweringContext) -> NDArray[np.uint8]:
    """The resident constants; there is no empty buffer."""
    return np.frombuffer(bytes(context.constants) or bytes(TENSOR_ALIGNMENT), np.uint8)


def _inputs(placed: PlacedGraph, context: LoweringContext) -> list[Port]:
    """The inputs. One that no kernel reads, because it only selects rows or is unused, has no tensor."""
    graph = placed.fused.graph
    states = dict(graph.states)
    given = [port for port in graph.inputs if port.name not in states]
    return [Port(port.name, port.value.shape, port.dtype, context.known(port.value)) for port in given]


def _outputs(placed: PlacedGraph, context: LoweringContext) -> list[Port]:
    """The outputs, each with the tensor of its number of places, if that is computed."""
    return [
        Port(
            port.name,
            port.value.shape,
            port.dtype,
            str(context.tensor(port.value).value) if port.value.size else None,
            count=None if port.count is None else str(context.tensor(port.count[1]).value),
            axis=0 if port.count is None else port.count[0],
        )
        for port in placed.results
    ]


def _states(context: LoweringContext, states: Sequence[State]) -> tuple[dict[str, Tensor], int]:
    """The tensors in the memory of states by name: states one after the other, and ranges of them. And its bytes."""
    starts: dict[Value, int] = {}
    end = 0
    for state in states:
        tensor = context.tensors[state.tensor]
        starts[tensor.place.root] = end
        end += -(-(tensor.nbytes + SLACK) // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT
    placed = {
        name: Tensor(name, t.shape, t.dtype, starts[t.place.root] + t.place.offset, t.nbytes + SLACK, "states")
        for name, t in context.tensors.items()
        if t.place.root in starts
    }
    return placed, end


def _arena(
    context: LoweringContext,
    touched: Mapping[str, tuple[int, int]],
    inputs: Sequence[Port],
    outputs: Sequence[Port],
    gathers: Sequence[HostEmbeddingLookup],
    elsewhere: Collection[str],
) -> tuple[tuple[Tensor, ...], int, int]:
    """The activations in the arena, its bytes, and the most bytes that are needed at once.

    A tensor is needed from the launch that first writes it to the last that reads it (`touched`). Inputs are needed from before
    the first launch, and outputs after the last one. Tensors `elsewhere` are not in the arena.
    """
    last = len(context.launches) + 1
    status = None if context.status_value is None else str(context.status().value)  # in use from before the run to after it
    early = [*(port.tensor for port in inputs), *(gather.tensor for gather in gathers), status]
    late = [*((port.tensor, port.ready) for port in outputs), *((port.count, None) for port in outputs), (status, None)]
    lifetimes = _lifetimes(touched, early, late, last)
    held = {name: context.tensors[name] for name in lifetimes if name not in elsewhere}
    blocks: dict[Value, str] = {}
    for name, tensor in held.items():
        blocks.setdefault(tensor.place.root, name)
    uses = [
        LiveBytes(blocks[tensor.place.root], tensor.place.offset, tensor.nbytes, *lifetimes[name])
        for name, tensor in held.items()
    ]
    starts, total, bound = place_blocks(shapes(uses), last - 1)
    tensors = tuple(
        Tensor(name, t.shape, t.dtype, starts[blocks[t.place.root]] + t.place.offset, t.nbytes + SLACK)
        for name, t in held.items()
    )
    return tensors, max(total, TENSOR_ALIGNMENT), bound  # a device has no empty buffers


def _lifetimes(
    touched: Mapping[str, tuple[int, int]],
    early: Iterable[str | None],
    late: Iterable[tuple[str | None, int | None]],
    last: int,
) -> dict[str, tuple[int, int]]:
    """The first and the last launch for which each tensor is needed: those that use it, 0 for `early` ones, and for `late`
    ones the launch beside them, or `last`.
    """
    found = dict(touched)
    for name in early:
        if name is not None:
            found[name] = (0, found.get(name, (0, 0))[1])
    for name, ready in late:
        if name is not None:
            end = last if ready is None else ready
            found[name] = (found.get(name, (end, end))[0], end)  # if no launch uses it, its parts are tensors
    return found
