"""JSON data of dataclasses beside the standard library's; parsing with equal objects shared: what differs stays apart."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

import pytest

from flashmem.base.json import data_of, parse_json


def test_equal_objects_are_one_and_others_are_not() -> None:
    rows = '{"kind": "float", "value": %s}'
    written = ["1", "1", "1.0", "true", "0", "0.0", "-0.0", "false", "0.0", "-0.0", "0.25", "0.25", '"0.0"', "[0.0]", "[-0.0]"]
    text = f"[{', '.join(rows % value for value in written)}]"
    found = parse_json(text)
    assert json.dumps(found) == text
    same = {(a, b) for a in range(len(found)) for b in range(a) if found[a] is found[b]}
    assert same == {(1, 0), (8, 5), (9, 6), (11, 10)}


@dataclass(frozen=True)
class _Leaf:
    name: str
    sizes: tuple[int, ...]
    share: float | None = None


@dataclass(frozen=True)
class _Tree:
    leaves: tuple[_Leaf, ...]
    named: dict[str, _Leaf]
    least: bool


def test_data_of_dataclasses_is_that_of_the_standard_library() -> None:
    leaf = _Leaf("a", (1, 2), -0.0)
    tree = _Tree((leaf, replace(leaf, sizes=(), share=None)), {"x": leaf}, True)
    assert json.dumps(data_of(tree)) == json.dumps(asdict(tree))
    with pytest.raises(AssertionError, match="no JSON data"):
        data_of({"x": object()})
