"""Validation of a bundle before it is used: the types of all fields first (`field_types`), then every offset, size and name.

The runtime accesses the memory that a bundle names. After these checks all of it is inside the weight file, the arena, a pool
or a texture.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import numpy as np

from flashmem.base.errors import BundleError
from flashmem.base.pages import is_page_size
from flashmem.base.types import ITEMSIZE, POOL_ALIGNMENT, TENSOR_ALIGNMENT, TEXEL_BYTES
from flashmem.bundle.checksums import table_end
from flashmem.bundle.field_types import check_types
from flashmem.program.launches import Launch
from flashmem.program.program import Program, copied_outputs
from flashmem.program.tensors import HostEmbeddingLookup, Port, Slice, State, Tensor, array_bytes, port_dtype
from flashmem.schedule.check import check_rules
from flashmem.schedule.modes import MODES
from flashmem.schedule.plan import OverlapPlan, PlanViolation, PoolLayout
from flashmem.target.descriptor import MOST_LOADER_THREADS

_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


def check_bundle(program: Program, plan: OverlapPlan) -> None:
    """Raise BundleError unless `program` and `plan` are consistent and refer to no memory outside their own."""
    check_types(plan, "plan.json")
    check_program(program)
    _check_plan(program, plan)
    for mode, layout in plan.layouts.items():
        _check_layout(program, mode, layout, {w.name for w in plan.weights if w.preload})


def check_program(program: Program) -> None:
    """Raise BundleError unless `program` is consistent and refers to no memory outside its own."""
    check_types(program, "program.json")
    _check_weight_file(program)
    _check_tensors(program)
    _check_states(program)
    _check_launches(program)
    _check_steady(program)
    _check_host_embeddings(program)


def check_variants(programs: Sequence[Program]) -> None:
    """Raise BundleError unless these validated programs are one model for different shapes with one weight file."""
    first = programs[0]
    slices = dict[str, Slice]()
    seen = set[tuple[tuple[int, ...], ...]]()
    for program in programs:
        for mine, others in ((program.inputs, first.inputs), (program.outputs, first.outputs)):
            same = [(port.name, port.dtype) for port in mine] == [(port.name, port.dtype) for port in others]
            _require(same, "its shape variants have other inputs or outputs")
        shapes = tuple(port.shape for port in program.inputs)
        _require(shapes not in seen, "two of its shape variants are for the same shapes")
        seen.add(shapes)
        for name in _OF_ALL_VARIANTS:
            same = getattr(program, name) == getattr(first, name)
            _require(same, f"its shape variants differ in {name}")
        for part in program.slices:
            _require(slices.setdefault(part.name, part) == part, f"two of its shape variants have another slice {part.name!r}")
        _require(_state_tensors(program) == _state_tensors(first), "its shape variants have their states in other places")


def check_elsewhere(program: Program, other: Program) -> None:
    """Raise BundleError unless two validated programs differ in nothing but their launches, as for other instruction sets."""
    _require(other.with_launches_of(program) == program, "its programs for other instruction sets use other memory")
    reads, others = (
        [{arg.value for arg in launch.args if arg.kind == "slice"} for launch in each.launches] for each in (program, other)
    )
    _require(reads == others, "its programs for other instruction sets read other slices")


def _state_tensors(program: Program) -> list[Tensor]:
    tensors = {tensor.name: tensor for tensor in program.tensors}
    return [tensors[state.tensor] for state in program.states]


_OF_ALL_VARIANTS = (
    "memory_path", "precision", "page_bytes", "constants_offset", "weights_bytes", "hands_over", "states", "states_bytes",
)  # fmt: skip


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise BundleError(f"the bundle is damaged: {what}; compile the model again")


def _require_unique(names: Iterable[str], what: str) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    _require(not twice, f"two {what} are called {twice[0]!r}" if twice else "")


def _check_weight_file(program: Program) -> None:
    """Require that slices and constants are inside the weight file."""
    _require(is_page_size(program.page_bytes), "its weights are laid out in no pages")
    _require_unique((part.name for part in program.slices), "slices")
    for part in program.slices:
        name = f"slice {part.name!r}"
        _require(part.nbytes > 0, f"{name} is empty")
        _require(0 <= part.raw <= part.nbytes, f"{name} has more elements than bytes")
        _require(part.offset % program.page_bytes == 0, f"{name} does not start on a page")
        if part.is_image:
            texel = TEXEL_BYTES[part.channel]
            _require(part.height > 0, f"{name} has no rows")
            _require(part.row_pitch >= part.width * texel and part.row_pitch % texel == 0, f"{name} has rows that overlap")
            _require(part.nbytes <= part.file_bytes, f"{name} is larger than its texture")
        _require(part.offset + part.file_bytes <= program.weights_bytes, f"{name} is outside the weight file")
    _check_joined(program)
    end = program.constants_offset + program.constants_bytes
    _require(program.constants_offset % program.page_bytes == 0, "the constants do not start on a page")
    _require(end <= program.weights_bytes, "the constants are outside the weight file")


def _check_tensors(program: Program) -> None:
    """Require that tensors are inside their memory and large enough for their shapes, and that ports match their tensors."""
    _require_unique((tensor.name for tensor in program.tensors), "tensors")
    _require(program.live_bytes <= program.arena_bytes, "more activations are needed at once than its arena holds")
    tensors = {tensor.name: tensor for tensor in program.tensors}
    for tensor in program.tensors:
        name = f"tensor {tensor.name!r}"
        _require(tensor.offset % TENSOR_ALIGNMENT == 0, f"{name} is not aligned")
        _require(
            tensor.nbytes > 0 and ITEMSIZE[tensor.dtype] * math.prod(tensor.shape) <= tensor.nbytes,
            f"{name} is smaller than its shape",
        )
        room = program.states_bytes if tensor.memory == "states" else program.arena_bytes
        _require(tensor.offset + tensor.nbytes <= room, f"{name} is outside the {tensor.memory}")
    for port in (*program.inputs, *program.outputs):
        _check_port(port, f"port {port.name!r}", tensors, "arena")
        _require(port.ready is None or 0 < port.ready <= len(program.launches), f"port {port.name!r} is read after no layer")
    for port in program.outputs:
        _require(port.tensor is not None or 0 in port.shape, f"output {port.name!r} has no tensor")
        _check_count(port, tensors)
    _check_handed_over(program)
    if program.status is not None:
        _require(program.status in tensors, f"its status is the unknown tensor {program.status!r}")
        status = tensors[program.status]
        _require(status.dtype == "int32" and status.nbytes >= 4, "its status is no number")


def _check_count(port: Port, tensors: Mapping[str, Tensor]) -> None:
    """Require that the number of an output's places is a number in the arena, and along one of its axes."""
    if port.count is None:
        return
    name = f"the number of places of output {port.name!r}"
    _require(port.count in tensors, f"{name} is the unknown tensor {port.count!r}")
    tensor = tensors[port.count]
    _require(tensor.dtype == "int32" and tensor.nbytes >= 4 and tensor.memory == "arena", f"{name} is no number")
    _require(0 <= port.axis < len(port.shape), f"{name} is along an axis that it does not have")


