"""Writes golden files again: `python -m tests.golden [NAME...]`, all of them without a name."""

from __future__ import annotations

import json
import sys

from tests.golden import HERE, MODELS, summary


def main() -> None:
    """Write the golden files of the named models, or of all."""
    names = sys.argv[1:] or list(MODELS)
    unknown = [name for name in names if name not in MODELS]
    if unknown:
        sys.exit(f"no golden model {unknown[0]!r}: choose from {', '.join(MODELS)}")
    for name in names:
        (HERE / f"{name}.json").write_text(json.dumps(summary(name), indent=1) + "\n")
        print(name)


main()
