"""One name, one thing: no two public classes of the package share a name, and transfer modes are named where they are said."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import flashmem
from flashmem.schedule.modes import MODES

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


def test_names_of_transfer_modes_stand_in_their_classes_the_checker_and_the_descriptor() -> None:
    found = set()
    for folder in (path for path in PACKAGE.iterdir() if path.is_dir()):
        for path in folder.resolve().rglob("*.py"):
            words = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
            if words & MODES.keys():
                found.add(str(path.relative_to(folder.resolve().parent)))
    rooms = {f"schedule/modes/{mode}.py" for mode in MODES}
    assert found == rooms | {"schedule/check.py", "target/descriptor.py"}
