"""Parsing of JSON with equal objects shared."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str) -> Any:
    """Parse JSON; equal objects become one. A large model's launches have tens of thousands of arguments, most of them equal.

    Raises:
        ValueError: the text is not JSON.
    """
    signed = "-0" in text
    seen: dict[Any, dict[str, Any]] = {}

    def one(row: dict[str, Any]) -> dict[str, Any]:
        values = row.values()
        kinds: tuple[Any, ...] = tuple(map(type, values))  # 0, 0.0 and False are equal
        if signed and float in kinds and 0.0 in values:  # and so is -0.0
            kinds = tuple(repr(value) if type(value) is float else type(value) for value in values)
        try:
            return seen.setdefault((*row.items(), *kinds), row)
        except TypeError:  # it has values that cannot be hashed
            return row

    return json.loads(text, object_hook=one)
