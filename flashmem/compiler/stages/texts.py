"""Text forms of the results of stages, one line for each part, to read and to compare with `diff`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from flashmem.compiler.ir.fusion_group import FusedGraph, FusionGroup
from flashmem.compiler.ir.graph import Node
from flashmem.compiler.lowering.generated import Generated
from flashmem.compiler.memory.placement import PlacedGraph
from flashmem.compiler.stages.planned import Attempt, CompiledVariant
from flashmem.program.launches import Arg, Launch
from flashmem.program.program import Program
from flashmem.schedule.plan import OverlapPlan, PlannedWeight, PoolLayout


def _joined(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


# -- groups


def groups_text(fused: FusedGraph) -> str:
    """The fusion groups, in execution order."""
    return _joined([f"{len(fused.groups)} groups", *map(_group, fused.groups)])


def order_text(fused: FusedGraph) -> str:
    """The peak of the activations, and the fusion groups in the order with that peak."""
    order = fused.order
    if order is None:
        return groups_text(fused)
    peak = (
        f"peak {order.peak_bytes} bytes; {order.given_bytes} in the model's order, {order.bound_bytes} at least; {order.method}"
    )
    return f"{peak}\n{groups_text(fused)}"


def _group(group: FusionGroup) -> str:
    """A group: its operators, in order, its main one by its type too."""
    parts = [*map(_name, group.prologue), f"{group.main.op} {_name(group.main)}".strip(), *map(_name, group.epilogue)]
    moved = [] if group.moved is None else [f"stored as {_name(group.moved)}"]
    kept = ["keeps its prologue"] * group.keeps
    joined = [f"with {_group(each)}" for each in group.joined]
    return f"{group.output.name} = {'; '.join([' + '.join(parts), *moved, *kept, *joined])}"


def _name(node: Node) -> str:
    return node.name or node.op


def placed_text(placed: PlacedGraph) -> str:
    """The groups that are launched, and the memory that each reads and writes."""
    buffers = placed.buffers
    lines = [f"{len(placed.launched)} launched groups, {placed.precision}"]
    lines += [f"looked up by the host: {value.name}, rows of {indices}" for value, (_, indices) in placed.lookups.items()]
    lines += [f"state {state.port.name} becomes {state.after.name}" for state in placed.states]
    for at, group in enumerate(placed.launched, start=1):
        lines.append(f"{at} {_group(group)}")
        for each in (group, *group.joined):
            over = buffers.overwritten.get(each.main)
            for value in each.written:
                place = buffers.of(value)
                note = "" if over is None else f", over {over.name}"
                lines.append(
                    f"    writes {value.name}: {buffers.storage(value)} in {place.root.name} from {place.offset}{note}"
                )
    return _joined(lines)


# -- programs


def program_text(made: Generated) -> str:
    """The tensors, slices and launches of a program."""
    return _joined(_program_lines(made.program))


def _program_lines(program: Program) -> Iterator[str]:
    yield f"{program.memory_path} {program.precision}: arena {program.arena_bytes} bytes, {program.live_bytes} of them at once"
    yield from (f"input {port.name}: {port.dtype}{list(port.shape)} in {port.tensor}" for port in program.inputs)
    yield from (f"output {port.name}: {port.dtype}{list(port.shape)} in {port.tensor}" for port in program.outputs)
    yield from (f"state {state.name}: {state.dtype}{list(state.shape)} in {state.tensor}" for state in program.states)
    yield from (
        f"lookup {each.tensor}: {each.rows} rows at {each.offset} by {each.indices}" for each in program.host_embeddings
    )
    for tensor in program.tensors:
        place = f"{tensor.nbytes} bytes in the {tensor.memory} from {tensor.offset}"
        yield f"tensor {tensor.name}: {tensor.dtype}{list(tensor.shape)}, {place}"
    for part in program.slices:
        image = f", {part.width} x {part.height} texels" if part.is_image else ""
        yield f"slice {part.name}: {part.nbytes} bytes{image}"
    yield from (f"launch {number} {_launch(launch)}" for number, launch in enumerate(program.launches, start=1))


def _launch(launch: Launch) -> str:
    sizes = " ".join(f"{'x'.join(map(str, size))}" for size in (launch.global_size, launch.local_size) if size is not None)
    return f"{launch.name}: {launch.kernel}({', '.join(map(_arg, launch.args))}) over {sizes}"


def _arg(arg: Arg) -> str:
    return f"constants + {arg.value}" if arg.kind == "constant" else str(arg.value)


def steady_text(made: Generated) -> str:
    """The launches of later runs that replace some of the first run's."""
    steady = made.program.steady
    lines = (f"{each.first} to {each.last}: {_launch(each.launch)}" for each in steady)
    return _joined([f"{len(steady)} steady launches", *lines])


def elsewhere_text(programs: Mapping[str, Generated]) -> str:
    """The launches of each program for another instruction set."""
    lines = [f"{len(programs)} other instruction sets"]
    for name, made in programs.items():
        lines.append(f"for {name}")
        lines += [f"    {number} {_launch(launch)}" for number, launch in enumerate(made.program.launches, start=1)]
    return _joined(lines)


# -- plans and the weight file


def attempt_text(made: Attempt) -> str:
    """The plan of a program: see `plan_text`."""
    return plan_text(made.plan)


def plan_text(plan: OverlapPlan) -> str:
    """The objective of a plan, and when each weight is loaded, moved and used."""
    lines = [
        f"{plan.objective_kind} {plan.objective:.6g}, at least {plan.bound:.6g}; by {plan.member}, tier {plan.tier}",
        f"mode {plan.mode}, M_peak {plan.m_peak} bytes, chunks of {plan.chunk_bytes} bytes",
        *(f"note: {note}" for note in plan.notes),
        *map(_weight, plan.weights),
    ]
    return _joined(lines)


def _weight(weight: PlannedWeight) -> str:
    used = f"used by {weight.first_use} to {weight.last_use}"
    if weight.preload:
        return f"{weight.name}: {weight.nbytes} bytes, in W; {used}"
    moves = " ".join(f"{layer}:{chunks}" for layer, chunks in weight.moves)
    kept = ", kept" if weight.keep else ""
    return f"{weight.name}: {weight.nbytes} bytes, read from {weight.read_layer}, moved at {moves}; {used}{kept}"


def layouts_text(made: CompiledVariant) -> str:
    """The place of each slice in the memory of each transfer mode."""
    return _joined(line for mode, layout in made.plan.layouts.items() for line in _layout(mode, layout))


def _layout(mode: str, layout: PoolLayout) -> Iterator[str]:
    yield f"mode {mode}: pool {layout.pool_bytes} bytes, staging {layout.staging_bytes}, ring {layout.ring_bytes}"
    yield from (f"    {name} from {offset}" for name, offset in layout.offsets.items())
    yield from (f"    {name} in texture {slot}" for name, slot in layout.slot_of.items())


def weights_text(programs: Sequence[Generated]) -> str:
    """The content of the weight file, in its order."""
    last = programs[-1]
    lines = [f"{last.program.weights_bytes} bytes"]
    for made in programs:
        for name, places in made.weights.entries():
            lines += [f"{name}: {nbytes} bytes from {offset}" for offset, nbytes in places]
    return _joined([*lines, f"constants: {last.constants.nbytes} bytes from {last.program.constants_offset}"])
