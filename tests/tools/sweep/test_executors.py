"""Points of a sweep on a dask or ray cluster, and the message when the cluster fails."""

from __future__ import annotations

import csv
import os
import pickle
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashmem.base.errors import RunError, UserError
from flashmem.runtime.opencl.discovery import list_devices
from flashmem.tools.sweep.executors import executor
from flashmem.tools.sweep.grid import split_list
from tests.support.command_line import Command, command_line
from tests.support.paths import DATA, ROOT

RESNET = DATA / "resnet-tiny.onnx"
DEVICE = list_devices()[0].descriptor_name


@pytest.fixture
def flashmem(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    monkeypatch.setenv("FLASHMEM_CACHE_DIR", str(tmp_path / "cache"))
    return command_line(monkeypatch, capfd)


@contextmanager
def dask_cluster() -> Iterator[str]:
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(n_workers=1, processes=False, dashboard_address=None) as cluster:
        yield cluster.scheduler_address


@contextmanager
def ray_cluster() -> Iterator[str]:
    pytest.importorskip("ray", reason="needs ray: pip install ray")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))  # workers import flashmem from here
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        head = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            yield cluster.address
        finally:
            cluster.shutdown()


@contextmanager
def imitated_ray() -> Iterator[str]:
    """The calls of ray in use, for environments without ray: tasks are pickled and run by a thread."""

    class RayTaskError(Exception):
        def __init__(self, cause: Exception) -> None:
            self.cause = cause

    calls: list[str] = []
    with ThreadPoolExecutor(1) as threads, socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"

        def remote(function: Callable[..., Any]) -> Any:
            def run(task: bytes) -> Any:
                function, arguments = pickle.loads(task)
                try:
                    return function(*arguments)
                except Exception as error:
                    raise RayTaskError(error) from error

            def submit(*arguments: Any) -> Any:
                assert calls == ["init"]
                task = threads.submit(run, pickle.dumps((function, arguments)))
                return SimpleNamespace(future=lambda: task)

            return SimpleNamespace(remote=submit)

        def init(**options: Any) -> None:
            assert options["address"] == address
            calls.append("init")

        ray = SimpleNamespace(
            init=init,
            remote=remote,
            shutdown=lambda: calls.append("shutdown"),
            exceptions=SimpleNamespace(RayTaskError=RayTaskError),
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "ray", ray)
            yield address
        assert calls == ["init", "shutdown"]


CLUSTERS = {"dask": dask_cluster, "ray": ray_cluster, "ray-imitated": imitated_ray}


@pytest.mark.parametrize("engine", CLUSTERS)
def test_points_go_through_a_cluster(engine: str, flashmem: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    kind = engine.removesuffix("-imitated")
    words = ("sweep", RESNET, "--budget", "1B,8MB,16MB", "--device", DEVICE)
    with CLUSTERS[engine]() as address:
        there = flashmem(*words, "--executor", kind, "--address", address, "-o", "there.csv")
        assert there.code == 0, there.err
    assert flashmem(*words, "-o", "local.csv").code == 0

    def without_time(path: str) -> list[dict[str, str]]:
        with Path(path).open(newline="") as file:
            rows = [{k: v for k, v in row.items() if k != "solve_seconds"} for row in csv.DictReader(file)]
        return sorted(rows, key=lambda row: row["budget_bytes"])

    assert without_time("there.csv") == without_time("local.csv")
    assert len(without_time("there.csv")) == 3


@pytest.mark.parametrize("engine", CLUSTERS)
def test_what_a_worker_raises_is_raised_here(engine: str) -> None:
    kind: Any = engine.removesuffix("-imitated")
    with CLUSTERS[engine]() as address, executor(kind, jobs=1, address=address) as pool:
        refused = pool.submit(split_list, "1,,2", "--mu", float)
        with pytest.raises(UserError, match=r"^--mu '1,,2' has an empty item; write values separated by commas$"):
            refused.result()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere", "127.0.0.1:99999"])
def test_a_ray_cluster_that_does_not_answer(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    with pytest.raises(UserError, match="no ray cluster answers"), executor("ray", jobs=1, address=address):
        pass


def test_a_point_that_ends_its_dask_worker_is_a_run_that_failed() -> None:
    dask, distributed = pytest.importorskip("dask"), pytest.importorskip("distributed")
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 0}),
        distributed.LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None) as cluster,
        executor("dask", jobs=1, address=cluster.scheduler_address) as pool,
        pytest.raises(RunError, match=r"^the dask cluster failed: a point ended every worker that tried it.*are kept$"),
    ):
        pool.submit(os._exit, 1).result(timeout=60)


def test_a_dask_scheduler_that_goes_is_a_run_that_failed() -> None:
    distributed = pytest.importorskip("distributed")
    cluster = distributed.LocalCluster(n_workers=1, processes=False, dashboard_address=None)
    with executor("dask", jobs=1, address=cluster.scheduler_address) as pool:
        point = pool.submit(time.sleep, 0.5)
        cluster.close()
        with pytest.raises(RunError, match=r"^the dask cluster failed: the connection to its scheduler was lost.*are kept$"):
            point.result(timeout=60)
        distributed.get_client().close()  # as it does after ten seconds without finding the scheduler
        with pytest.raises(RunError, match="the connection to its scheduler was lost"):
            pool.submit(time.sleep, 0)
