"""Reads of the weight file in the background, by threads of the C library.

A Python thread that has read some MB has neither the interpreter nor the driver in the caches of its core: it then holds the
interpreter's lock for 200 us, and with 60 loads nothing else runs for half of a run (docs/research/measurements.md). Threads of
the C library take no such lock: POSIX asynchronous I/O (POSIX.1-2017, aio_read), here glibc's. It makes the requests of one
descriptor one after the other, so each of its threads gets a descriptor of its own. With another C library, threads of Python
read.

A request's structure is used again only when no thread waits for it: a thread that wakes up in aio_suspend, and finds another
read under way there, follows a pointer of the earlier one to freed memory (glibc 2.36).
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import threading
from abc import ABC, abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import SimpleQueue

from flashmem.base.errors import RunError
from flashmem.base.interrupts import held_back
from flashmem.base.threads import Thread, call_each, started
from flashmem.runtime.opencl.context import Bytes
from flashmem.runtime.streaming.weight_file import WeightFile


class _Notification(ctypes.Structure):
    """struct sigevent."""

    _fields_ = (("value", ctypes.c_void_p), ("signal", ctypes.c_int), ("how", ctypes.c_int), ("rest", ctypes.c_int * 12))


class _Request(ctypes.Structure):
    """struct aiocb of glibc, 64 bits."""

    _fields_ = (
        ("descriptor", ctypes.c_int), ("code", ctypes.c_int), ("priority", ctypes.c_int), ("address", ctypes.c_void_p),
        ("nbytes", ctypes.c_size_t), ("notification", _Notification), ("next", ctypes.c_void_p), ("absolute", ctypes.c_int),
        ("policy", ctypes.c_int), ("error", ctypes.c_int), ("result", ctypes.c_ssize_t), ("offset", ctypes.c_int64),
        ("reserved", ctypes.c_char * 32),
    )  # fmt: skip


_SIGEV_NONE = 1

_SEEN = 7
"""After a read of cached bytes, so many are taken for cached: a look costs a tenth of what the host does for a load."""


class _Functions:
    """glibc's functions. Only a call that waits lets other threads run."""

    def __init__(self, name: str | None) -> None:
        """Raises AttributeError: the library lacks them."""
        locked = ctypes.PyDLL(name, use_errno=True)
        free = ctypes.CDLL(name)
        self.read = locked.aio_read64
        self.error = locked.aio_error64
        self.result = locked.aio_return64
        self.read.argtypes = self.error.argtypes = self.result.argtypes = (ctypes.c_void_p,)
        self.result.restype = ctypes.c_ssize_t
        self.suspend = free.aio_suspend64


@functools.cache
def _functions() -> _Functions | None:
    """glibc's functions; None with another C library, or with one of 32 bits, whose structures differ."""
    if not hasattr(ctypes.CDLL(None), "gnu_get_libc_version") or ctypes.sizeof(ctypes.c_void_p) != 8:
        return None
    for name in (None, "librt.so.1"):  # apart until glibc 2.34
        try:
            return _Functions(name)
        except (AttributeError, OSError):
            continue
    return None


class Reading(ABC):
    """A read that has begun. Its memory must stay until it has ended. `thread`: the number of who reads."""

    __slots__ = ()
    thread: int

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Whether `finish` need not wait."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until it has ended, however; other threads run meanwhile. Any thread may call it."""

    @abstractmethod
    def finish(self) -> None:
        """Once it has ended: make sure that all bytes are there. Raises RunError: the file was truncated, or the disk fails."""

    def leave(self) -> None:  # noqa: B027 - reads by Python own nothing
        """Nobody asks for it any more, but threads may still be in `wait`."""


class _ByLibrary(Reading):
    """A read by a thread of the C library."""

    __slots__ = (
        "_at", "_data", "_file", "_functions", "_left", "_lock", "_offset", "_request", "_source", "_unused", "_waiting",
        "thread",
    )  # fmt: skip

    def __init__(
        self, functions: _Functions, file: WeightFile, data: Bytes, offset: int, thread: int, unused: list[_Request]
    ) -> None:
        """Takes a request from the `unused` ones, to which it returns. `begin` must follow."""
        self._functions = functions
        self._file = file
        self._data = data
        self._offset = offset
        self.thread = thread
        self._unused = unused
        self._request = unused.pop() if unused else _Request(notification=_Notification(how=_SIGEV_NONE))
        self._at = ctypes.addressof(self._request)
        self._lock = threading.Lock()
        self._left = False
        self._waiting = 0  # threads in `wait`

    def begin(self, address: int, descriptor: int, source: int, nbytes: int) -> None:
        """Begin to read from a descriptor, a duplicate of the file's `source`. Raises RunError: the system refuses."""
        request = self._request
        self._source = source
        request.descriptor = descriptor
        request.address = address
        request.nbytes = nbytes
        request.offset = self._offset
        if self._functions.read(self._at):
            why = os.strerror(ctypes.get_errno())
            raise RunError(f"a read of {self._file.path} could not begin: {why}")

    @property
    def ended(self) -> bool:
        """See `Reading`."""
        return self._left or bool(self._functions.error(self._at) != errno.EINPROGRESS)

    def wait(self) -> None:
        """See `Reading`."""
        with self._lock:
            if self._left:
                return
            self._waiting += 1
        try:
            while not self.ended:  # a signal ends the call
                self._functions.suspend((ctypes.c_void_p * 1)(self._at), 1, None)
        finally:
            with self._lock:
                self._waiting -= 1
                self._give_back()

    def finish(self) -> None:
        """See `Reading`. What the library did not read, because of an error or an end, is read again here."""
        got = max(0, self._functions.result(self._at))
        self._file.complete(self._data, self._offset, self._source, got)

    def leave(self) -> None:
        """See `Reading`."""
        with self._lock:
            self._left = True
            self._give_back()

    def _give_back(self) -> None:
        if self._left and not self._waiting:
            self._unused.append(self._request)