def _check_port(port: Port | State, name: str, tensors: Mapping[str, Tensor], memory: str) -> None:
    """Require that a port or state has a known type, and that its tensor is in `memory`, of that type, and large enough."""
    try:
        device = port_dtype(port)
    except ValueError as error:
        raise BundleError(f"the bundle is damaged: {error}; compile the model again") from error
    if port.tensor is None:
        return
    _require(port.tensor in tensors, f"{name} names the unknown tensor {port.tensor!r}")
    tensor = tensors[port.tensor]
    _require(tensor.memory == memory, f"{name} is in the wrong memory")
    in_half = device == "float32" if isinstance(port, State) else port.dtype == "float16"  # the host converts states
    _require(tensor.dtype == device or (in_half and tensor.dtype == "float16"), f"{name} and its tensor differ in type")
    _require(ITEMSIZE[tensor.dtype] * math.prod(port.shape) <= tensor.nbytes, f"{name} is larger than its tensor")


def _check_states(program: Program) -> None:
    """Require that states match their tensors and share no memory, and have names of their own."""
    tensors = {tensor.name: tensor for tensor in program.tensors}
    _require_unique((*(port.name for port in program.inputs), *(state.name for state in program.states)), "inputs")
    _require_unique((*(port.name for port in program.outputs), *(state.output for state in program.states)), "outputs")
    for state in program.states:
        _check_port(state, f"state {state.name!r}", tensors, "states")
        _require(tensors[state.tensor].shape == state.shape, f"state {state.name!r} and its tensor differ in shape")
    places = sorted((tensors[state.tensor].offset, tensors[state.tensor].nbytes, state.name) for state in program.states)
    for (offset, nbytes, name), (following, _, other) in pairwise(places):
        _require(offset + nbytes <= following, f"the states {name!r} and {other!r} share memory")


def _check_handed_over(program: Program) -> None:
    """Require that outputs which are returned as views of the arena share no memory."""
    tensors = {tensor.name: tensor for tensor in program.tensors}
    copied = set(copied_outputs(program))
    handed = [port for port in program.outputs if port.tensor is not None and port not in copied]
    places = sorted((tensors[str(port.tensor)].offset, array_bytes(port), port.name) for port in handed)
    for (offset, nbytes, name), (following, _, other) in pairwise(places):
        _require(offset + nbytes <= following, f"the outputs {name!r} and {other!r} share memory")


