"""Tables of the compiler's stages and passes, made from the code: `python -m tools.compiler_tables` writes them again.

In a page, a table is between the comments `<!-- NAME: python -m tools.compiler_tables -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from flashmem.compiler.passes.pipeline import PASSES
from flashmem.compiler.stages.stages import IMPORT, STAGES

INTERNALS = Path(__file__).parents[1] / "docs" / "reference" / "internals"


def stages_table() -> str:
    """The stages, the result of each, and the module that makes it."""
    rows = (
        (each.name, each.what, "`compiler/frontend/importer.py`" if each is IMPORT else _module(each.make)) for each in STAGES
    )
    return _table(("stage", "its result", "module"), rows)


def passes_table() -> str:
    """The passes, what each does, and its module."""
    rows = ((each.name, each.what, _module(each.run)) for each in PASSES)
    return _table(("pass", "what it does", "module"), rows)


TABLES: Mapping[Path, tuple[str, Callable[[], str]]] = {
    INTERNALS / "architecture.md": ("stages", stages_table),
    INTERNALS / "compiler.md": ("passes", passes_table),
}
"""The pages, and the name and content of the table of each."""


def page_with_table(page: Path) -> str:
    """The text of a page with its table as the code says now."""
    name, table = TABLES[page]
    begin = f"<!-- {name}: python -m tools.compiler_tables -->\n"
    found = re.compile(f"{re.escape(begin)}.*?<!-- end -->", re.DOTALL)
    text, count = found.subn(lambda _: f"{begin}{table()}<!-- end -->", page.read_text())
    assert count == 1, f"{page} has {count} tables {name}"
    return text


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ("---",) * len(head), *rows))


def _module(function: Callable[..., Any]) -> str:
    return f"`{function.__module__.removeprefix('flashmem.').replace('.', '/')}.py`"


if __name__ == "__main__":
    for path in TABLES:
        path.write_text(page_with_table(path))
