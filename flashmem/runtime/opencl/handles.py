"""OpenCL's objects as types: what flashmem uses of pyopencl's classes, whose own stubs lack too much."""

from __future__ import annotations

from typing import Any, Protocol


class Handle(Protocol):
    """An object of OpenCL. `int_ptr`: its handle in C."""

    int_ptr: int


class DeviceHandle(Handle, Protocol):
    """A device of a platform."""

    platform: Handle


class QueueHandle(Handle, Protocol):
    """A command queue."""

    def flush(self) -> None:
        """Submit the enqueued commands."""

    def finish(self) -> None:
        """Wait for the enqueued commands."""


class DeviceMemory(Handle, Protocol):
    """A memory object; or shared virtual memory, whose `int_ptr` is its first address."""

    def release(self) -> None:
        """Free it."""


class Buffer(DeviceMemory, Protocol):
    """A buffer, or a part of one."""

    def get_sub_region(self, offset: int, nbytes: int, /) -> Buffer:
        """A part of it."""


class Texture(DeviceMemory, Protocol):
    """A texture, of `width` columns of texels."""

    width: int


class ProgramHandle(Handle, Protocol):
    """A program."""

    def get_info(self, what: int, /) -> Any:
        """A property of it."""


class KernelObject(Handle, Protocol):
    """A kernel object, with its arguments."""

    function_name: str
    num_args: int

    def set_arg(self, index: int, value: object, /) -> None:
        """Set an argument for the next launches."""


class Event(Handle, Protocol):
    """The event of a command."""

    def wait(self) -> None:
        """Wait for the end of the command."""


class LaunchEvent(Event, Protocol):
    """The event of a command that pyopencl knows: all but the copies of `copier`.

    `profile`: has `start` and `end`, in nanoseconds of the device's clock.
    """

    command_execution_status: int
    profile: Any
