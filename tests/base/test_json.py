"""Parsing of JSON with equal objects shared: what differs stays apart."""

from __future__ import annotations

import json

from flashmem.base.json import parse_json


def test_equal_objects_are_one_and_others_are_not() -> None:
    rows = '{"kind": "float", "value": %s}'
    written = ["1", "1", "1.0", "true", "0", "0.0", "-0.0", "false", "0.0", "-0.0", "0.25", "0.25", '"0.0"', "[0.0]", "[-0.0]"]
    text = f"[{', '.join(rows % value for value in written)}]"
    found = parse_json(text)
    assert json.dumps(found) == text
    same = {(a, b) for a in range(len(found)) for b in range(a) if found[a] is found[b]}
    assert same == {(1, 0), (8, 5), (9, 6), (11, 10)}
