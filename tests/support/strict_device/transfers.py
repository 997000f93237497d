"""Copies between the host and memory objects, and commands that only order others."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyopencl as cl
from numpy.typing import NDArray

from tests.support.strict_device.commands import Access, Command
from tests.support.strict_device.objects import UNDEFINED, StrictBuffer, StrictEvent, StrictImage, StrictQueue

Waits = Sequence[StrictEvent] | None
"""Events that a command waits for."""


def write_buffer(
    queue: StrictQueue,
    buffer: StrictBuffer,
    data: NDArray[Any],
    offset: int,
    waits: Waits = None,
    *,
    blocking: bool,
    raw: bool = False,
) -> StrictEvent:
    """clEnqueueWriteBuffer. `raw`: `data` is over memory of unknown lifetime."""
    world, rules = queue.world, queue.world.rules
    with queue.lock:
        access = buffer.access(writes=True, offset=offset, nbytes=data.nbytes)
        what = f"writing {data.nbytes} bytes of {buffer.memory.what} at {offset}"
        command = rules.enqueue(queue.number, "write", what, [access], commands(waits))
        copy = None if blocking else _copy(data)
        source = data if copy is None else copy
        real = cl._cl._enqueue_write_buffer(
            queue.real, buffer.real, source, offset, wait_for=reals(waits), is_blocking=blocking
        )
        world.wrote(buffer.memory)
        event = world.enqueued(queue, command, real)
    _written(event, data, copy, raw=raw)
    return event


def write_image(
    queue: StrictQueue,
    image: StrictImage,
    origin: tuple[int, ...],
    region: tuple[int, ...],
    data: NDArray[Any],
    row_pitch: int,
    waits: Waits = None,
    *,
    blocking: bool,
    raw: bool = False,
) -> StrictEvent:
    """clEnqueueWriteImage, of two dimensions. `raw`: see `write_buffer`."""
    world, rules = queue.world, queue.world.rules
    (left, top), (width, rows) = origin[:2], region[:2]
    pitch = row_pitch or width * image.texel
    if left + width > image.width or top + rows > image.height:
        rules.broke("range", f"{width} x {rows} texels are written at ({left}, {top}) of {image.memory.what}")
    if pitch < width * image.texel or pitch % image.texel:
        rules.broke("arguments", f"rows of {width} texels are {pitch} bytes apart in host memory")
    if data.nbytes < pitch * (rows - 1) + width * image.texel:
        rules.broke("range", f"{data.nbytes} bytes of host memory are written as {rows} rows, {pitch} bytes apart")
    with queue.lock:
        start = image.memory.start + top * image.width * image.texel
        access = Access(image.memory, start, start + rows * image.width * image.texel, True)
        what = f"writing {rows} rows of {image.memory.what} from row {top} on"
        command = rules.enqueue(queue.number, "write", what, [access], commands(waits))
        copy = None if blocking else _copy(data)
        source = data if copy is None else copy
        real = cl._cl._enqueue_write_image(
            queue.real, image.real, (left, top), (width, rows), source, row_pitch, wait_for=reals(waits), is_blocking=blocking
        )
        world.wrote(image.memory)
        event = world.enqueued(queue, command, real)
    _written(event, data, copy, raw=raw)
    return event


def _copy(data: NDArray[Any]) -> NDArray[np.uint8]:
    return data.reshape(-1).view(np.uint8).copy()


def _written(event: StrictEvent, data: NDArray[Any], copy: NDArray[np.uint8] | None, *, raw: bool) -> None:
    """Host memory must stay valid and unchanged until the host knows that it has been read (clEnqueueWriteBuffer).

    `copy`: the source of the real command, if it is not waited for.
    """
    command, world = event.command, event.world
    if copy is None:
        world.known(command)
        return
    where = data.__array_interface__["data"][0]
    owner: Callable[[], NDArray[Any] | None] = (lambda: data) if raw else weakref.ref(data)

    def compare() -> None:
        array = owner()
        if array is None or array.__array_interface__["data"][0] != where:
            world.rules.broke("host memory", f"{command}: the array was given back before anybody knew that it had been read")
        if not np.array_equal(array.reshape(-1).view(np.uint8), copy):
            world.rules.broke("host memory", f"{command}: the host changed the bytes before it knew that they had been read")

    command.when_known.append(compare)


def read_buffer(
    queue: StrictQueue, buffer: StrictBuffer, data: NDArray[Any], offset: int, waits: Waits = None, *, blocking: bool
) -> StrictEvent:
    """clEnqueueReadBuffer; the data of a non-blocking read exists only after a wait."""
    rules = queue.world.rules
    target = data.reshape(-1).view(np.uint8)
    copy = target if blocking else np.empty(target.nbytes, np.uint8)
    with queue.lock:
        access = buffer.access(writes=False, offset=offset, nbytes=target.nbytes)
        what = f"reading {target.nbytes} bytes of {buffer.memory.what} at {offset}"
        command = rules.enqueue(queue.number, "read", what, [access], commands(waits))
        real = cl._cl._enqueue_read_buffer(queue.real, buffer.real, copy, offset, wait_for=reals(waits), is_blocking=blocking)
        if not blocking:
            target[:] = UNDEFINED

            def arrive() -> None:
                real.wait()
                target[:] = copy

            command.when_known.append(arrive)
    if blocking:
        queue.world.known(command)
    return StrictEvent(queue, command, real)


def marker(queue: StrictQueue, waits: Waits = None) -> StrictEvent:
    """clEnqueueMarkerWithWaitList: complete after `waits` or, without them, after all earlier commands."""
    with queue.lock:
        command = queue.world.rules.enqueue(queue.number, "marker", "a marker", (), commands(waits))
        return StrictEvent(queue, command, cl.enqueue_marker(queue.real, wait_for=reals(waits)))


def barrier(queue: StrictQueue, waits: Waits = None) -> StrictEvent:
    """clEnqueueBarrierWithWaitList: later commands begin after this is complete."""
    with queue.lock:
        command = queue.world.rules.enqueue(queue.number, "barrier", "a barrier", (), commands(waits))
        return StrictEvent(queue, command, cl.enqueue_barrier(queue.real, wait_for=reals(waits)))


def commands(waits: Waits) -> list[Command]:
    """The commands of a wait list, for the rules."""
    return [each.command for each in waits or ()]


def reals(waits: Waits) -> list[Any] | None:
    """The events of a wait list, for the real device; None if it is empty."""
    return [each.real for each in waits or ()] or None
