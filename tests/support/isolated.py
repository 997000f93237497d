"""Calls a function in worker processes that may crash or hang: one item is lost, and the others continue."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_FRESH = 200
"""Items after which a worker is replaced, to free what drivers leak."""


def call_isolated(
    function: Callable[[Item], Result], items: Iterable[Item], *, jobs: int, timeout: float
) -> Iterator[tuple[Item, Result | str]]:
    """(item, result) for all `items`, in the order of completion; the result is "crash" or "hang" for lost ones.

    Args:
        function: called in a worker; like items and results it must be picklable.
        items: its arguments.
        jobs: worker processes.
        timeout: seconds after which an item counts as hanging.
    """
    context = multiprocessing.get_context("spawn")  # OpenCL drivers do not survive a fork
    waiting = iter(items)
    workers: dict[Connection, tuple[Any, Item, float, int]] = {}

    def stop(connection: Connection) -> None:
        process, *_ = workers.pop(connection)
        connection.close()
        process.kill()
        process.join()

    def start() -> None:
        for item in waiting:
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(function, there), daemon=True)
            process.start()
            there.close()
            here.send(item)
            workers[here] = (process, item, time.monotonic() + timeout, 1)
            return

    for _ in range(jobs):
        start()
    try:
        while workers:
            ready = wait(list(workers), timeout=1.0)
            for connection, (process, item, deadline, done) in list(workers.items()):
                if connection in ready:
                    try:
                        result = connection.recv()
                    except (EOFError, ConnectionResetError):
                        result = "crash"
                elif time.monotonic() > deadline:
                    result = "hang"
                else:
                    continue
                yield item, result
                if result in ("crash", "hang") or done == _FRESH:
                    stop(connection)
                    start()
                    continue
                for following in waiting:
                    connection.send(following)
                    workers[connection] = (process, following, time.monotonic() + timeout, done + 1)
                    break
                else:
                    stop(connection)
    finally:
        for connection in list(workers):
            stop(connection)


def _work(function: Callable[[Any], Any], connection: Connection) -> None:
    while True:
        try:
            item = connection.recv()
        except EOFError:
            return
        connection.send(function(item))
