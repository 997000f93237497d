"""Memory objects, commands, and the accesses of commands to memory. No OpenCL here.

Section numbers are those of the OpenCL 3.0 API specification.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tests.support.strict_device.sites import Site

COPIES = frozenset(("write", "unmap"))
"""Kinds of commands by which the host fills memory objects."""


class BrokenRuleError(Exception):
    """A program did something that OpenCL, or the device, leaves undefined or refuses. `rule`: the rule's name."""

    def __init__(self, rule: str, what: str) -> None:
        super().__init__(f"{rule}: {what}")
        self.rule = rule


@dataclass(eq=False)
class Memory:
    """A memory object: bytes `start` to `end` of an allocation. `parent`: the buffer that it is a part, or an image, of."""

    what: str
    allocation: int
    start: int
    end: int
    parent: Memory | None = None
    kernels_write: bool = True
    is_image: bool = False
    released: bool = False

    def related(self, other: Memory) -> bool:
        """Whether one is the other's ancestor."""
        return other in self._ancestors() or self in other._ancestors()

    def _ancestors(self) -> list[Memory]:
        found, each = [], self.parent
        while each is not None:
            found.append(each)
            each = each.parent
        return found


@dataclass(frozen=True)
class Access:
    """An access of a command to bytes of a memory object; `start` and `end` count in its allocation."""

    memory: Memory
    start: int
    end: int
    writes: bool

    @classmethod
    def whole(cls, memory: Memory, *, writes: bool) -> Access:
        """An access to the whole object."""
        return cls(memory, memory.start, memory.end, writes)

    def meets(self, other: Access) -> bool:
        """Whether the two accesses overlap."""
        return self.memory.allocation == other.memory.allocation and self.start < other.end and other.start < self.end

    def conflict(self, other: Access) -> str | None:
        """The reason why the two must not be concurrent; None if they may.

        To modify a memory object in one queue while another queue uses it is undefined, whichever bytes they access (appendix
        A.1). Concurrent commands on a buffer and its sub-buffers, or on overlapping sub-buffers, are undefined unless all of
        them read (clCreateSubBuffer); the same applies to a buffer and an image made of it.
        """
        if not (self.writes or other.writes):
            return None
        if self.meets(other):
            return "on the same bytes"
        if self.memory is other.memory:
            return "on other bytes of one memory object"
        return "on a memory object and one that is made of it" if self.memory.related(other.memory) else None


@dataclass(eq=False)
class Command:
    """A command: number `number` of a queue. `clock`: by queue, the number up to which commands complete before it."""

    kind: str
    what: str
    queue: int
    number: int
    accesses: tuple[Access, ...]
    clock: dict[int, int]
    site: Site
    when_known: list[Callable[[], None]] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.what} (queue {self.queue}; {self.site})"


@dataclass(eq=False)
class Mapping:
    """Bytes to which the host has a pointer. `unmapped`: the unmap command, which may not be complete."""

    access: Access
    command: Command
    unmapped: Command | None = None
