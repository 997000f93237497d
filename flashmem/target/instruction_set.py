"""Instruction sets of CPUs: their vector registers, and the plain tile that these hold."""

from __future__ import annotations

from dataclasses import dataclass

PANEL = 16
"""Columns of a panel of packed weights, on every CPU: 64 bytes, a line of the caches."""

MOST_ROWS = 14
"""The most rows of the plain tile, so that the rows of common products waste few."""

PAIR_ROWS = 8
"""Rows of a tile of two panels. With more, products of few rows waste more than each loaded weight saves."""


@dataclass(frozen=True)
class InstructionSet:
    """The vector registers for floating-point numbers: how many there are, and the bytes of each."""

    registers: int
    register_bytes: int

    @property
    def panels(self) -> int:
        """Panels across the plain tile: two, if the registers hold `PAIR_ROWS` rows of them.

        Then a number of the left operand is read for twice as many products.
        """
        return 2 if self._rows(2) >= PAIR_ROWS else 1

    @property
    def rows(self) -> int:
        """Rows of the plain tile: as many as the registers hold."""
        return PAIR_ROWS if self.panels == 2 else min(MOST_ROWS, self._rows(1))

    def _rows(self, panels: int) -> int:
        """Rows whose sums fit the registers beside one row of weights and one number of the left operand."""
        across = -(-4 * PANEL * panels // self.register_bytes)
        return (self.registers - 1) // across - 1


INSTRUCTION_SETS = {
    "sse": InstructionSet(16, 16),
    "avx": InstructionSet(16, 32),
    "avx2": InstructionSet(16, 32),
    "avx512": InstructionSet(32, 64),
    "neon": InstructionSet(32, 16),
}
"""By name. Those of x86-64 are in their order: each includes the ones before it. `avx2` has multiply-adds too."""

_IN_BUNDLES = ("avx2", "avx512")
"""Instruction sets for whose tiles a bundle for CPUs has kernels. Others have the tile of one of them, or no tile fits."""


def other_tiles(name: str) -> tuple[str, ...]:
    """Instruction sets of `_IN_BUNDLES` that have another plain tile than `name`; none for "", which is not a CPU's."""
    return tuple(each for each in _IN_BUNDLES if name and not same_tile(each, name))


def same_tile(one: str, other: str) -> bool:
    """Whether two instruction sets have the same plain tile, and so the same kernels."""
    first = INSTRUCTION_SETS[one]
    second = INSTRUCTION_SETS[other]
    return (first.rows, first.panels) == (second.rows, second.panels)
