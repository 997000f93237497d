"""JSON with equal objects shared."""

from __future__ import annotations

import json
from typing import Any


def parsed(text: str | bytes) -> Any:
    """What JSON says, equal objects as one: a large model's launches have ten thousands of arguments, most of them equal.

    Raises:
        ValueError: not JSON.
    """
    seen: dict[Any, dict[str, Any]] = {}

    def one(row: dict[str, Any]) -> dict[str, Any]:
        try:
            return seen.setdefault((*row.items(), *map(type, row.values())), row)
        except TypeError:  # it holds others
            return row

    return json.loads(text, object_hook=one)
