"""The bytes of a plan that a limit covers, by its layout."""

from __future__ import annotations

from collections.abc import Callable

from flashmem.base.types import TransferMode
from flashmem.planning.memory.layout import lay_out_pools
from flashmem.program.program import Program
from flashmem.schedule.plan import OverlapPlan
from flashmem.schedule.residency import session_bytes

Measure = Callable[[OverlapPlan], int]
"""A function that returns the bytes of a finished plan that a limit covers."""


def session_measure(program: Program, mode: TransferMode) -> Measure:
    """Measure all bytes that a session's budget limits."""

    def measure(plan: OverlapPlan) -> int:
        layout = lay_out_pools(program.slices, plan, [mode], page_bytes=program.page_bytes)[mode]
        return session_bytes(program, layout, shares_memory=plan.shares_memory)

    return measure


def in_flight_measure(program: Program, mode: TransferMode) -> Measure:
    """Measure the bytes that M_peak limits."""

    def measure(plan: OverlapPlan) -> int:
        layout = lay_out_pools(program.slices, plan, [mode], page_bytes=program.page_bytes)[mode]
        return layout.in_flight_bytes(shares_memory=plan.shares_memory)

    return measure
