"""Writes golden files again, writes records, or compares them: see `tests.golden`."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from tests.golden import HERE
from tests.golden.comparison import compare_folders, write_records, write_records_of
from tests.golden.models import MODELS
from tests.golden.records import DEVICES
from tests.golden.summary import golden_file


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description="Without an option: write golden files again.")
    parser.add_argument("names", metavar="NAME", nargs="*", type=_known, help="golden models; all by default")
    parser.add_argument("--write", metavar="FOLDER", type=Path, help="write the records of this checkout into a folder")
    parser.add_argument("--compare", metavar="COMMIT", help="say what differs from a commit, or from a folder of records")
    parser.add_argument("--device", metavar="NAME", action="append", choices=DEVICES, help="a descriptor; all by default")
    parser.add_argument("--no-answers", action="store_true", help="run no model, only compile")
    given = parser.parse_args()
    names, devices = given.names or list(MODELS), given.device or DEVICES
    if given.write is not None:
        write_records(given.write, names, devices, with_answers=not given.no_answers)
    elif given.compare is not None:
        sys.exit(_compare(given.compare, names, devices, with_answers=not given.no_answers))
    else:
        for name in names:
            (HERE / f"{name}.json").write_text(json.dumps(golden_file(MODELS[name]), indent=1) + "\n")
            print(name)


def _known(name: str) -> str:
    """`name`, if it is that of a golden model."""
    if name not in MODELS:
        raise argparse.ArgumentTypeError(f"no golden model {name!r}: choose from {', '.join(MODELS)}")
    return name


def _compare(before: str, names: list[str], devices: list[str], *, with_answers: bool) -> int:
    """Print what differs; 1 if anything does."""
    with tempfile.TemporaryDirectory(prefix="flashmem-golden-") as folder:
        old, new = Path(before), Path(folder) / "new"
        if not old.is_dir():
            arguments = [*names, *(f"--device={device}" for device in devices), *["--no-answers"] * (not with_answers)]
            write_records_of(before, Path(folder), arguments)
            old = Path(folder) / "records"
        write_records(new, names, devices, with_answers=with_answers)
        lines = list(compare_folders(old, new))
    print("\n".join(lines) or f"{len(names)} models on {len(devices)} devices: nothing differs")
    return bool(lines)


main()
