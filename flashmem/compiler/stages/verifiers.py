"""Verifiers of the results of stages. Those of graphs are `compiler.passes.verifier`'s."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from flashmem.base.errors import BundleError
from flashmem.bundle.validation import check_bundle, check_program, plan_holds
from flashmem.compiler.ir.fusion_group import FusedGraph, FusionGroup
from flashmem.compiler.ir.graph import Graph, Node, Value
from flashmem.compiler.ir.view_nodes import unreshaped
from flashmem.compiler.lowering.generated import Generated
from flashmem.compiler.memory.placement import PlacedGraph
from flashmem.compiler.operators import is_elementwise
from flashmem.compiler.passes.verifier import InvalidResultError, verify
from flashmem.compiler.stages.planned import Attempt, CompiledVariant
from flashmem.program.kernel_text import kernel_texts
from flashmem.program.program import Program
from flashmem.schedule.plan import OverlapPlan


def verify_rewritten(graph: Graph) -> None:
    """A graph after all passes, whose nodes have kernels."""
    verify(graph, ["decomposed"])


def verify_groups(fused: FusedGraph) -> None:
    """Each node is in one group, after those that it reads; a Reshape is in none, and prologue and epilogue are elementwise."""
    graph = fused.graph
    found = [node for group in fused.groups for node in (*group.nodes, *([group.moved] if group.moved else []))]
    wanted = {node for node in graph.nodes if node.op != "Reshape"}
    if len(found) != len(wanted) or set(found) != wanted:
        raise InvalidResultError(f"{_first(wanted.symmetric_difference(found), 'a node')} is not in one group")
    for group in fused.groups:
        for node in (*group.prologue, *group.epilogue):
            if not is_elementwise(node):
                raise InvalidResultError(f"{node.name} is beside {group.main.name}, and not elementwise")
    _verify_order(graph, fused.groups)


def verify_order(fused: FusedGraph) -> None:
    """Groups follow those that they read; only Slices, which may need no launch, are left out."""
    inside = {node for group in fused.groups for node in group.nodes}
    lost = [node for group in fused.uncut for node in group.nodes if node not in inside and node.op not in _NO_LAUNCH]
    if lost:
        raise InvalidResultError(f"{lost[0].name} is in no group")
    _verify_order(fused.graph, fused.groups)


_NO_LAUNCH = ("Slice", "RowPart")


def _verify_order(graph: Graph, groups: Sequence[FusionGroup]) -> None:
    """Each group reads only what exists before it: inputs, constants, results of groups, and ranges of those."""
    ready = {port.value for port in graph.inputs}
    for group in groups:
        for value in group.read():
            source = _source(value, ready)
            if source.constant is None and source not in ready:
                raise InvalidResultError(f"{group.output.name} is made before {source.name}, which it reads")
        ready.update(group.written)


def _source(value: Value, ready: set[Value]) -> Value:
    """What `value` is a range of, if no group has made it."""
    value = unreshaped(value)
    while value not in ready and value.producer is not None and value.producer.op in _NO_LAUNCH:
        value = unreshaped(value.producer.input(0))
    return value


def verify_placed(placed: PlacedGraph) -> None:
    """Each launched group reads values that exist, and that no group before it has overwritten."""
    aliases = placed.buffers.aliases
    overwritten = placed.buffers.overwritten
    ready = {*(port.value for port in placed.fused.graph.inputs), *placed.lookups}
    gone: dict[Value, list[tuple[int, int, Node]]] = {}
    for group in placed.launched:
        for each in (group, *group.joined):
            for value in each.read():
                found = aliases.of(value)
                if found.base.constant is None and found.base not in ready:
                    raise InvalidResultError(f"{each.output.name} is made before {found.base.name}, which it reads")
                for start, end, node in gone.get(found.base, ()):
                    if found.start < end and start < found.start + value.size:
                        raise InvalidResultError(f"{each.output.name} reads {value.name}, which {node.name} overwrote")
            ready.update(map(aliases.base, each.written))
            over = overwritten.get(each.main)
            if over is not None:
                found = aliases.of(over)
                gone.setdefault(found.base, []).append((found.start, found.start + over.size, each.main))
    late = [port.name for port in placed.results if port.value.size and not _exists(aliases.base(port.value), ready)]
    if late:
        raise InvalidResultError(f"no group makes the output {late[0]}")


def _exists(value: Value, ready: set[Value]) -> bool:
    return value in ready or value.constant is not None


def verify_program(made: Generated) -> None:
    """Launches have a kernel, and name no memory outside the program's."""
    kernels = kernel_texts(made.source.plain).keys()
    launches = (*made.program.launches, *(each.launch for each in made.program.steady))
    missing = [launch for launch in launches if launch.kernel not in kernels]
    if missing:
        raise InvalidResultError(f"launch {missing[0].name} names the kernel {missing[0].kernel}, which has no text")
    _check(made.program)


def _check(program: Program, plan: OverlapPlan | None = None) -> None:
    """Check a program, and its plan, as a reader of the bundle does.

    The weight file may still be too short for the constants of all shape variants, for which there is room.
    """
    end = max(program.weights_bytes, program.constants_offset + program.constants_bytes)
    whole = replace(program, weights_bytes=end)
    try:
        check_program(whole) if plan is None else check_bundle(whole, plan)
    except BundleError as error:
        raise InvalidResultError(str(error).removeprefix(_OF_BUNDLE[0]).removesuffix(_OF_BUNDLE[1])) from error


def verify_plan(made: Attempt) -> None:
    """The plan holds for the program. The planner has checked it with its instance."""
    if not plan_holds(made.generated.program, made.plan):
        raise InvalidResultError("the plan does not hold for the program")


_OF_BUNDLE = ("the bundle is damaged: ", "; compile the model again")
"""Begin and end of what a reader of a bundle is told."""


def verify_elsewhere(programs: Mapping[str, Generated]) -> None:
    """Each program for another instruction set holds by itself."""
    for made in programs.values():
        verify_program(made)


def verify_laid_out(made: CompiledVariant) -> None:
    """The plan holds for the program, and each slice has a place in the memory of each transfer mode."""
    _check(made.generated.program, made.plan)


def verify_weights(programs: Sequence[Generated]) -> None:
    """Pieces of the weight file follow one another, and constants follow them."""
    places = [place for made in programs for _, places in made.weights.entries() for place in places]
    places.append((programs[-1].program.constants_offset, programs[-1].constants.nbytes))
    for (start, nbytes), (following, _) in pairwise(places):
        if start + nbytes > following:
            raise InvalidResultError(f"the pieces of the weight file at {start} and {following} overlap")
    ends = [made.program.constants_offset + made.program.constants_bytes for made in programs]
    if max(ends) > programs[-1].program.weights_bytes:
        raise InvalidResultError("the weight file ends before the constants")


def _first(nodes: Iterable[Node], otherwise: str) -> str:
    return next((node.name or node.op for node in nodes), otherwise)
