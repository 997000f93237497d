"""One name, one thing: no two public classes of the package share a name."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import flashmem

PACKAGE = Path(flashmem.__file__).parent


def test_no_two_public_classes_share_a_name() -> None:
    found = defaultdict[str, list[str]](list)
    for folder in (path for path in PACKAGE.iterdir() if path.is_dir()):  # also the one that a checkout links
        for path in sorted(folder.resolve().rglob("*.py")):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found[node.name].append(f"{path.relative_to(folder.resolve().parent)}:{node.lineno}")
    places = [place for each in found.values() for place in each]
    assert len(places) > 300 and any(place.startswith("profiler/") for place in places)
    assert not {name: each for name, each in found.items() if len(each) > 1}
