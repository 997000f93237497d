"""Verifiers of stages: each finds a result that breaks one of its rules, and the stage is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from flashmem.compiler.frontend.importer import import_model
from flashmem.compiler.ir.fusion_group import FusedGraph
from flashmem.compiler.lowering.generated import Generated, Lowering
from flashmem.compiler.memory.placement import PlacedGraph
from flashmem.compiler.operators import why_unsupported
from flashmem.compiler.passes.pipeline import prepare
from flashmem.compiler.passes.verifier import InvalidResultError
from flashmem.compiler.selection.selector import KernelSelector
from flashmem.compiler.stages.stage import Stage
from flashmem.compiler.stages.stages import FUSE, JOIN, LOWER, ORDER, PACK, PLACE, STAGES
from flashmem.target.descriptor import load_descriptor
from tests.support.paths import DATA


@pytest.fixture(scope="module")
def fused() -> FusedGraph:
    return FUSE(prepare(import_model(DATA / "vit-tiny.onnx", {}, why_unsupported)))


def lowered(placed: PlacedGraph) -> Generated:
    descriptor = load_descriptor("pocl")
    return LOWER(placed, Lowering(descriptor, KernelSelector(descriptor)))


def made_by(stage: Stage[Any, Any], change: Callable[[Any], Any]) -> Stage[Any, Any]:
    """`stage`, whose result is changed before it is verified."""
    return replace(stage, make=lambda *given, **named: change(stage.make(*given, **named)))


def test_each_stage_has_a_name_of_its_own() -> None:
    assert len({stage.name for stage in STAGES}) == len(STAGES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda fused: replace(fused, groups=fused.groups[:-1]), "after stage fuse: .* is not in one group"),
        (lambda fused: replace(fused, groups=(*fused.groups, fused.groups[-1])), "is not in one group"),
        (lambda fused: replace(fused, groups=fused.groups[::-1]), "is made before .*, which it reads"),
    ],
)
def test_groups(change: Callable[[FusedGraph], FusedGraph], message: str, fused: FusedGraph) -> None:
    with pytest.raises(InvalidResultError, match=message):
        made_by(FUSE, change)(fused.graph)


def test_an_epilogue_is_elementwise(fused: FusedGraph) -> None:
    def swap(made: FusedGraph) -> FusedGraph:
        groups = [
            replace(group, main=group.epilogue[0], epilogue=[group.main, *group.epilogue[1:]]) if group.epilogue else group
            for group in made.groups
        ]
        return replace(made, groups=tuple(groups))

    with pytest.raises(InvalidResultError, match="not elementwise"):
        made_by(FUSE, swap)(fused.graph)


def test_an_order_keeps_all_groups_behind_what_they_read(fused: FusedGraph) -> None:
    with pytest.raises(InvalidResultError, match=r"after stage order: .* is in no group"):
        made_by(ORDER, lambda made: replace(made, groups=made.groups[:-1]))(fused)
    with pytest.raises(InvalidResultError, match=r"after stage order: .* is made before"):
        made_by(ORDER, lambda made: replace(made, groups=made.groups[::-1]))(fused)


def test_launched_groups_read_what_exists(fused: FusedGraph) -> None:
    with pytest.raises(InvalidResultError, match="after stage place: no group makes the output logits"):
        made_by(PLACE, lambda placed: replace(placed, launched=placed.launched[:-1]))(fused, "fp32")
    placed = PLACE(fused, "fp32")
    with pytest.raises(InvalidResultError, match=r"after stage join: .* is made before"):
        made_by(JOIN, lambda made: replace(made, launched=made.launched[1:]))(placed)


def test_what_was_overwritten_is_read_no_more(fused: FusedGraph) -> None:
    def overwrite(placed: PlacedGraph) -> PlacedGraph:
        """The first group of which a later one reads the operand too overwrites it."""
        reads = [group.read() for group in placed.launched]
        at, operand = next(
            (at, value)
            for at, values in enumerate(reads)
            for value in values
            if value.constant is None and any(value in later for later in reads[at + 1 :])
        )
        over = {placed.launched[at].main: operand}
        return replace(placed, buffers=replace(placed.buffers, overwritten=over))

    with pytest.raises(InvalidResultError, match=r"which .* overwrote"):
        made_by(PLACE, overwrite)(fused, "fp32")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda made: replace(made, source=replace(made.source, plain="")), "which has no text"),
        (lambda made: replace(made, program=replace(made.program, arena_bytes=64)), "than its arena holds$"),
        (lambda made: replace(made, program=replace(made.program, slices=made.program.slices[1:])), "unknown slice"),
    ],
)
def test_launches_name_memory_of_the_program(change: Callable[[Generated], Generated], message: str, fused: FusedGraph) -> None:
    descriptor = load_descriptor("pocl")
    with pytest.raises(InvalidResultError, match=f"after stage lower: .*{message}"):
        made_by(LOWER, change)(PLACE(fused, "fp32"), Lowering(descriptor, KernelSelector(descriptor)))


def test_pieces_of_the_weight_file_are_apart(fused: FusedGraph) -> None:
    made = lowered(PLACE(fused, "fp32"))

    def early(programs: list[Generated]) -> list[Generated]:
        return [replace(each, program=replace(each.program, constants_offset=0)) for each in programs]

    assert PACK([made])[0].program == made.program
    with pytest.raises(InvalidResultError, match="overlap"):
        made_by(PACK, early)([made])