def _check_launches(program: Program) -> None:
    """Require that launches have valid sizes and name existing tensors, slices and constants."""
    tensors = {tensor.name for tensor in program.tensors}
    slices = {part.name for part in program.slices}
    readable = slices | {joined.name for joined in program.joined}
    for launch in (*program.launches, *(each.launch for each in program.steady)):
        name = f"layer {launch.name!r}"
        _require(_IDENTIFIER.fullmatch(launch.kernel) is not None, f"{name} names no kernel")
        _require(_sizes_fit(launch), f"{name} has a bad global or local size")
        for arg in launch.args:
            if arg.kind == "tensor":
                _require(arg.value in tensors, f"{name} reads the unknown tensor {arg.value!r}")
            elif arg.kind == "slice":
                _require(arg.value in readable, f"{name} reads the unknown slice {arg.value!r}")
            elif arg.kind == "constant":
                start = cast(int, arg.value)
                _require(start >= 0 and start % TENSOR_ALIGNMENT == 0, f"{name} reads a constant that is not aligned")
                inside = 0 < arg.nbytes <= program.constants_bytes - start
                _require(inside, f"{name} reads a constant outside the constants")
    used = program.uses().keys()
    unused = slices - used
    _require(not unused, f"no layer reads the slice {min(unused, default='')!r}")
    _require(used <= slices, "a layer of its first run reads slices that are joined")


def _check_joined(program: Program) -> None:
    """Require that joined slices are adjacent in the weight file."""
    slices = {part.name: part for part in program.slices}
    _require_unique((*slices, *(joined.name for joined in program.joined)), "slices")
    for joined in program.joined:
        name = f"what is joined as {joined.name!r}"
        known = len(joined.parts) > 1 and slices.keys() >= set(joined.parts)
        _require(known and not any(slices[part].is_image for part in joined.parts), f"{name} is made of no slices")
        for one, following in pairwise(slices[part] for part in joined.parts):
            _require(one.offset + one.nbytes == following.offset, f"{name} is not contiguous")


def _check_steady(program: Program) -> None:
    """Require that a steady launch reads the same slices and accesses the same tensors as the launches it replaces."""
    parts = {joined.name: joined.parts for joined in program.joined}
    done = 0
    for each in program.steady:
        name = f"the steady launch in place of layer {each.first}"
        _require(done < each.first <= each.last <= len(program.launches), f"{name} replaces no layers")
        done = each.last
        covered = program.launches[each.first - 1 : each.last]
        named = [str(arg.value) for arg in each.launch.args if arg.kind == "slice"]
        wanted = {str(arg.value) for launch in covered for arg in launch.args if arg.kind == "slice"}
        _require({part for slice_ in named for part in parts.get(slice_, (slice_,))} == wanted, f"{name} reads other slices")
        touched = {arg.value for launch in covered for arg in launch.args if arg.kind == "tensor"}
        _require({arg.value for arg in each.launch.args if arg.kind == "tensor"} == touched, f"{name} touches other tensors")


def _sizes_fit(launch: Launch) -> bool:
    size = launch.global_size
    group = launch.local_size
    if not 1 <= len(size) <= 3 or min(size) < 1 or max(size) >= 2**31:
        return False
    return group is None or (
        len(group) == len(size) and min(group) >= 1 and all(n % g == 0 for n, g in zip(size, group, strict=True))
    )


def _check_host_embeddings(program: Program) -> None:
    """Require that every row of a table is inside the weight file, and that the looked-up rows fit their tensor."""
    inputs = {port.name: port for port in program.inputs}
    tensors = {tensor.name: tensor for tensor in program.tensors}
    for lookup in program.host_embeddings:
        name = f"the table read by {lookup.indices!r}"
        _require(lookup.indices in inputs and lookup.tensor in tensors, f"{name} has no input or no tensor")
        port = inputs[lookup.indices]
        tensor = tensors[lookup.tensor]
        _require(np.dtype(port.dtype).kind in "iu", f"{name} is not indexed by integers")
        _require(min(lookup.rows, lookup.columns, lookup.panel) > 0, f"{name} is empty")
        _require(table_end(lookup) <= program.weights_bytes, f"{name} is outside the weight file")
        made = {"bfloat16": "float32"}.get(lookup.dtype, lookup.dtype.replace("int4", "int8"))
        same = tensor.dtype == made or {tensor.dtype, made} == {"float16", "float32"}
        size = ITEMSIZE[tensor.dtype] * math.prod(port.shape) * lookup.columns
        _require(same and size <= tensor.nbytes, f"{name} does not fit its tensor")
        _require(lookup.panel == 1 or not lookup.dtype.endswith("int4"), f"{name} has rows that no byte starts")
        _require(not lookup.block or _is_in_blocks(lookup), f"{name} has no whole blocks")