class _ByPython(Reading):
    """A read by a thread of Python."""

    def __init__(self, future: Future[None], thread: int) -> None:
        self._future = future
        self.thread = thread

    @property
    def ended(self) -> bool:
        """See `Reading`."""
        return self._future.done()

    def wait(self) -> None:
        """See `Reading`."""
        wait([self._future])

    def finish(self) -> None:
        """See `Reading`."""
        self._future.result()


class BackgroundReads:
    """Reads of one file by a number of threads. Not safe for several threads."""

    def __init__(self, file: WeightFile, threads: int) -> None:
        self._file = file
        self._threads = threads
        self._idle = list(range(threads))  # the threads that do not read
        self._under_way: list[Reading] = []
        self._functions = _functions()
        self._unseen = 0  # reads that are taken for cached before the next look
        self._pool: ThreadPoolExecutor | None = None
        self._descriptors: dict[int, list[int]] = {}  # of a descriptor of the file, a duplicate for each thread
        self._unused: list[_Request] = []  # requests for the next reads
        self._announced: SimpleQueue[tuple[int, int] | None] = SimpleQueue()
        self._announcer: Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether every thread reads."""
        return not self._idle

    def begin(self, data: Bytes, address: int, offset: int) -> Reading:
        """Begin to fill `data`, which is at `address`, with the bytes at `offset` of the file, as `WeightFile.read_into`,
        unless all are `busy`. `end` must follow.

        Raises:
            RunError: the system refuses.
        """
        file = self._file
        if file.stays and not self._is_cached(offset, data.nbytes):
            self._announce(offset, data.nbytes)
        if self._functions is not None:
            return self._by_library(self._functions, data, address, offset)
        self._pool = self._pool or ThreadPoolExecutor(self._threads, "flashmem-reader")
        with held_back():
            reading = _ByPython(self._pool.submit(file.read_into, data, offset), self._idle.pop())
            self._under_way.append(reading)
        return reading

    def _by_library(self, functions: _Functions, data: Bytes, address: int, offset: int) -> Reading:
        file = self._file
        thread = self._idle[-1]
        source, nbytes = file.source(data, offset)
        if source not in self._descriptors:
            self._descriptors[source] = [os.dup(source) for _ in range(self._threads)]
        reading = _ByLibrary(functions, file, data, offset, thread, self._unused)
        self._under_way.append(reading)  # before it begins, so that `stop` knows of it whenever Ctrl-C comes
        self._idle.pop()
        try:
            reading.begin(address, self._descriptors[source][thread], source, nbytes)
        except RunError:
            self.end(reading)
            raise
        return reading

    def end(self, reading: Reading) -> None:
        """A read has ended, and is finished: its thread can make another one."""
        if reading in self._under_way:
            self._under_way.remove(reading)
            self._idle.append(reading.thread)
            reading.leave()

    def stop(self) -> None:
        """Wait for all reads, and forget them."""
        for reading in self._under_way:
            reading.wait()
        while self._under_way:
            self._under_way.pop().leave()
        self._idle[:] = range(self._threads)

    def _is_cached(self, offset: int, nbytes: int) -> bool:
        self._unseen -= 1
        if self._unseen >= 0:
            return True
        if self._file.is_cached(offset, nbytes):
            self._unseen = _SEEN
            return True
        return False

    def _announce(self, offset: int, nbytes: int) -> None:
        """Let the system read these bytes into the page cache at once. A thread asks for it: the disk's queue can be full."""
        if self._announcer is None:
            with held_back():
                self._announcer = started(self._announce_all, "flashmem-announcer")
        self._announced.put((offset, nbytes))

    def _announce_all(self) -> None:
        while (place := self._announced.get()) is not None:
            self._file.expect(*place)

    def close(self) -> None:
        """End all reads and threads, and close the descriptors."""
        call_each(self.stop, self._end_threads, self._close_descriptors)

    def _end_threads(self) -> None:
        if self._announcer is not None:
            self._announced.put(None)
            self._announcer.join()
            self._announcer = None
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _close_descriptors(self) -> None:
        while self._descriptors:
            _, numbered = self._descriptors.popitem()
            for descriptor in numbered:
                os.close(descriptor)
