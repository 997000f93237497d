"""Ways to copy weights to a device with several threads: which are defined by OpenCL, and their speed.

    python -m benchmarks.streaming.copies --device nvidia [--piece 4MiB] [--threads 4] [--repeats 7]

A file in the page cache is read in pieces into pinned memory, a part for each thread. The pieces are copied to slices of 12 MiB
in one buffer, as in mode `dma`, but without release times and kernels. One process; medians, after one repeat that is not
counted.

- *undefined*: a queue for each thread, all writing one slice at once. It loses writes on some drivers.
- *sub-buffers*: a queue for each thread, and a separate sub-buffer for each piece.
- *lock*: the same queues and slices, but one copy at a time.
- *one queue*: all threads use one queue, and each waits for the event of its copy. Flashmem uses this.
- *two parts*: the same, but a thread reads into a second part meanwhile: twice the pinned memory.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from benchmarks.command import Arguments, run_command
from flashmem.base.units import parse_size
from flashmem.runtime.memory.ledger import Ledger
from flashmem.runtime.opencl.context import Context
from flashmem.runtime.opencl.copier import Copier, CopyEvent
from flashmem.runtime.opencl.handles import DeviceMemory
from flashmem.runtime.opencl.shared_memory import address_of
from flashmem.runtime.request.options import device_here

FILE, SLICE = 480 << 20, 12 << 20


class Bench:
    """A file, a buffer for all of it, pinned memory, and a queue for each thread."""

    def __init__(self, device: str, threads: int, piece: int, file: int) -> None:
        context = Context(device_here(device))
        self.file, self.piece, self.threads = file, piece, threads
        self._ledger = Ledger(context, None)
        self.copiers = [Copier(context) for _ in range(threads)]
        pool = self._ledger.buffer("weights", FILE, "the pool")
        self.slices = [context.sub_buffer(pool, first, SLICE) for first in range(0, FILE, SLICE)]
        self.pieces = [context.sub_buffer(pool, first, piece) for first in range(0, FILE, piece)]
        pinned = self._ledger.buffer("staging", 2 * threads * piece, "pinned memory", host_visible=True)
        self._staging = self.copiers[0].queue.map(pinned, 2 * threads * piece)

    def seconds(
        self, copier: Callable[[int], Copier], target: Callable[[int], tuple[DeviceMemory, int]], **ways: bool
    ) -> float:
        """Copy the whole file once. `copier` is by thread; `target` maps a piece's first byte to a buffer and a byte in it."""
        left, lock = iter(range(0, FILE, self.piece)), threading.Lock()
        alone: AbstractContextManager[object] = threading.Lock() if ways.get("lock") else nullcontext()
        parts = 2 if ways.get("two") else 1

        def work(thread: int) -> None:
            copies: list[CopyEvent | None] = [None] * parts
            turn = 0
            while True:
                with lock:
                    first = next(left, None)
                if first is None:
                    break
                turn = (turn + 1) % parts
                if (copy := copies[turn]) is not None:
                    copy.wait()
                start = (2 * thread + turn) * self.piece
                data = self._staging[start : start + self.piece]
                os.preadv(self.file, [data.data], first)
                buffer, offset = target(first)
                with alone:
                    copies[turn] = copy = copier(thread).prepare(buffer, offset, data.nbytes)(address_of(data))
                    if parts == 1:
                        copy.wait()
            for copy in copies:
                if copy is not None:
                    copy.wait()

        threads = [threading.Thread(target=work, args=(thread,)) for thread in range(self.threads)]
        begun = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - begun

    def close(self) -> None:
        """Free everything."""
        self.copiers[0].queue.unmap(self._staging)
        self._ledger.close()


def main() -> None:
    """Measure every way, alternately."""
    parser = Arguments(__doc__)
    parser.add_device()
    parser.add_argument("--piece", default="4MiB", help="a part of 12 MiB")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    parser.check_device(args.device)
    piece = parse_size(args.piece, what="--piece")
    if piece <= 0 or SLICE % piece:
        parser.error(f"--piece {args.piece} is not a part of 12 MiB; give 1MiB, 2MiB, 3MiB, 4MiB, 6MiB or 12MiB")
    with tempfile.NamedTemporaryFile() as file:
        for _ in range(FILE >> 20):
            file.write(os.urandom(1 << 20))
        file.flush()
        bench = Bench(args.device, args.threads, piece, file.fileno())
        own, one = bench.copiers.__getitem__, lambda thread: bench.copiers[0]

        def in_slice(first: int) -> tuple[DeviceMemory, int]:
            return bench.slices[first // SLICE], first % SLICE

        def in_piece(first: int) -> tuple[DeviceMemory, int]:
            return bench.pieces[first // piece], 0

        ways: dict[str, Callable[[], float]] = {
            "undefined": lambda: bench.seconds(own, in_slice),
            "sub-buffers": lambda: bench.seconds(own, in_piece),
            "lock": lambda: bench.seconds(own, in_slice, lock=True),
            "one queue": lambda: bench.seconds(one, in_slice),
            "two parts": lambda: bench.seconds(one, in_slice, two=True),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(args.repeats + 1):
            for name, measure in ways.items():
                seconds[name].append(measure())
        bench.close()
    print(f"pieces of {args.piece}, {args.threads} threads, GB/s")
    for name, each in seconds.items():
        print(f"{name}: {FILE / statistics.median(each[1:]) / 1e9:.1f}")


if __name__ == "__main__":
    run_command(main)
