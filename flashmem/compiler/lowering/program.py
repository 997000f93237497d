"""Program generation: lower fusion groups to kernels, packed weights and launches, and allocate activations in an arena."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flashmem.base.types import SLACK, TENSOR_ALIGNMENT, Precision, StoredType
from flashmem.compiler.ir.fusion_group import FusionGroup
from flashmem.compiler.ir.graph import Graph, GraphPort, Node, Value
from flashmem.compiler.lowering.context import Cuts, LoweringContext, PackedBefore
from flashmem.compiler.lowering.host_embedding import place_rows
from flashmem.compiler.lowering.outputs import read_early
from flashmem.compiler.lowering.registry import lower
from flashmem.compiler.lowering.templates import KernelLibrary
from flashmem.compiler.memory.aliases import AliasAnalysis
from flashmem.compiler.memory.arena import LiveBytes, place_blocks, shapes
from flashmem.compiler.memory.buffers import assign_buffers
from flashmem.compiler.memory.constants import host_indices
from flashmem.compiler.memory.precision import stored_in_half
from flashmem.compiler.memory.states import graph_states
from flashmem.compiler.passes.joined_updates import join_updates
from flashmem.compiler.selection.selector import KernelRequest, KernelSelector
from flashmem.compiler.weights.packing_list import OnPiece, PackingList, WeightSink
from flashmem.compiler.weights.sharing import NOTHING_STORED, Placements, StoredWeights
from flashmem.compiler.weights.slicing import DEFAULT, Slicing
from flashmem.program.kernel_text import Source
from flashmem.program.lanes import lane_kind
from flashmem.program.launches import first_and_last
from flashmem.program.program import Program
from flashmem.program.tensors import HostEmbeddingLookup, Port, State, Tensor
from flashmem.target.descriptor import DeviceDescriptor


@dataclass(frozen=True)
class Generated:
    """A generated program: the OpenCL C of its kernels, its weights (not yet read) and its resident constants (in memory).

    `weights` lists the weights that this program adds to the weight file. `placements` also has those that the file had before.
    """

    program: Program
    source: Source
    weights: PackingList
    constants: NDArray[np.uint8]
    placements: Placements
    cuts: Cuts = field(default_factory=dict, repr=False)  # the slices of its packed weights
    chosen: Mapping[str, frozenset[KernelRequest]] = field(default_factory=dict, repr=False)
    """By name, kernels of groups for which a config was selected: what was requested."""
    again: Callable[[], Generated | None] | None = field(default=None, repr=False)  # makes the program of later runs
    elsewhere: Callable[[str], Generated] | None = field(default=None, repr=False)  # that of a CPU with an instruction set

    def write(self, sink: WeightSink, on_piece: OnPiece = lambda name, nbytes: None) -> None:
        """Write the weight file of this program alone: see `PackingList.write`."""
        write_weights([self], sink, on_piece)


def write_weights(programs: Sequence[Generated], sink: WeightSink, on_piece: OnPiece = lambda name, nbytes: None) -> None:
    """Write the weight file of programs that were generated in sequence, each with those before it as `earlier`."""
    for made in programs:
        made.weights.write(sink, on_piece)
    write_constants(programs[-1], sink)
    on_piece("constants", programs[-1].constants.nbytes)


def write_constants(last: Generated, sink: WeightSink) -> None:
    """Write what follows the weights of several programs, of which `last` is the last one."""
    sink.append(last.constants, last.weights.page_bytes)


def sharing_weights(programs: Sequence[Generated]) -> list[Generated]:
    """The programs with their final offsets in the weight file: constants follow the weights of all programs.

    Each begins its constants with those of the program before. Those that share states use the same, which are all.
    """
    offset, end = _constants_place(programs[-1].weights, programs[-1].constants.nbytes)
    made = [replace(each, program=replace(each.program, constants_offset=offset, weights_bytes=end)) for each in programs]
    if not programs[0].program.states:
        return made
    return [replace(each, program=replace(each.program, constants_bytes=end - offset)) for each in made]


def stored_by(made: Generated, before: StoredWeights) -> StoredWeights:
    """The stored weights that the next program can read: those of `before`, and those that `made` has placed."""
    return before.followed_by(made.placements, made.weights.size, made.constants.tobytes())


def _constants_place(weights: PackingList, nbytes: int) -> tuple[int, int]:
    """The offsets at which the constants begin and the file ends."""
    offset = -(-weights.size // weights.page_bytes) * weights.page_bytes
    return offset, offset + nbytes


class Reserved(NamedTuple):
    """Memory of a program's activations and constants."""

    arena_bytes: int = 0
    constants_bytes: int = 0


NOTHING_RESERVED = Reserved()


