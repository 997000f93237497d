"""A pool of child processes that build and check kernels.

Compilers in drivers use one processor and hundreds of megabytes, which the process keeps, and a miscompiled kernel may write
anywhere. So both happen in children (`flashmem.runtime.kernels.worker`). They have a session of their own, where Ctrl-C does
not reach them, and end with their parent. Each child is started by the thread that sends it jobs, not by the caller's: Linux
ends a child with the thread that started it (`child_processes.end_with`).
"""

from __future__ import annotations

import heapq
import queue
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from enum import IntEnum
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any

from flashmem.base.errors import RunError
from flashmem.base.interrupts import held_back
from flashmem.base.threads import Thread, started
from flashmem.runtime.kernels.children import Child, processors
from flashmem.runtime.kernels.work_folder import WorkFolder
from flashmem.runtime.opencl.device import Device

WORKER = "flashmem.runtime.kernels.worker"

MOST_CHILDREN = 8
"""However many processors there are: each child has a context, which takes hundreds of megabytes of a GPU's host."""


class Rank(IntEnum):
    """What comes first: what is needed to run, what is needed to trust it, what may wait for another time."""

    BUILD, SAMPLE, WHOLE = range(3)


class Job(ABC):
    """What a child is asked for one kernel. Of the jobs that wait, the one with the smallest `rank` is next."""

    rank: tuple[Rank, int]

    @abstractmethod
    def run(self, worker: KernelWorker) -> str | None:
        """Ask, in a thread of the pool. Returns why nothing more is to be done, or None."""

    def finish(self) -> None:  # noqa: B027 - most have nothing to do
        """Use the answer, in the thread that calls `ChildPool.step`."""


class AbandonedError(Exception):
    """The pool ends its children."""


class KernelWorker:
    """The child of one thread. A new one takes the place of one that ended."""

    def __init__(self, pool: ChildPool, device: Device, folder: Path, *, idle: bool) -> None:
        self._pool = pool
        self._device = device
        self._idle = idle
        self.folder = folder
        self._child: Child | None = None

    def ask(self, job: dict[str, Any], longest: float) -> dict[str, Any] | None:
        """The answer to a job; None if the child ended.

        Raises:
            TimeoutError: it took more than `longest` seconds; the child is ended.
            AbandonedError: the pool ends.
            OSError: no process can be started.
        """
        if self._child is None:
            self._child = Child(WORKER, self._device, self.folder, self.folder / f"{threading.get_ident()}.txt")
            self._pool.adopt(self._child)
            if self._idle:
                self._child.only_when_idle()
        try:
            answer = self._child.ask(job, longest)
        finally:
            if self._pool.ended:
                raise AbandonedError
        return answer

    def replace(self) -> None:
        """End the child, so that the next job has a new one."""
        child = self._child
        self._child = None
        if child is not None:
            child.close()

    def last_words(self) -> str:
        """The last line that the child wrote before it ended, in brackets. The next job has a new child."""
        said = "" if self._child is None else self._child.last_line()
        self.replace()
        return said

    @property
    def was_killed(self) -> bool:
        """Whether another process, or a lack of memory, has killed the child."""
        return self._child is not None and self._child.was_killed()


