"""Instruction sets of CPUs: their vector registers, and the plain tile that these hold."""

from __future__ import annotations

from dataclasses import dataclass

PANEL = 16
"""Columns of the plain tile and of its panels of packed weights: 64 bytes, a line of the caches."""

MOST_ROWS = 14
"""The most rows of the plain tile, so that the rows of common products waste few."""


@dataclass(frozen=True)
class InstructionSet:
    """The vector registers for floating-point numbers: how many there are, and the bytes of each."""

    registers: int
    register_bytes: int

    @property
    def rows(self) -> int:
        """Rows of the tallest tile of PANEL columns that fits the registers.

        They hold its sums, one row of weights and one number of the left operand.
        """
        across = -(-4 * PANEL // self.register_bytes)
        return min(MOST_ROWS, (self.registers - 1) // across - 1)


INSTRUCTION_SETS = {
    "sse": InstructionSet(16, 16),
    "avx": InstructionSet(16, 32),
    "avx2": InstructionSet(16, 32),
    "avx512": InstructionSet(32, 64),
    "neon": InstructionSet(32, 16),
}
"""By name. Those of x86-64 are in their order: each includes the ones before it. `avx2` has multiply-adds too."""
