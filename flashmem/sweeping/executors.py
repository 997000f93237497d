"""Where the points of a sweep are worked out: a local process pool, or an engine that is already running."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol

from flashmem.errors import UserError

EXECUTORS = ("local", "dask", "ray")


class Submits(Protocol):
    """What a sweep asks of an executor."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any) -> Future[Any]:
        """Begin `function(*arguments)` somewhere."""
        ...


def default_jobs() -> int:
    """Local processes: half the cores, because the solver has threads of its own."""
    return max(1, (os.cpu_count() or 1) // 2)


@contextmanager
def executor(kind: str, *, jobs: int, address: str | None = None) -> Iterator[Submits]:
    """The executor of `kind`; `address` is the cluster's, else the one that the engine itself is configured for.

    Raises:
        UserError: the engine is not installed, or no cluster is there.
    """
    if kind == "dask":
        with _dask(address) as submits:
            yield submits
    elif kind == "ray":
        with _ray(address) as submits:
            yield submits
    else:
        # Not forked: this process has threads, and a solver in memory.
        pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))
        try:
            yield pool
        finally:
            pool.shutdown(cancel_futures=True)


@contextmanager
def _dask(address: str | None) -> Iterator[Submits]:
    try:
        import dask
        from distributed import Client
    except ModuleNotFoundError as error:
        raise UserError("--executor dask needs dask.distributed; install it with: pip install distributed") from error
    address = address or dask.config.get("scheduler-address", None)
    if address is None:
        raise UserError("--executor dask needs a running cluster; name its scheduler with --address tcp://HOST:8786")
    try:
        client: Any = Client(address, timeout="10s")  # type: ignore[no-untyped-call]
    except (OSError, TimeoutError, ValueError) as error:
        raise UserError(f"no dask scheduler answers at {address}; start one, or leave --executor out") from error
    with client:
        yield client.get_executor()


@contextmanager
def _ray(address: str | None) -> Iterator[Submits]:
    try:
        import ray
    except ModuleNotFoundError as error:
        raise UserError("--executor ray needs ray; install it with: pip install ray") from error
    try:
        ray.init(address=address or "auto", log_to_driver=False, logging_level="error")
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UserError("no ray cluster is running; start one with `ray start --head`, or leave --executor out") from error

    class Tasks:
        """Each call a task of the cluster."""

        def submit(self, function: Callable[..., Any], /, *arguments: Any) -> Future[Any]:
            future: Future[Any] = ray.remote(function).remote(*arguments).future()
            return future

    try:
        yield Tasks()
    finally:
        ray.shutdown()
