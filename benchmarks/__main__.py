"""List the benchmarks, or run one: `python -m benchmarks [FOLDER.NAME [ARGUMENTS]]`."""

from __future__ import annotations

import ast
import runpy
import sys
from itertools import groupby
from pathlib import Path

from flashmem.base.streams import EXIT_USER_ERROR, say

_FOLDER = Path(__file__).parent


def benchmarks() -> dict[str, str]:
    """The first docstring line of each benchmark, by FOLDER.NAME. Imports none: some need extras that may be missing."""
    found = {}
    for file in sorted(_FOLDER.glob("*/*.py")):
        text = file.read_text(encoding="utf-8")
        if "run_command(main)" in text:
            found[f"{file.parent.name}.{file.stem}"] = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    return found


def main() -> None:
    """Print the list; with arguments, run the benchmark that the first one names, with the others."""
    found = benchmarks()
    if len(sys.argv) == 1:
        width = max(map(len, found))
        print("python -m benchmarks NAME [ARGUMENTS]; NAME --help explains one.")
        for _, names in groupby(found, lambda name: name.partition(".")[0]):
            print("", *(f"  {name:{width}}  {found[name]}" for name in names), sep="\n")
        return
    name = sys.argv[1]
    if name not in found:
        say(f"no benchmark {name!r}: `python -m benchmarks` lists them")
        raise SystemExit(EXIT_USER_ERROR)
    del sys.argv[1]
    runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
