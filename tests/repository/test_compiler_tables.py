"""Tables of stages and passes in pages are those of the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.compiler_tables import TABLES, page_with_table


@pytest.mark.parametrize("page", TABLES, ids=lambda page: page.name)
def test_a_page_has_the_table_of_the_code(page: Path) -> None:
    assert page.read_text() == page_with_table(page), "python -m tools.compiler_tables"