def _is_in_blocks(lookup: HostEmbeddingLookup) -> bool:
    """Whether the rows of a table in blocks are whole blocks in whole panels."""
    whole = lookup.columns % lookup.block == 0 and lookup.panel % 2 == 0 and lookup.block_fours % 2 == 0
    counts = (lookup.block_halves, lookup.block_bytes, lookup.block_fours)
    return bool(whole and min(counts) >= 0) and lookup.dtype == "uint8" and lookup.row_stride == lookup.panel_bytes


@dataclass(frozen=True)
class _Layer:
    capacity: int


@dataclass(frozen=True)
class _Weight:
    name: str
    nbytes: int
    first_use: int
    last_use: int


@dataclass(frozen=True)
class _HeldInstance:
    """The part of the planner's problem that a bundle holds, for `check_rules`. The capacities are those in the plan."""

    layers: tuple[_Layer, ...]
    weights: tuple[_Weight, ...]
    chunk_bytes: int
    m_peak: int
    mode: str


def _check_plan(program: Program, plan: OverlapPlan) -> None:
    """Require that the plan belongs to this program and satisfies C0-C3 and its own layouts."""
    sizes = {part.name: part.nbytes for part in program.slices}
    _require(plan.chunk_bytes > 0, "its plan has no chunk size")
    _require(plan.piece_bytes > 0, "its plan has pieces of no bytes")
    _require(1 <= plan.loader_threads <= MOST_LOADER_THREADS, f"its plan is for {plan.loader_threads} loader threads")
    _require(len(plan.capacities) == len(program.launches), "its plan has another number of layers")
    weights = tuple(_Weight(name, sizes[name], first, last) for name, (first, last) in program.uses().items())
    instance = _HeldInstance(tuple(map(_Layer, plan.capacities)), weights, plan.chunk_bytes, plan.m_peak, plan.mode)
    try:
        check_rules(plan, cast(Any, instance), program.slices)
    except (PlanViolation, KeyError, IndexError) as error:
        raise BundleError(f"the bundle is damaged: its plan does not hold ({error}); compile the model again") from error


def plan_holds(program: Program, plan: OverlapPlan) -> bool:
    """Whether `plan` is a valid plan of `program`: C0-C3, its objective and its layouts."""
    try:
        _check_plan(program, plan)
    except BundleError:
        return False
    return True


def _check_layout(program: Program, mode: str, layout: PoolLayout, preloaded: Collection[str]) -> None:
    """Require that every place in `layout` is inside its pool, texture slot or staging."""
    _require(mode in MODES, f"it has a layout for the unknown transfer mode {mode!r}")
    _require(1 <= layout.threads <= MOST_LOADER_THREADS, f"its layout for mode {mode} is for {layout.threads} loader threads")
    _require(layout.piece_bytes > 0, f"its layout for mode {mode} has pieces of no bytes")
    _require(layout.segment_bytes == 0, f"its layout for mode {mode} states segments, which only a session does")
    kind = MODES[mode]
    if kind.by_pages:
        return
    for part in program.slices:
        name = f"slice {part.name!r} in mode {mode}"
        words = -(-part.file_bytes // 16) * 16  # stream lanes copy whole words
        if part.name in layout.slot_of:
            _require(part.is_image and kind.copies, f"{name} is no texture of its own")
            _require(layout.slot_of[part.name] < len(layout.slots), f"{name} has no texture slot")
            slot = layout.slots[layout.slot_of[part.name]]
            fits = slot.width >= part.width and slot.height >= part.height and slot.channel == part.channel
            _require(fits, f"{name} does not fit its texture slot")
        else:
            _require(not (part.is_image and kind.copies), f"{name} has no texture slot")
            _check_place(name, layout.offsets.get(part.name), words, layout.pool_bytes)
        if part.name in layout.staging_slot_of:
            _require(layout.staging_slot_of[part.name] < len(layout.staging_slots), f"{name} has no staging slot")
            fits = layout.staging_slots[layout.staging_slot_of[part.name]] >= words
            _require(fits, f"{name} does not fit its staging slot")
        elif part.name in layout.staging:
            _check_place(f"{name} (staging)", layout.staging[part.name], words, layout.staging_bytes)
        if kind.passes_ring(preload=part.name in preloaded, shares_memory=not layout.staging_slots):
            own = layout.ring_bytes // layout.threads // POOL_ALIGNMENT * POOL_ALIGNMENT
            least = max(part.row_pitch, POOL_ALIGNMENT)  # of a buffer a page: a piece of no bytes would never end
            _require(own >= least, f"no row or page of {name} fits the ring")


def _check_place(name: str, offset: int | None, nbytes: int, room: int) -> None:
    _require(offset is not None, f"{name} has no place")
    assert offset is not None
    _require(offset % TENSOR_ALIGNMENT == 0, f"{name} is not aligned")
    _require(offset + nbytes <= room, f"{name} is outside its pool")
