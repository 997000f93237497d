"""Parsing of JSON with equal objects shared."""

from __future__ import annotations

import json
from typing import Any


def parsed(text: str | bytes) -> Any:
    """Parse JSON; equal objects become one. A large model's launches have tens of thousands of arguments, most of them equal.

    Raises:
        ValueError: the text is not JSON.
    """
    seen: dict[Any, dict[str, Any]] = {}

    def one(row: dict[str, Any]) -> dict[str, Any]:
        try:
            return seen.setdefault((*row.items(), *map(type, row.values())), row)
        except TypeError:  # it has values that cannot be hashed
            return row

    return json.loads(text, object_hook=one)
