"""The rules: which commands may overlap on which memory, and which bytes the host may access. No OpenCL here.

Vector clocks with an entry for each queue record the order. A command is ordered after the earlier commands of its queue and
those of its wait list, and after all that these follow. It is also ordered after all commands that the host knew to be complete
at its enqueue. Section numbers are of the OpenCL 3.0 API specification, unless stated otherwise.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NoReturn

from tests.support.strict_device.commands import COPIES, Access, BrokenRuleError, Command, Mapping, Memory
from tests.support.strict_device.sites import call_site
from tests.support.strict_device.writers import Writers


class Rules:
    """The history of a program on one device. Safe to use from several threads."""

    def __init__(self, *, by_event: bool = False) -> None:
        """`by_event`: a command that reads memory which another queue wrote must wait for an event of that queue (appendix
        A.1); a wait of the host is not enough.
        """
        self._writers = Writers() if by_event else None
        self.broken: list[BrokenRuleError] = []
        self.counts: dict[str, int] = {}  # of commands, by kind
        self._lock = threading.RLock()
        self._allocations = itertools.count(1)
        self._queues = itertools.count(1)
        self._flying: dict[int, deque[Command]] = {}  # commands that are not known to be complete
        self._enqueued: dict[int, int] = {}
        self._known: dict[int, int] = {}  # by queue: all commands up to this number are known to be complete
        self._flushed: dict[int, int] = {}  # by queue: all commands up to this number are submitted
        self._last_clock: dict[int, dict[int, int]] = {}
        self._maps: list[Mapping] = []
        self._parts: dict[int, list[Memory]] = {}  # by allocation: its sub-buffers, in the order in which they were made

    def broke(self, rule: str, what: str) -> NoReturn:
        """Record the violation, and raise."""
        error = BrokenRuleError(rule, what)
        self.broken.append(error)
        raise error

    # -- memory

    def allocate(self, what: str, nbytes: int, *, kernels_write: bool = True, is_image: bool = False) -> Memory:
        """A new memory object with its own allocation."""
        with self._lock:
            return Memory(what, next(self._allocations), 0, nbytes, kernels_write=kernels_write, is_image=is_image)

    def part(
        self, parent: Memory, what: str, offset: int, nbytes: int, *, kernels_write: bool, is_image: bool = False
    ) -> Memory:
        """A sub-buffer, or an image over a buffer."""
        self.check_alive(parent, f"making {what}")
        start = parent.start + offset
        if nbytes < 1 or start + nbytes > parent.end:
            self.broke("range", f"{what} takes {nbytes} bytes, and {parent.what} has {parent.end - start} from there on")
        made = Memory(what, parent.allocation, start, start + nbytes, parent, kernels_write, is_image)
        if not is_image:
            with self._lock:
                self._parts.setdefault(parent.allocation, []).append(made)
        return made

    def release(self, memory: Memory) -> None:
        """Its last reference is released. Commands in flight may still use it (clReleaseMemObject); a host pointer may not.

        Of two sub-buffers that overlap, the later one is released first: NVIDIA's driver crashes otherwise, which no
        specification allows.
        """
        with self._lock:
            if memory.released:
                return
            memory.released = True
            for each in self._maps:
                if each.access.memory is memory and each.unmapped is None:
                    self._maps.remove(each)
                    self.broke("mapped", f"{memory.what} is released while it is mapped")
            parts = self._parts.get(memory.allocation, [])
            if memory in parts:
                place = parts.index(memory)
                later = [each for each in parts[place + 1 :] if each.start < memory.end and memory.start < each.end]
                del parts[place]
                if later:
                    self.broke("release", f"{memory.what} is released before {later[-1].what}, which overlaps it")

    def check_alive(self, memory: Memory, doing: str) -> None:
        """Raise BrokenRuleError if the object is released."""
        if memory.released:
            self.broke("released", f"{doing} uses {memory.what}, which was released")

    # -- commands

    def queue(self) -> int:
        """A new in-order queue."""
        with self._lock:
            number = next(self._queues)
            self._flying[number], self._enqueued[number], self._known[number], self._flushed[number] = deque(), 0, 0, 0
            self._last_clock[number] = {}
            return number

    def enqueue(
        self,
        queue: int,
        kind: str,
        what: str,
        accesses: Sequence[Access] = (),
        waits: Iterable[Command] = (),
        *,
        unmaps: bool = False,
    ) -> Command:
        """Enqueue a command on a queue, after those in `waits`.

        Commands of one queue run in order. Commands of different queues may be concurrent unless an event or the host orders
        them (5.15, appendix A.1).
        """
        with self._lock:
            clock = dict(self._last_clock[queue])
            for each in waits:
                self._check_flushed(each, queue, what)
                for other, number in each.clock.items():
                    clock[other] = max(clock.get(other, 0), number)
            number = self._enqueued[queue] + 1
            clock[queue] = number
            command = Command(kind, what, queue, number, tuple(accesses), clock, call_site())
            self._check_access(command)
            if not unmaps:
                self._check_maps(command, exactly=kind == "map")
            self._check_order(command)
            if self._writers is not None:
                self._check_visible(command, self._writers)
            self._enqueued[queue], self._last_clock[queue] = number, clock
            self._flying[queue].append(command)
            self.counts[kind] = self.counts.get(kind, 0) + 1
            return command

    def _check_access(self, command: Command) -> None:
        for each in command.accesses:
            self.check_alive(each.memory, command.what)
            if each.start < each.memory.start or each.end > each.memory.end:
                size, first, end = (n - each.memory.start for n in (each.memory.end, each.start, each.end))
                self.broke("range", f"{command.what} reaches bytes {first} to {end} of {each.memory.what}, which has {size}")
        for one, other in itertools.combinations(command.accesses, 2):
            if one.memory is other.memory:
                if one.memory.is_image and one.writes != other.writes:
                    self.broke("overlap", f"{command.what} reads and writes {one.memory.what}")
            elif one.conflict(other):
                text = f"{command.what} takes {one.memory.what} and {other.memory.what}, which share memory, and writes"
                self.broke("overlap", text)

    def _check_maps(self, command: Command, *, exactly: bool) -> None:
        """Check maps. Memory mapped for writing must be unmapped before a command begins that reads or writes the object, its
        parent, or an object made of it; memory mapped for reading, before one that writes (5.5.4). `exactly`: only the
        command's own bytes count, as for another map.
        """
        for each in self._maps:
            if each.unmapped is not None and self._ordered(each.unmapped, command.clock):
                continue
            for access in command.accesses:
                if not (access.writes or each.access.writes):
                    continue
                touches = access.meets(each.access)
                if not exactly:
                    same = access.memory is each.access.memory
                    touches = touches or same or access.memory.related(each.access.memory)
                if touches:
                    text = f"{command} uses {access.memory.what} while {each.access.memory.what} is mapped"
                    self.broke("mapped", f"{text}, by {each.command}")

    def _check_order(self, command: Command) -> None:
        for queue, flying in self._flying.items():
            if queue == command.queue:
                continue
            for other in flying:
                if self._ordered(other, command.clock):
                    continue
                for one, two in itertools.product(command.accesses, other.accesses):
                    if (why := one.conflict(two)) is not None:
                        objects = (
                            f"{one.memory.what} and {two.memory.what}" if one.memory is not two.memory else one.memory.what
                        )
                        text = f"{command} and {other} may run at the same time, {why}: {objects}"
                        self.broke("order", f"{text}. They are on two queues, and neither an event nor the host orders them")

    def _check_visible(self, command: Command, writers: Writers) -> None:
        """Data of another queue must be read after an event of that queue (appendix A.1)."""
        if (found := writers.unseen_by(command)) is not None:
            writer, memory = found
            text = f"{command} reads {memory.what} and waits for no event of {writer}, which wrote it on another queue"
            self.broke("visible", text)
        writers.note(command)

    def _check_flushed(self, awaited: Command, queue: int, what: str) -> None:
        """A wait for an event of another queue requires a flush of that queue (clFlush; appendix A.1)."""
        if awaited.queue != queue and awaited.number > max(self._flushed[awaited.queue], self._known[awaited.queue]):
            self.broke("flush", f"{what} waits for {awaited}, and nobody has flushed that queue since")

    def _ordered(self, first: Command, clock: dict[int, int]) -> bool:
        return first.number <= max(clock.get(first.queue, 0), self._known[first.queue])

    def known(self, command: Command) -> None:
        """The host knows that `command` is complete, and with it all commands before it: it has waited (5.15).

        Consequences are checked before another thread can learn the same and continue: `when_known` is called under the lock.
        """
        with self._lock:
            done: list[Command] = []
            for queue, number in command.clock.items():
                self._known[queue] = max(self._known[queue], number)
                flying = self._flying[queue]
                while flying and flying[0].number <= self._known[queue]:
                    done.append(flying.popleft())
            self._maps = [m for m in self._maps if m.unmapped is None or not self._ordered(m.unmapped, {})]
            for each in done:
                while each.when_known:
                    each.when_known.pop()()

    def flush(self, queue: int) -> None:
        """Submit the enqueued commands to the device."""
        with self._lock:
            self._flushed[queue] = self._enqueued[queue]

    def copies_before(self, command: Command) -> list[Command]:
        """The copies that the host is about to know to be complete, `command` or before it."""
        with self._lock:
            flying = [each for queue, number in command.clock.items() for each in self._flying[queue] if each.number <= number]
            return [each for each in flying if each.kind in COPIES]

    def is_known(self, command: Command) -> bool:
        """Whether the host knows that it is complete."""
        with self._lock:
            return command.number <= self._known[command.queue]

    def last(self, queue: int) -> Command | None:
        """The queue's last command that is not known to be complete."""
        with self._lock:
            return self._flying[queue][-1] if self._flying[queue] else None

    # -- maps

    def map(self, queue: int, access: Access) -> tuple[Command, Mapping]:
        """Map bytes. Two maps of the same bytes, one of them for writing, are an error (clEnqueueMapBuffer)."""
        with self._lock:
            command = self.enqueue(queue, "map", f"mapping {access.memory.what}", [access])
            mapping = Mapping(access, command)
            self._maps.append(mapping)
            return command, mapping

    def unmap(self, queue: int, mapping: Mapping, waits: Iterable[Command] = ()) -> Command:
        """Unmap bytes: the device may use them after this is complete."""
        with self._lock:
            if mapping.unmapped is not None:
                self.broke("mapped", f"{mapping.access.memory.what} is unmapped twice")
            command = self.enqueue(
                queue, "unmap", f"unmapping {mapping.access.memory.what}", [mapping.access], waits, unmaps=True
            )
            mapping.unmapped = command
            return command

    @property
    def mapped(self) -> list[Memory]:
        """The memory objects that are mapped now."""
        with self._lock:
            return [each.access.memory for each in self._maps if each.unmapped is None]
