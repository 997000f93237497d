"""The type of functions that measure the bytes of a plan."""

from __future__ import annotations

from collections.abc import Callable

from flashmem.schedule.plan import OverlapPlan

Measure = Callable[[OverlapPlan], int]
"""The bytes of a plan that the caller's limit covers: all bytes of a budget, or the bytes in flight."""
