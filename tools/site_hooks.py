"""Hooks of mkdocs for the site: mkdocs.yml names this file."""

from __future__ import annotations

import re
from typing import Any

COMMAND_LINE = "reference/cli.md"
_REFERENCE = re.compile(r'<autoref\b[^>]*\bidentifier="([^"]*)"[^>]*>(.*?)</autoref>')


def on_page_content(html: str, *, page: Any, **_: Any) -> str:
    """Undo references in the usage of commands: Markdown reads `[OPTIONS] [IMAGE]` as the text and the target of a link."""
    return _REFERENCE.sub(r"[\2] [\1]", html) if page.file.src_uri == COMMAND_LINE else html
