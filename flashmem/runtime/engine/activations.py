"""Activations of a model on a device: the arena, the constants, and the inputs and outputs of a run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmem.base.pages import page_size
from flashmem.bundle.checksums import checksum
from flashmem.program.program import SMALL_OUTPUT, Program, copied_outputs, output_bytes, scratch_bytes
from flashmem.program.tensors import Port, Tensor, array_bytes, numpy_dtype
from flashmem.runtime.engine.device_state import DeviceInUse
from flashmem.runtime.engine.given_arrays import Input
from flashmem.runtime.engine.opened import OpenedBundle
from flashmem.runtime.engine.output_values import OutputValue
from flashmem.runtime.engine.ports import from_device, gather_rows, on_host, to_device
from flashmem.runtime.memory.arena import Bytes, move_out, new_pages
from flashmem.runtime.memory.ledger import Ledger
from flashmem.runtime.memory.output_pages import OutputPages
from flashmem.runtime.opencl.context import Queue
from flashmem.runtime.opencl.handles import Buffer, Event

Array = NDArray[Any]

_ZERO = np.zeros(1, np.int32)


def _used_by_host(program: Program) -> set[str | None]:
    """The tensors that the host reads or writes between launches; None may be among them."""
    names = {port.tensor for port in (*program.inputs, *program.outputs)}
    names |= {gather.tensor for gather in program.host_embeddings} | {program.status}
    return names | {port.count for port in program.outputs}


class Activations:
    """The arena and the constants of one shape variant. They do not depend on the plan."""

    def __init__(
        self, device: DeviceInUse, opened: OpenedBundle, ledger: Ledger, queue: Queue, beside: Activations | None = None
    ) -> None:
        """Allocate memory, and read the constants through `queue`. After a failure, the ledger holds what was allocated.

        `beside`: the activations of another shape variant, in whose memory these are, after its `leave`.

        Raises:
            RunError: the device or the budget refuses.
        """
        program = opened.program
        self._opened = opened
        self._ledger = ledger
        self._queue = device.queue
        self._of_host = ledger if opened.tier is None else opened.tier.ledger
        self._output_bytes = output_bytes(program)
        self._scratch_bytes = scratch_bytes(program)
        copied = copied_outputs(program)
        self._copied = {
            port.name: np.dtype(opened.tensors[str(port.tensor)].dtype) for port in copied
        }  # with types in the arena
        self._left: dict[tuple[str, ...], frozenset[str]] = {}  # results of `left`
        self._pinned: OutputPages | None = None
        if not device.device.unified_memory:
            sizes = {port.name: prod(port.shape) * self._copied[port.name].itemsize for port in copied}
            self._pinned = OutputPages(self._of_host, sizes)
        self._sent: list[Array] = []  # small inputs of the run, which the queue may still have to read
        self._pages = {
            port.name: (opened.tensors[port.tensor].offset, array_bytes(port))
            for port in program.outputs
            if port.tensor is not None
        }
        self._host: Bytes | None = None  # the arena in host memory, if the device uses host memory
        self._in_place = False  # whether kernels and the host use the same bytes of it
        self.arena: Buffer | None
        self.constants: Buffer | None
        if beside is None:
            self.arena, self.constants = self._make_arena(), self._make_constants()
            self._in_place = device.device.coherent and self._is_mapped_in_place(queue)
        else:
            self._host = beside._host
            self.arena = beside.arena
            self.constants = beside.constants
            self._in_place = beside._in_place
        assert self.arena is not None
        self.enter(queue)
        names = _used_by_host(program)
        self._ports = {
            name: ledger.part("arena", self.arena, tensor.offset, tensor.nbytes)
            for name, tensor in opened.tensors.items()
            if name in names
        }
        self._views = self._in_host_memory()
        self._inputs = [
            (port.name, opened.tensors[port.tensor], self._views[port.tensor].reshape(port.shape) if self._in_place else None)
            for port in program.inputs
            if port.tensor is not None
        ]

    def _make_arena(self) -> Buffer:
        program = self._opened.program
        what = "the activation arena"
        if not program.hands_over:
            return self._ledger.buffer("arena", program.arena_bytes, what)
        self._host = new_pages(program.arena_bytes)[: program.arena_bytes]
        return self._ledger.wrapped("arena", self._host, what)

    def _is_mapped_in_place(self, queue: Queue) -> bool:
        """Whether the driver maps the arena where the host has it, so that there is no other copy of it. Raises RunError."""
        if self._host is None or self.arena is None:
            return False
        view = queue.map(self.arena, self._host.nbytes)
        try:
            return bool(view.ctypes.data == self._host.ctypes.data)
        finally:
            queue.unmap(view)

    def _in_host_memory(self) -> dict[str, Array]:
        """The elements of tensors that the host reads and writes between launches, by name; none unless in place."""
        views = dict[str, Array]()
        host = self._host
        if not self._in_place or host is None:
            return views
        for name in self._ports:
            tensor = self._opened.tensors[name]
            place = host[tensor.offset : tensor.offset + tensor.nbytes]
            views[name] = place.view(tensor.dtype)[: prod(tensor.shape)].reshape(tensor.shape)
        return views

    def _make_constants(self) -> Buffer | None:
        nbytes = self._opened.program.constants_bytes
        return self._ledger.buffer("constants", nbytes, "the constants", host_visible=True) if nbytes else None

    def enter(self, queue: Queue) -> None:
        """Read the constants through `queue`, and count the memory that only runs of this variant need. Raises RunError."""
        self._load_constants(queue)
        self._of_host.reserve("outputs", self._output_bytes, "the arrays that outputs are copied to")
        self._of_host.reserve("staging", self._scratch_bytes, "conversion of inputs and outputs")

    def leave(self) -> None:
        """Another shape variant uses the memory, until `enter`."""
        replaced = 0
        if self._pinned is not None:
            replaced = self._pinned.replaced
            self._pinned.close()
        self._of_host.release("outputs", self._output_bytes - replaced)
        self._of_host.release("staging", self._scratch_bytes)

    def _load_constants(self, queue: Queue) -> None:
        program = self._opened.program
        file = self._opened.file
        constants = self.constants
        if constants is None:
            return
        view = queue.map(constants, program.constants_bytes, invalidate=True)
        try:
            file.read_into(view, program.constants_offset)
            file.compare_checksum("the part with the constants", checksum(view.data), self._opened.bundle.checksums.constants)
        finally:  # mapped memory must not be released
            written = queue.unmap(view)
        if queue is not self._queue:
            self._queue.follow([written])  # kernels read the constants on that queue

    def write_inputs(self, inputs: Mapping[str, Input]) -> None:
        """Write inputs, which are already checked, and the table rows that they select.

        Small ones are only enqueued, unless the host writes them in place: they must not change before the run ends.

        Raises:
            ValueError: an index is outside a table; no launch has begun.
            RunError: the device or the disk fails.
        """
        opened = self._opened
        program = opened.program
        for name, tensor, view in self._inputs:
            if view is not None:
                view[...] = on_host(inputs[name])
            else:
                self._write_input(tensor, inputs[name])
        if program.status is not None:
            self._write(program.status, _ZERO)
        for gather, table in zip(program.host_embeddings, opened.tables, strict=True):
            rows = gather_rows(table, gather, on_host(inputs[gather.indices]), opened.tensors[gather.tensor].dtype)
            self._write(gather.tensor, rows)

    def _write_input(self, tensor: Tensor, data: Input) -> None:
        if (
            isinstance(data, OutputValue)
            and data.memory is not None
            and data.queue is self._queue
            and data.stored == np.dtype(tensor.dtype)
        ):
            self._queue.copy(data.memory, self._ports[tensor.name], data.nbytes)
        else:
            self._write(tensor.name, to_device(tensor, on_host(data)))

    def _write(self, tensor: str, data: Array) -> None:
        """Write a tensor from host memory, without a second copy of `data` that the ledger does not count."""
        if not data.nbytes:
            return
        if self._in_place:
            self._views[tensor].reshape(data.shape)[...] = data
            return
        port = self._ports[tensor]
        queue = self._queue
        if data.flags.c_contiguous and data.nbytes + sum(sent.nbytes for sent in self._sent) <= SMALL_OUTPUT:
            queue.write_later(port, data)
            self._sent.append(data)
        elif data.flags.c_contiguous:
            queue.write(port, data)
            self._sent.clear()
        elif self._host is not None:
            view = queue.map(port, data.nbytes, invalidate=True)
            try:
                np.copyto(view.view(data.dtype).reshape(data.shape), data)
            finally:
                queue.unmap(view)
        else:  # in pieces that fit the memory counted for outputs and conversions, which do not exist yet
            size = data.itemsize
            count = max(1, max(self._scratch_bytes, self._output_bytes) // size)
            for first in range(0, data.size, count):
                queue.write(port, data.flat[first : first + count], offset=first * size)

    def check_status(self) -> None:
        """Raise ValueError if a launch read an index that is out of range. The model stays usable."""
        program = self._opened.program
        if program.status is not None:
            status = np.zeros(1, np.int32)
            self._read(status, program.status)
            if status[0]:
                raise ValueError(
                    f"layer {program.launches[status[0] - 1].name} was given an index outside the tensor it reads from: "
                    f"check the inputs that hold indices or rectangles"
                )

    def can_read_later(self, port: Port) -> bool:
        """Whether a run enqueues the copy of an output: it has the same bytes in the arena, where the host cannot read them."""
        return not self._in_place and port.name in self._copied and self._copied[port.name] == port.dtype

    def read_later(self, port: Port) -> tuple[Array, Event]:
        """Read an output after the enqueued launches; the event completes when the array is filled."""
        data = self._array(port, np.dtype(port.dtype))
        return data, self._queue.read_later(data, self._ports[str(port.tensor)])

    def keep(self, port: Port, value: OutputValue) -> Event:
        """Copy an output after the enqueued launches to `value`, on the device; the event completes with the copy."""
        assert value.memory is not None
        return self._queue.copy(self._ports[str(port.tensor)], value.memory, value.nbytes)

    def outputs(self, ports: Sequence[Port], read: Mapping[str, Array]) -> dict[str, Array]:
        """The outputs by name: `read` during the run, copied now, or pages of the arena, which gets new pages."""
        self._sent.clear()
        results = dict[str, Array]()
        moved = list[Port]()
        for port in ports:
            name = port.name
            if port.tensor is None:
                results[name] = np.empty(port.shape, numpy_dtype(port.dtype))
            elif name in read:
                results[name] = read[name]
            elif name in self._copied:
                results[name] = self._copy(port)
            else:
                moved.append(port)
        counts = {port.name: (port.axis, self._count(port)) for port in ports if port.count is not None}
        if moved:
            results |= self._hand_over(moved)
        for name, (axis, count) in counts.items():
            results[name] = results[name][(*[slice(None)] * axis, slice(count))]
        return results

    def _count(self, port: Port) -> int:
        """The number of places of an output that the model computes."""
        count = np.zeros(1, np.int32)
        self._read(count, str(port.count))
        return int(count[0])

    def left(self, returned: Collection[str]) -> frozenset[str]:
        """After a run that returned the outputs `returned`: those that `outputs` can still return."""
        names = tuple(returned)
        if names not in self._left:
            self._left[names] = self._left_after(names)
        return self._left[names]

    def _left_after(self, returned: Collection[str]) -> frozenset[str]:
        program = self._opened.program
        end = len(program.launches)
        moving = {*returned} - self._copied.keys()
        moved = set() if self._host is None else {page for name in moving for page in self._pages_of(name)}
        return frozenset(
            port.name
            for port in program.outputs
            if port.name not in returned
            and (port.tensor is None or (port.ready in (None, end) and moved.isdisjoint(self._pages_of(port.name))))
        )

    def _pages_of(self, output: str) -> range:
        """The pages of the arena with an output, which may have others too."""
        offset, nbytes = self._pages.get(output, (0, 0))
        return range(offset // page_size(), -(-(offset + nbytes) // page_size()))

    def _copy(self, port: Port) -> Array:
        if self._in_place:
            data = self._views[str(port.tensor)].reshape(port.shape).copy()
        else:
            data = self._array(port, self._copied[port.name])
            self._read(data, str(port.tensor))
        return from_device(port, data)

    def _array(self, port: Port, dtype: np.dtype[Any]) -> Array:
        """An array for a copy of an output."""
        data = None if self._pinned is None else self._pinned.array(port.name, port.shape, dtype)
        return np.empty(port.shape, dtype) if data is None else data

    def _read(self, data: Array, tensor: str) -> None:
        if data.nbytes and self._in_place:
            data[...] = self._views[tensor].reshape(data.shape)
        elif data.nbytes:
            self._queue.read(data, self._ports[tensor])

    def _hand_over(self, ports: Sequence[Port]) -> dict[str, Array]:
        """Outputs as arrays over their pages of the arena. Nothing can be read from the arena before the next run."""
        if self._host is None or self.arena is None or not ports:
            return {}
        queue = self._queue
        places = [self._pages[port.name] for port in ports]
        if self._in_place:
            taken = move_out(self._host, places)
        else:
            view = queue.map(self.arena, self._host.nbytes)  # from now on the host may read it
            if view.ctypes.data == self._host.ctypes.data:
                taken = move_out(self._host, places)
            else:  # the driver keeps the buffer in other memory too
                taken = [view[offset : offset + nbytes].copy() for offset, nbytes in places]
            queue.unmap(view)
        return {port.name: data.view(port.dtype).reshape(port.shape) for port, data in zip(ports, taken, strict=True)}

    def forget(self) -> None:
        """Drop all references to device memory. The ledger still counts it."""
        self._ports.clear()
        self._views.clear()
        self._inputs.clear()
        self.arena = self.constants = self._host = None

    def give_back(self) -> None:
        """Return all memory to the device."""
        self.forget()
        self._ledger.give_back("arena", "constants")
        self.leave()
