"""The bits of a weight in each kind of blocks, in a file and in a bundle, as a table: python -m flashmem.compiler.ir.blocks."""

from __future__ import annotations

import numpy as np

from flashmem.compiler.ir.blocks import FORMATS

_PANEL = 16
"""Columns of a panel of a CPU's weights."""


def main() -> None:
    """Print the table: a bundle's bits are those of a whole panel, packed."""
    print("| kind | bits in the file | bits in a bundle |\n|---|---|---|")
    for name, kind in FORMATS.items():
        packed = kind.pack(np.zeros((_PANEL, kind.nbytes), np.uint8), _PANEL)
        print(f"| {name} | {kind.bits:.2f} | {8 * packed.nbytes / kind.weights / _PANEL:.2f} |")


if __name__ == "__main__":
    main()
