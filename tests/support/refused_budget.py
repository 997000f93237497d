"""The function of a worker process, in a module that imports quickly."""

from __future__ import annotations

from flashmem import Session


def refused(path: str) -> int | None:
    """Open a session in a budget that is too small."""
    with Session(path, budget=10_000, build_apart=False) as session:
        return session.budget
