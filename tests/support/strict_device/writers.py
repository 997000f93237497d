"""The last writer of each byte: for each allocation, the commands whose bytes no later one has overwritten."""

from __future__ import annotations

from tests.support.strict_device.commands import Access, Command, Memory


class Writers:
    """The last writers of all memory. Not safe to use from several threads."""

    def __init__(self) -> None:
        self._last: dict[int, list[tuple[Access, Command]]] = {}

    def unseen_by(self, command: Command) -> tuple[Command, Memory] | None:
        """A command of another queue that wrote data read by `command`, and is not ordered before it by events; and that
        memory.
        """
        for access in command.accesses:
            if access.writes:
                continue
            for written, writer in self._last.get(access.memory.allocation, ()):
                if access.meets(written) and writer.number > command.clock.get(writer.queue, 0):
                    return writer, access.memory
        return None

    def note(self, command: Command) -> None:
        """Record the writes of a command. A map is none: its bytes belong to the device after the unmap."""
        for access in command.accesses:
            if not access.writes or command.kind == "map":
                continue
            last = self._last.setdefault(access.memory.allocation, [])
            last[:] = [(each, by) for each, by in last if each.start < access.start or each.end > access.end]
            last.append((access, command))
