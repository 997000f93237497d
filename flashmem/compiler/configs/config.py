"""The base class of kernel configs, and the assumed costs that their estimates share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from flashmem.compiler.configs.workload import Workload
from flashmem.target.descriptor import DeviceDescriptor, Feature
from flashmem.target.registers import RegisterFile

READ = 8.0
"""Cost of a read from global memory or a texture, in multiplications: assumed."""

LOCAL = 0.25
"""Cost of a read from local memory, in reads from global memory: assumed."""

WAIT = 64.0
"""Cost of a group's wait until local memory is filled, and until it is read, in multiplications: assumed."""

POINTERS = 14
"""Registers for offsets, bounds and counters of a loop, beside its sums and operands: assumed."""

SPILLED = 1000.0
"""Factor of the cost of a kernel that does not fit the registers: prohibitive, not measured."""


@dataclass(frozen=True)
class EstimatedDevice:
    """What estimates know of a device.

    `parallelism`: work-items that keep it busy. `registers`: None if the number of registers changes nothing that is known.
    `vector_loads`: operands are read by vectors, four steps of depth at a time (`CodeStyle`).
    """

    parallelism: int
    registers: RegisterFile | None = None
    vector_loads: bool = False

    @classmethod
    def of(cls, descriptor: DeviceDescriptor) -> EstimatedDevice:
        """What estimates know of the device that `descriptor` describes."""
        return cls(descriptor.parallelism, descriptor.registers, descriptor.code.vector_loads)

    def at_once(self, outputs: float, items: int, registers: int) -> float:
        """Work-groups of `items` work-items that run at a time, each item with `outputs` sums in `registers` registers.

        A work-item with many sums hides latency itself, so fewer fill the device: by assumption, by the square root of its
        outputs. Registers may leave room for fewer still.
        """
        filling = self.parallelism / math.sqrt(outputs)
        if self.registers is not None:
            filling = min(filling, self.parallelism * self.registers.share(registers))
        return max(1, filling / items)

    def spills(self, registers: int) -> bool:
        """Whether a kernel that needs `registers` registers spills some."""
        return self.registers is not None and registers > self.registers.most


@dataclass(frozen=True)
class CompiledCost:
    """The code of a kernel's main loop, by its device's compiler or estimated.

    `slots`: time of a multiply-add, in issue slots of one instruction. `registers`: of 32 bits, for a work-item. `spills`: it
    accesses scratch memory.
    """

    slots: float
    registers: int
    spills: bool


@dataclass(frozen=True)
class KernelConfig(ABC):
    """A kernel config: the part of a kernel's work that one work-item and one work-group compute.

    A subclass has the fields of one kind of kernel, and no others. They are the keys of a config in a device descriptor, beside
    its `kind`. `name` identifies it in its device.
    """

    kind: ClassVar[str]

    name: str

    @property
    @abstractmethod
    def families(self) -> tuple[str, ...]:
        """The kernel families that it is for (`Workload.family`)."""

    @property
    @abstractmethod
    def code(self) -> str:
        """Its numbers as one word: the key of the config in the tuning database, which does not depend on its name."""

    @property
    @abstractmethod
    def items(self) -> int:
        """Number of work-items of a work-group."""

    @property
    @abstractmethod
    def local_bytes(self) -> int:
        """Bytes of local memory of a work-group."""

    @property
    def needs(self) -> frozenset[Feature]:
        """What its kernels need from the driver."""
        return frozenset()

    @abstractmethod
    def fits(self, workload: Workload) -> bool:
        """Whether it can compute `workload`, which is of one of its families."""

    @property
    def registers(self) -> int:
        """Estimated registers of 32 bits of a work-item; 0 if no estimate exists."""
        return 0

    @abstractmethod
    def cost(self, workload: Workload, device: EstimatedDevice, compiled: CompiledCost | None = None) -> float:
        """The estimated cost of `workload`, in multiplications of the full device.

        `compiled`: the code of its kernel, cut to the workload, if its device's compiler has counted it.
        """
