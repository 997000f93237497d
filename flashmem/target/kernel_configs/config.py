"""The base class of kernel configs, and the assumed costs that their estimates share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

from flashmem.target.workload import Workload

Feature = Literal["half", "shuffle"]
"""What kernels of a config need from a driver: arithmetic in half, or shuffles of registers in a subgroup."""

READ = 8.0
"""Cost of a read from global memory or a texture, in multiplications: assumed."""

LOCAL = 0.25
"""Cost of a read from local memory, in reads from global memory: assumed."""

WAIT = 64.0
"""Cost of a group's wait until local memory is filled, and until it is read, in multiplications: assumed."""


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

    @abstractmethod
    def cost(self, workload: Workload, parallelism: int) -> float:
        """The estimated cost of `workload`, in multiplications of a device that `parallelism` work-items fill."""
