"""Postponed imports: a module that a library imports, but may never use, is loaded when its first attribute is read."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import LazyLoader
from types import ModuleType


class _Postponing(MetaPathFinder):
    """Finds the modules `names`, with a loader that runs them later."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec of a module in `names`; None for others, which the next finder finds."""
        spec = PathFinder.find_spec(name, path, target) if name in self._names else None
        if spec is not None and spec.loader is not None:
            spec.loader = LazyLoader(spec.loader)
        return spec


@contextmanager
def postponed(*names: str) -> Iterator[None]:
    """Postpone the imports of the modules `names`, of Python code, by the imports in the body. Loaded modules are unchanged."""
    finder = _Postponing(names)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
