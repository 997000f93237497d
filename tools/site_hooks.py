"""Hooks of mkdocs for the site: mkdocs.yml names this file."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from flashmem.cli.main import COMMANDS
from flashmem.cli.parser import parser_of, text_of
from flashmem.request.description import Option, OptionSet
from flashmem.request.kinds import Flag

COMMAND_LINE = "reference/cli.md"


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Add every command with its options to the page of the command line."""
    if page.file.src_uri != COMMAND_LINE:
        return markdown
    return "\n".join([markdown, *(line for name, described in COMMANDS.items() for line in section(name, described))])


def section(name: str, described: type[OptionSet]) -> Iterator[str]:
    """The lines about one command."""
    yield from ("", f"## flashmem {name}", "", inspect.cleandoc(described.__doc__ or ""), "")
    yield from ("```text", str(parser_of(name, described).usage), "```", "")
    shown = [field for field in described.options.values() if (field.is_word or field.help is not None) and not field.hidden]
    for group in dict.fromkeys(field.group for field in shown):
        yield from (f"| {group or 'options'} | |", "|---|---|")
        yield from (
            f"| {_names(field)} | {text_of(field).replace('|', chr(92) + '|')} |" for field in shown if field.group == group
        )
        yield ""


def _names(field: Option) -> str:
    """The names of an option and the form of its value, as code."""
    if field.is_word:
        return f"`{field.form}`".replace("|", "\\|")
    value = "" if isinstance(field.kind, Flag) else f" {field.form}"
    names = [*field.flags, *([field.opposite] if field.opposite else [])]
    return ", ".join(f"`{each}{value}`" for each in names).replace("|", "\\|")
