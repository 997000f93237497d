"""What a worker process of a test does, in a module that takes no time to import."""

from __future__ import annotations

from flashmem import Session


def refused(path: str) -> int | None:
    """Open a session in too small a budget."""
    with Session(path, budget=10_000, build_apart=False) as session:
        return session.budget