def generate(
    graph: Graph,
    groups: Sequence[FusionGroup],
    descriptor: DeviceDescriptor,
    *,
    precision: Precision = "fp32",
    slicing: Slicing = DEFAULT,
    selector: KernelSelector | None = None,
    earlier: StoredWeights = NOTHING_STORED,
    before: PackedBefore | None = None,
    least: Reserved = NOTHING_RESERVED,
) -> Generated:
    """Generate the program of `groups` for the default memory path of `descriptor`. `Generated.write` reads the weights later.

    `selector` selects the config of each contraction; by default it is the fastest config. `earlier`: weights already in the
    file, of programs for other shapes; they are read for comparison. `before`: existing slices of its own weights. `least`:
    memory that is reserved at least.
    """
    path = descriptor.memory_paths[0]
    half = precision == "fp16"
    aliases = AliasAnalysis(graph, half=half)
    halves = stored_in_half(graph, aliases, activations=half)

    stored_as: dict[Value, Value] = {}  # the next values of states, which are stored as the present ones

    def storage(value: Value) -> StoredType:
        base = aliases.base(value)
        return "float16" if stored_as.get(base, base) in halves else value.dtype

    results, copies = _results(graph, aliases)
    gathered: dict[Value, tuple[Node, str]] = {}
    launched = []
    for group in (*groups, *copies):
        indices = host_indices(group.main, graph)
        if indices is not None:
            gathered[group.main.outputs[0]] = (group.main, indices)
        elif not aliases.is_alias(group.main):
            launched.append(group)
    early = [*(port.value for port in graph.inputs), *gathered]
    ends = [port.value for port in results if port.value.size]
    states, last = graph_states(graph, launched, ends, aliases, storage)
    launched += last
    stored_as |= {state.after: state.port.value for state in states}
    ends += stored_as
    buffers = assign_buffers(launched, early, ends, aliases, storage, stored_as)
    weights = PackingList(descriptor.page_bytes, earlier.size)
    context = LoweringContext(
        descriptor,
        path,
        half,
        precision == "tf32",
        slicing,
        KernelLibrary(descriptor.code),
        selector or KernelSelector(descriptor),
        buffers,
        weights,
        earlier,
    )
    context.before = before or PackedBefore()
    for value in (*gathered, *(state.port.value for state in states)):
        context.tensor(value)
    chosen = _lower_all(context, join_updates(launched, buffers))
    gathers = [
        place_rows(context, node, indices, str(context.tensor(value).value)) for value, (node, indices) in gathered.items()
    ]
    # An input that no kernel reads (it only selects rows, or is unused) has no tensor.
    given = [port for port in graph.inputs if port.name not in dict(graph.states)]
    inputs = [Port(port.name, port.value.shape, port.dtype, context.known(port.value)) for port in given]
    outputs = [
        Port(
            port.name,
            port.value.shape,
            port.dtype,
            str(context.tensor(port.value).value) if port.value.size else None,
            count=None if port.count is None else str(context.tensor(port.count[1]).value),
            axis=0 if port.count is None else port.count[0],
        )
        for port in results
    ]
    hands_over = descriptor.uses_host_memory
    touched = first_and_last(context.launches, "tensor")
    outputs = outputs if hands_over else read_early(context.tensors, touched, outputs, gathers)
    kept = [
        State(each.port.name, each.output, each.port.value.shape, each.port.dtype, str(context.tensor(each.after).value))
        for each in states
    ]
    in_states, states_bytes = _states(context, kept)
    tensors, arena_bytes, live_bytes = _arena(context, touched, inputs, outputs, gathers, in_states)
    constants = np.frombuffer(bytes(context.constants) or bytes(TENSOR_ALIGNMENT), np.uint8)
    constants_offset, end = _constants_place(weights, constants.nbytes)
    program = Program(
        memory_path=path,
        precision=precision,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        tensors=(*tensors, *in_states.values()),
        slices=tuple(context.slices),
        launches=tuple(context.launches),
        host_embeddings=tuple(gathers),
        arena_bytes=max(arena_bytes, least.arena_bytes),
        live_bytes=live_bytes,
        page_bytes=descriptor.page_bytes,
        hands_over=hands_over,
        constants_offset=constants_offset,
        constants_bytes=max(constants.nbytes, least.constants_bytes),
        weights_bytes=end,
        status=None if context.status_value is None else str(context.status().value),
        states=tuple(kept),
        states_bytes=states_bytes,
    )
    channels = {part.channel for part in program.slices if part.is_image}
    source = context.kernels.source(lane_kind(program), channels)
    made = {key: tuple(part for _, part in parts) for key, parts in context.packed.items()}
    return Generated(program, source, weights, constants, context.placements, made, chosen)


def _lower_all(context: LoweringContext, groups: Sequence[FusionGroup]) -> dict[str, frozenset[KernelRequest]]:
    """Lower the groups; by kernel, what their lowerings requested of the selector."""
    chosen: dict[str, frozenset[KernelRequest]] = {}
    for group in groups:
        first = len(context.launches)
        lower(context, group)
        if requests := context.selector.recent():
            for name in {launch.kernel for launch in context.launches[first:]}:
                chosen[name] = chosen.get(name, frozenset()) | requests
    return chosen


def _results(graph: Graph, aliases: AliasAnalysis) -> tuple[list[GraphPort], list[FusionGroup]]:
    """The outputs, each with its own tensor: an output that is an input or a constant is copied by an extra launch.

    States are no outputs; one that becomes another input is copied too, before that input changes.
    """
    results, copies, seen = [], [], set()
    inputs, states = {port.value for port in graph.inputs}, set(dict(graph.states).values())
    for port in graph.outputs:
        if port.name in states:
            continue
        base, value = aliases.base(port.value), port.value
        if value.size == 0:
            results.append(port)
            continue
        if base in inputs or base.constant is not None or base in seen:
            value = Value(f"{port.name}.copy", port.value.shape, port.value.dtype)
            copies.append(FusionGroup(Node("Copy", f"{port.name}.copy", [port.value], [value])))
        results.append(replace(port, value=value))
        seen.add(base)
    return results, copies


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
    lifetimes = dict(touched)
    status = None if context.status_value is None else str(context.status().value)  # in use from before the run to after it
    early = [*(port.tensor for port in inputs), *(gather.tensor for gather in gathers), status]
    for name in early:
        if name is not None:
            lifetimes[name] = (0, lifetimes.get(name, (0, 0))[1])
    counts = [(port.count, None) for port in outputs]
    for name, end in (*((port.tensor, port.ready) for port in outputs), *counts, (status, None)):
        if name is not None:
            end = last if end is None else end
            lifetimes[name] = (lifetimes.get(name, (end, end))[0], end)  # if no launch uses it, its parts are tensors
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
