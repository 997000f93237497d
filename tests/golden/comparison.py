"""Records in folders, one file for each model and device, and what differs between two folders, in words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

from tests.golden.answers import answers
from tests.golden.models import MODELS
from tests.golden.records import Record, Stage, record

ROOT = Path(__file__).parent.parent.parent


def write_records(folder: Path, names: Iterable[str], devices: Sequence[str], *, with_answers: bool) -> None:
    """Write the record of each model on each device, and what each model answers on this machine."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        for device in devices:
            _write(folder / f"{name} on {device}.json", record(MODELS[name], device))
        if with_answers and MODELS[name].write is not None:
            _write(folder / f"{name} here.json", answers(MODELS[name]))
        print(name, file=sys.stderr)


def _write(path: Path, found: Record) -> None:
    lines = {stage: {part: text.splitlines() for part, text in parts.items()} for stage, parts in found.items()}
    path.write_text(json.dumps(lines, indent=0) + "\n")


def _read(path: Path) -> Record:
    lines = json.loads(path.read_text())
    return {stage: {part: "\n".join(text) for part, text in parts.items()} for stage, parts in lines.items()}


def write_records_of(revision: str, folder: Path, arguments: Sequence[str]) -> None:
    """Write the records of a commit into `folder / "records"`, in a work tree in `folder` that is deleted again."""
    tree = folder / "tree"
    subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, revision], cwd=ROOT, check=True)
    try:
        command = [sys.executable, "-m", "tests.golden", "--write", folder / "records", *arguments]
        subprocess.run(command, cwd=tree, check=True, env={**os.environ, "PYTHONPATH": str(tree)})
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)


def compare_folders(old: Path, new: Path) -> Iterator[str]:
    """A sentence for each stage that differs between two folders of records."""
    files = {path.name for folder in (old, new) for path in folder.glob("*.json")}
    for file in sorted(files):
        subject = file.removesuffix(".json")
        missing = [folder for folder in (old, new) if not (folder / file).is_file()]
        if missing:
            yield f"{subject}: no record in {missing[0]}"
        else:
            yield from (f"{subject}: {line}" for line in compare_records(_read(old / file), _read(new / file)))


def compare_records(old: Record, new: Record) -> Iterator[str]:
    """A sentence for each stage that differs: its first part that does, with the first line, and how many others do."""
    for stage in dict.fromkeys((*old, *new)):
        before, after = old.get(stage), new.get(stage)
        if before is None or after is None:
            yield f"{stage}: only {'before' if after is None else 'after'}"
        elif list(before.items()) != list(after.items()):
            yield f"{stage}: {_first_difference(before, after)}"


def _first_difference(old: Stage, new: Stage) -> str:
    unlike = [part for part in dict.fromkeys((*old, *new)) if old.get(part) != new.get(part)]
    if not unlike:
        return "the same parts in another order"
    first = unlike[0]
    others = f" (and {len(unlike) - 1} more of {len(new)})" if unlike[1:] else ""
    if first not in old or first not in new:
        return f"{first} is only {'after' if first in new else 'before'}{others}"
    return f"{first}{others}: {_first_line(old[first], new[first])}"


def _first_line(old: str, new: str) -> str:
    """The first line that differs between two texts, from a little before the difference."""
    pairs = zip_longest(old.splitlines(), new.splitlines(), fillvalue="")
    number, before, after = next((n, a, b) for n, (a, b) in enumerate(pairs, start=1) if a != b)
    at = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after)))
    begin = max(0, at - 40)
    return f"line {number}: {before[begin : at + 40]!r} became {after[begin : at + 40]!r}"
