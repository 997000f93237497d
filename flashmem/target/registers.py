"""The register file of a GPU's cores: how many work-items fit by the registers of each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RegisterFile:
    """Registers of 32 bits. A work-item that needs more than `most` spills.

    A core holds `file // registers` equal parts of work-items; `shares` of them are the device's `parallelism`.
    """

    most: int
    file: int
    shares: int

    def share(self, registers: int) -> float:
        """The part of the device's `parallelism` that runs at a time, if each work-item has `registers` registers."""
        return min(1.0, max(1, self.file // max(1, registers)) / self.shares)
