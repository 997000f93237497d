"""Builds a dataclass from a table of a TOML or JSON file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from flashmem.base.errors import UserError

T = TypeVar("T")


def build(kind: type[T], table: Mapping[str, Any], where: str) -> T:
    """A `kind` with the fields in `table`, lists as tuples; `where` names the file.

    Raises:
        UserError: an unknown key, so that a misspelt one is not ignored; or a missing one.
    """
    known = {each.name: each for each in fields(kind) if each.init}  # type: ignore[arg-type]  # a dataclass
    unknown = sorted(set(table) - set(known))
    if unknown:
        raise UserError(f"{where}: unknown key {unknown[0]!r} for {kind.__name__}; remove it")
    needed = (name for name, each in known.items() if each.default is MISSING and each.default_factory is MISSING)
    for name in needed:
        if name not in table:
            raise UserError(f"{where}: the key {name!r} of {kind.__name__} is missing; add it")
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in table.items()})
