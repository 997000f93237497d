"""Loader threads: the plan's loads, in the order and behind the gates that the plan sets.

A `LoaderRun` serves one run (or the preloading of W). Its threads take loads in the order of (g_w, z_w, i_w); the read of w may
start once layer g_w - 1 is done, and not before everything freed by then has been let go, so that no two slices are ever
resident that the plan kept apart.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from flashmem.errors import RunError
from flashmem.program import Slice
from flashmem.runtime.schedule import Load, Span
from flashmem.runtime.transfer import Transfer


class LoaderRun:
    """Threads at work on one sequence of loads. Call `layer_done` for every layer, `wait` before using, `stop` at the end."""

    def __init__(
        self,
        transfer: Transfer,
        loads: Sequence[Load],
        frees: Mapping[int, Sequence[Slice]],
        *,
        threads: int,
        done: int = 0,
        admit: Callable[[Load], bool] | None = None,
    ) -> None:
        """Begin at once, with `done` layers behind it. `admit` is asked before each load, and again after `wake`, until
        `admit_all`: whether there is memory for it.
        """
        self.loaded = {load.part.name: False for load in loads}
        self._missing = Counter(load.part.name for load in loads)  # bands, by slice
        self.spans: list[Span] = []
        self._transfer = transfer
        self._loads = loads
        self._frees = frees if transfer.frees else {}
        self.wakes = frozenset(load.gate for load in loads) | frozenset(self._frees)  # layers whose end is waited for
        self._changed = threading.Condition()
        self._next = 0
        self._expected = 0
        self._done = done  # layers that are done
        self._admit = admit
        self._loading = 0  # threads that bring a load in
        self.when_done: Callable[[int], None] | None = None  # told of layers that something waits for, when they are done
        self._to_free: list[Slice] = []
        self._freeing = 0
        self._failure: BaseException | None = None
        self._stopping = False
        self._ahead = threads
        self._threads = [
            threading.Thread(target=self._work, args=(number,), name=f"flashmem-loader-{number}", daemon=True)
            for number in range(min(threads, len(loads)))
        ]
        for thread in self._threads:
            thread.start()

    def layer_done(self, layer: int) -> None:
        """Layer `layer` and all before it are done: frees what it used last, and opens the gates behind it."""
        if layer not in self.wakes:
            return
        with self._changed:
            self._done = layer
            self._to_free.extend(self._frees.get(layer, ()))
            self._changed.notify_all()
        if self.when_done is not None:
            self.when_done(layer)

    @property
    def idle(self) -> bool:
        """Whether the disk is another's: nothing is being loaded, and nothing can be before a layer is done."""
        with self._changed:
            waiting = self._next >= len(self._loads) or self._loads[self._next].gate > self._done
            return self._stopping or (waiting and not self._loading)

    def wake(self) -> None:
        """There may be memory now for a load that was not admitted."""
        with self._changed:
            self._changed.notify_all()

    def admit_all(self) -> None:
        """From now on there is memory for every load whose gate is open."""
        with self._changed:
            self._admit = None
            self._changed.notify_all()

    def wait(self, name: str) -> None:
        """Return once slice `name` is loaded.

        Raises:
            RunError: a load failed.
        """
        with self._changed:
            while not self.loaded[name]:
                if self._failure is not None:
                    raise _as_run_error(self._failure)
                self._changed.wait()

    def stop(self) -> None:
        """End the threads, and let go what is still to be freed. Raises RunError if a load failed."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        while self._to_free:
            self._transfer.free(self._to_free.pop())
        if self._failure is not None:
            raise _as_run_error(self._failure)

    def _work(self, thread: int) -> None:
        try:
            while (load := self._take()) is not None:
                start = time.perf_counter()
                if load.preload:
                    self._transfer.preload(load.part, load.band, thread)
                else:
                    self._transfer.load(load.part, load.band, thread)
                span = Span(load.part.name, start, time.perf_counter())
                with self._changed:
                    self.spans.append(span)
                    self._loading -= 1
                    self._missing[load.part.name] -= 1
                    if not self._missing[load.part.name]:
                        self.loaded[load.part.name] = True
                        self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._failure = self._failure or error
                self._stopping = True
                self._changed.notify_all()

    def _take(self) -> Load | None:
        """The next load whose gate is open; frees on the way. None when the run stops."""
        while True:
            with self._changed:
                while not self._stopping and not self._to_free and not self._is_open(self._next):
                    self._changed.wait()
                if self._stopping:
                    return None
                frees, self._to_free = self._to_free, []
                self._freeing += bool(frees)
                load = None
                if not frees:
                    load = self._loads[self._next]
                    self._next += 1
                    self._loading += 1
                    ahead = self._announce()
            if load is not None:
                for each in ahead:
                    self._transfer.expect(each.part, each.band)
                return load
            try:
                for part in frees:
                    self._transfer.free(part)
            finally:
                with self._changed:
                    self._freeing -= 1
                    self._changed.notify_all()

    def _is_open(self, index: int) -> bool:
        """Whether a load may start: its gate is open, nothing is just being freed, and there is memory for it."""
        if index >= len(self._loads) or self._freeing or self._loads[index].gate > self._done:
            return False
        return self._admit is None or self._admit(self._loads[index])

    def _announce(self) -> Sequence[Load]:
        """The loads up to a few ahead of the one just taken, so that the disk reads on; only behind open gates."""
        first = max(self._expected, self._next - 1)
        last = first
        while last < min(self._next + self._ahead, len(self._loads)) and self._loads[last].gate <= self._done:
            last += 1
        self._expected = last
        return self._loads[first:last]


def _as_run_error(error: BaseException) -> BaseException:
    """What the main thread raises for a thread's failure."""
    if isinstance(error, RunError):
        return RunError(str(error))
    return RunError(f"loading weights failed: {type(error).__name__}: {error}")
