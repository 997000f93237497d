"""Executors of a sweep's points: a local process pool, or a running dask or ray cluster."""

from __future__ import annotations

import logging
import multiprocessing
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

from flashmem.base.errors import RunError, UserError

EXECUTORS = ("local", "dask", "ray")


class Submits(Protocol):
    """The interface of an executor."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any) -> Future[Any]:
        """Start `function(*arguments)`."""
        ...


def default_jobs() -> int:
    """The number of local processes: half the cores, because the solver has its own threads."""
    return max(1, (os.cpu_count() or 1) // 2)


@contextmanager
def executor(kind: str, *, jobs: int, address: str | None = None) -> Iterator[Submits]:
    """The executor of `kind`. `address` is the cluster's address; the default is the engine's configured one.

    Raises:
        UserError: the engine is not installed, or no cluster is running.
    """
    if kind == "dask":
        with _dask(address) as submits:
            yield submits
    elif kind == "ray":
        with _ray(address) as submits:
            yield submits
    else:
        # spawned, not forked: this process has threads and a solver
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
    logging.getLogger("distributed.client").setLevel(logging.CRITICAL)  # the errors that it logs are raised too
    try:
        client: Any = Client(address, timeout="10s")  # type: ignore[no-untyped-call]
    except (OSError, TimeoutError, ValueError) as error:
        raise UserError(f"no dask scheduler answers at {address}; start one, or leave --executor out") from error
    with client:
        yield _DaskTasks(client)


@contextmanager
def _ray(address: str | None) -> Iterator[Submits]:
    try:
        import ray
    except ModuleNotFoundError as error:
        raise UserError("--executor ray needs ray; install it with: pip install ray") from error
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    if address != "auto":
        _require_listener(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UserError("no ray cluster is running; start one with `ray start --head`, or leave --executor out") from error
    try:
        yield _RayTasks(ray)
    finally:
        ray.shutdown()


def _require_listener(address: str) -> None:
    """Raise UserError if nothing listens at `address`; Ray itself would try for minutes."""
    where = address.removeprefix("ray://")
    host, _, port = where.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, ValueError, OverflowError) as error:
        raise UserError(f"no ray cluster answers at {address}; name one as HOST:PORT, or leave --executor out") from error


def _passed_on(task: Future[Any], meaning: Callable[[BaseException], BaseException]) -> Future[Any]:
    """A future with the result of `task`, or with its error converted by `meaning`."""
    future: Future[Any] = Future()

    def ended(task: Future[Any]) -> None:
        error = CancelledError() if task.cancelled() else task.exception()
        if error is None:
            future.set_result(task.result())
        else:
            future.set_exception(meaning(error))

    task.add_done_callback(ended)
    return future


class _DaskTasks:
    """Runs each call as a task of a dask cluster."""

    def __init__(self, client: Any) -> None:
        from distributed.client import ClosedClientError
        from distributed.comm.core import CommClosedError
        from distributed.scheduler import KilledWorker

        self._executor = client.get_executor()
        self._killed = KilledWorker
        self._lost = (ClosedClientError, CommClosedError, CancelledError, TimeoutError)

    def submit(self, function: Callable[..., Any], /, *arguments: Any) -> Future[Any]:
        """Start `function(*arguments)`; its exceptions are raised here unchanged."""
        try:
            return _passed_on(self._executor.submit(function, *arguments), self._meaning)
        except self._lost as error:
            raise self._meaning(error) from error

    def _meaning(self, error: BaseException) -> BaseException:
        if isinstance(error, self._killed):
            what = "a point ended every worker that tried it, for lack of memory perhaps"
        elif isinstance(error, self._lost):  # dask cancels tasks when the scheduler ends
            what = f"the connection to its scheduler was lost ({type(error).__name__})"
        elif isinstance(error, RuntimeError) and "deserialization of the task graph" in str(error):
            what = "its scheduler cannot read a point; install the same flashmem there"
        else:
            return error
        return RunError(f"the dask cluster failed: {what}; finished points are kept")


class _RayTasks:
    """Runs each call as a task of a ray cluster."""

    def __init__(self, ray: Any) -> None:
        self._remote = cache(ray.remote)
        self._errors = ray.exceptions

    def submit(self, function: Callable[..., Any], /, *arguments: Any) -> Future[Any]:
        """Start `function(*arguments)`; its exceptions are raised here unchanged."""
        return _passed_on(self._remote(function).remote(*arguments).future(), self._meaning)

    def _meaning(self, error: BaseException) -> BaseException:
        if not isinstance(error, self._errors.RayTaskError):
            return RunError(f"the ray cluster failed: {error}; finished points are kept")
        cause: BaseException = error.cause
        # Ray reports a function that its worker cannot import as a RuntimeError.
        cannot_import = isinstance(cause, RuntimeError) and "failed to import" in str(cause)
        return ModuleNotFoundError(name="flashmem") if cannot_import else cause