class ChildPool:
    """Children that work off submitted jobs, one for each processor and `MOST_CHILDREN` at most. `close` ends them."""

    def __init__(self, device: Device, *, idle: bool = False) -> None:
        """Create a pool without starting anything. With `idle`, children run at idle priority."""
        self._device = device
        self._idle = idle
        self._submitted = self._finished = 0
        self._left = Counter[Rank]()
        self._failure: str | None = None
        self._abandoned = False
        self._waiting: list[tuple[tuple[Rank, int], int, Job]] = []  # a heap
        self._tickets: queue.SimpleQueue[bool] = queue.SimpleQueue()  # one for each waiting job; False ends a thread
        self._numbers = count()
        self._done: queue.SimpleQueue[tuple[Job, str | None]] = queue.SimpleQueue()  # and why nothing more is to be done
        self._folder: WorkFolder | None = None
        self._lock = threading.Lock()  # guards the heap and the following
        self._children: list[Child] = []
        self.ended = False  # children are to stop
        self._threads: list[Thread] = []

    @property
    def fraction(self) -> float:
        """The fraction of the submitted jobs that is done."""
        return self._finished / max(1, self._submitted)

    def submit(self, jobs: Iterable[Job], *, busy: int = 0) -> None:
        """Submit jobs. `busy` processors are left free until `step` waits.

        Raises:
            UserError: no temporary folder can be written.
            RunError: the system has no more threads.
        """
        self._folder = self._folder or WorkFolder()
        added = [(job.rank, next(self._numbers), job) for job in jobs]
        with self._lock:
            for each in added:
                heapq.heappush(self._waiting, each)
        for _ in added:
            self._tickets.put(True)
        self._submitted += len(added)
        self._left.update(job.rank[0] for _, _, job in added)
        self._start_threads(max(1, min(MOST_CHILDREN, processors() - busy)))

    def _start_threads(self, most: int) -> None:
        """Start a thread for each waiting job, up to `most` in all."""
        for _ in range(min(self._tickets.qsize(), most - len(self._threads))):
            with held_back():
                self._threads.append(started(self._work, "flashmem-kernels"))

    def _work(self) -> None:
        """Do jobs until the pool ends."""
        assert self._folder is not None
        worker = KernelWorker(self, self._device, Path(self._folder.name), idle=self._idle)
        while self._tickets.get():
            with self._lock:
                job = heapq.heappop(self._waiting)[-1]
            try:
                failure = job.run(worker)
            except AbandonedError:
                failure = "the kernels are no longer needed"
            except OSError as error:
                failure = f"no process that works on kernels can be started ({error.strerror})"
            except BaseException as error:  # any failure is passed to the waiting thread
                failure = f"kernels cannot be built: {type(error).__name__}: {error}"
            self._done.put((job, failure))

    def adopt(self, child: Child) -> None:
        """Note a child, which `abandon` ends."""
        with self._lock:
            self._children.append(child)
            if self.ended:
                child.kill()

    @property
    def is_urgent(self) -> bool:
        """Whether a job is left that may not wait for another time."""
        return any(self._left[rank] for rank in (Rank.BUILD, Rank.SAMPLE))

    def step(self, *, wait: bool = True, until: float | None = None) -> bool:
        """Finish one job.

        Returns False if none is left or one has failed; without `wait`, also if none is done yet, and with `until`, if none is
        at that time (`time.monotonic`).
        """
        if self._abandoned:
            self._failure = "the kernels are no longer needed"
        if self._finished == self._submitted or self._failure is not None:
            return False
        if wait:
            self._start_threads(min(MOST_CHILDREN, processors()))
        try:
            job, self._failure = self._done.get(wait, None if until is None else max(0.0, until - monotonic()))
        except queue.Empty:
            return False
        self._finished += 1
        self._left[job.rank[0]] -= 1
        if self._failure is None:
            job.finish()
        return True

    def check(self, advice: str) -> None:
        """Raise RunError, which ends with `advice`, if a job has failed."""
        if self._failure is not None:
            raise RunError(f"{self._failure}; {advice}")

    def abandon(self) -> None:
        """Make a waiting thread fail now; another thread calls it."""
        self._abandoned = True
        self._end_children()

    def _end_children(self) -> None:
        with self._lock:
            self.ended = True
            for child in self._children:
                child.kill()

    def close(self) -> None:
        """End the children immediately."""
        self._end_children()
        for _ in range(self._tickets.qsize()):  # nobody begins what still waits
            try:
                self._tickets.get_nowait()
            except queue.Empty:
                break
        for _ in self._threads:
            self._tickets.put(False)
        for thread in self._threads:
            thread.join()
        for child in self._children:
            child.close()
        if self._folder is not None:
            self._folder.remove()
