"""What a transfer mode is for everything that plans, checks and executes loads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from flashmem.schedule.plan import PlannedWeight, PoolLayout
    from flashmem.target.descriptor import Rates


class Pools(Protocol):
    """The planned slices of a program, for the layout of a mode; `planning.memory.layout` places them."""

    def pages(self) -> PoolLayout:
        """Without allocations: slices are pages of the weight file, from their release to their last use."""
        ...

    def one_buffer(self) -> PoolLayout:
        """Every slice in one buffer, from its release to its last use; textures are views of it."""
        ...

    def targets(self, kind: TransferKind) -> PoolLayout:
        """Buffers in the pool and textures in slots, each occupied from `kind.home_from` on, and the ring of `kind`."""
        ...

    def staged(self, layout: PoolLayout) -> PoolLayout:
        """`layout` with staging for the streamed slices, from their release to their last move."""
        ...


class TransferKind(ABC):
    """A transfer mode: how slices get from the weight file to where kernels read them (docs/explanation/streaming.md).

    A subclass for each mode says what differs. `flashmem.runtime.streaming.modes` has its twin, which makes the loads.
    """

    name: ClassVar[str]

    what: ClassVar[str]
    """What it does, as a phrase."""

    by_pages: ClassVar[bool] = False
    """Slices are pages of the weight file: a load allocates their memory, and a single one can be freed. Else every slice has a
    place that a session allocates when it opens."""

    copies: ClassVar[bool] = False
    """A device copies what the host has read. Else the host reads into memory that kernels read, also as textures over it."""

    by_kernels: ClassVar[bool] = False
    """Streamed slices wait in staging until kernels move them to their places."""

    @property
    def by_engine(self) -> bool:
        """Whether a copy runs beside kernels, not in them."""
        return self.copies and not self.by_kernels

    @property
    def places_in_flight(self) -> int:
        """Places of a slice while it is moved: one in staging, one where kernels read it."""
        return 2 if self.by_kernels else 1

    def home_from(self, w: PlannedWeight) -> int:
        """The layer from which a streamed weight occupies the place where kernels read it."""
        return w.first_mover if self.by_kernels else w.read_layer

    def needed_at(self, w: PlannedWeight) -> int:
        """The layer that waits for the read of a weight: the first that uses it, or moves it."""
        return w.first_mover if self.by_kernels and not w.preload else w.first_use

    def passes_ring(self, *, preload: bool, shares_memory: bool) -> bool:
        """Whether a slice, of W with `preload`, passes through the ring in host memory on its way."""
        return self.copies and (not self.by_kernels or preload or not shares_memory)

    @abstractmethod
    def host_bandwidth(self, rates: Rates) -> float:
        """Bytes per second at which the host forwards what it has read."""

    @abstractmethod
    def last_bandwidth(self, rates: Rates) -> float:
        """Bytes per second of the last step: a read into shared memory, or a copy."""

    @abstractmethod
    def lay_out(self, pools: Pools) -> PoolLayout:
        """The memory of the planned slices in this mode."""
