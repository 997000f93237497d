"""Only locks of C are in `with`, and all threads are started in one place (`flashmem.base.threads` says why)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import flashmem

PACKAGE = Path(flashmem.__file__).parent
ALLOWED = {"Lock", "RLock", "TIMEOUT_MAX", "current_thread", "get_ident", "local", "main_thread"}


def used(source: str) -> set[str]:
    """The names of module `threading` that a source uses."""
    if "threading" not in source:
        return set()
    tree, found = ast.parse(source), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "threading":
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and node.module == "threading":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {f"as {alias.asname}" for alias in node.names if alias.name == "threading" and alias.asname}
    return found


def test_conditions_events_and_threads_of_python_are_not_used() -> None:
    sources = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "base" / "threads.py"]
    wrong = {str(path.relative_to(PACKAGE)): used(path.read_text("utf-8")) - ALLOWED for path in sources}
    assert len(sources) > 400 and not {path: names for path, names in wrong.items() if names}


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import threading\nwith threading.Condition(): pass", "Condition"),
        ("from threading import Event", "Event"),
        ("import threading as t", "as t"),
    ],
)
def test_each_use_is_found(source: str, name: str) -> None:
    assert used(source) == {name}
