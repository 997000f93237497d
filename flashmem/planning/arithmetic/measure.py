"""The bytes that a plan takes."""

from __future__ import annotations

from collections.abc import Callable

from flashmem.schedule.plan import OverlapPlan

Measure = Callable[[OverlapPlan], int]
"""The bytes that a plan takes, of those that the caller's limit covers: all of a budget, or what is in flight."""
