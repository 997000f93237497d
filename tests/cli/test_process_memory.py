"""`--process-memory`: the peak of a real process stays below the limit, also where the system enforces it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import flashmem
from benchmarks.memory_cgroup import HardLimit, why_no_limit
from flashmem.base.errors import BudgetError, UserError
from flashmem.runtime.opencl.discovery import list_devices
from flashmem.runtime.request.process_memory import SLACK, budget_within
from tests.support.paths import ROOT

DEVICES = [device.descriptor_name for device in list_devices()]
MB = 1_000_000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve products with 42 MB of weights together."""
    random = np.random.default_rng(3)
    weights = [numpy_helper.from_array(random.uniform(-0.05, 0.06, (940, 940)).astype(np.float32), f"w{i}") for i in range(12)]
    nodes = []
    for i in range(12):
        nodes.append(helper.make_node("MatMul", [f"t{i}", f"w{i}"], [f"h{i}"]))
        nodes.append(helper.make_node("Tanh", [f"h{i}"], [f"t{i + 1}"]))
    ports = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in (("t0", [8, 940]), ("t12", None))
    ]
    graph = helper.make_graph(nodes, "chain", ports[:1], ports[1:], weights)
    path = tmp_path_factory.mktemp("model") / "chain.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), path)
    return path


def command(*words: object, program: Sequence[str] = ("-m", "flashmem")) -> list[str]:
    return [sys.executable, *program, *map(str, words)]


LAUNCHER = """
import json, resource, subprocess, sys
done = subprocess.run(sys.argv[1:], capture_output=True, text=True)
print(json.dumps([done.returncode, done.stdout, done.stderr, 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss]))
"""
"""A small parent: a process counts the memory of the one that it was forked from, until it executes its program."""


def measured(words: Sequence[str]) -> tuple[int, str, str, int]:
    """Exit code, stdout, stderr and peak resident bytes of a process and its children, as the system counts them."""
    done = subprocess.run([sys.executable, "-c", LAUNCHER, *words], cwd=ROOT, capture_output=True, text=True, check=True)
    code, out, err, peak = json.loads(done.stdout)
    return code, out, err, peak


def smallest(stderr: str) -> int:
    """The limit that a refusal names, in MB."""
    found = re.search(r"give (\d+)MB or more$", stderr.strip().splitlines()[-1])
    assert found is not None, stderr
    return int(found[1])


@pytest.mark.parametrize("device", DEVICES)
def test_a_process_stays_below_its_limit(device: str, model: Path) -> None:
    """The limit that the refusal names works for the model; with more memory the peak is higher, and still below the limit."""
    code, _, err, _ = measured(command("run", model, "--device", device, "--process-memory", "60MB"))
    assert code == 2 and "process memory 60MB is too small: the process holds" in err
    least, peaks = smallest(err), []
    for limit in (least, least + 25):
        words = command("run", model, "--device", device, "--process-memory", f"{limit}MB", "--json")
        assert measured(words)[0] == 0  # compiles, in a child process
        code, out, err, peak = measured(words)
        assert code == 0, err
        memory = json.loads(out)["memory"]
        assert memory["process_limit_bytes"] == limit * MB and peak <= limit * MB and memory["process_peak_rss_bytes"] <= peak
        assert memory["peak_bytes"] <= memory["budget_bytes"] and memory["process_bare_rss_bytes"] > 70 * MB
        peaks.append(memory["budget_bytes"])
    assert peaks[1] > peaks[0] + 20 * MB


@pytest.mark.parametrize("device", DEVICES)
def test_a_bundle_is_planned_for_the_limit(device: str, model: Path, tmp_path: Path) -> None:
    bundle = flashmem.compile(model, tmp_path / "chain.flashmem", device=device)
    refused = measured(command("run", bundle.path, "--device", device, "--process-memory", "60MB"))
    assert refused[0] == 2, refused[2]
    least = smallest(refused[2]) + 1  # processes differ by some hundred KB
    words = command("run", bundle.path, "--device", device, "--process-memory", f"{least}MB")
    assert measured(words)[0] == 0  # builds kernels, in child processes
    code, out, err, peak = measured(words)
    assert code == 0, err
    assert peak <= least * MB and f"of at most {least}MB" in out
    if (reason := why_no_limit()) is not None:
        pytest.skip(f"no memory cgroup here: {reason}")
    with HardLimit(least * MB) as group:
        done = group.run(words)
    assert done.returncode == 0, done.stderr


def test_a_session_derives_its_budget(model: Path, tmp_path: Path) -> None:
    bundle = flashmem.compile(model, tmp_path / "chain.flashmem", device=DEVICES[0])
    x = np.random.default_rng(1).uniform(-1, 2, (8, 940)).astype(np.float32)
    with flashmem.Session(bundle, device=DEVICES[0]) as session:
        [expected] = session.run(None, {"t0": x})
    with pytest.raises(BudgetError, match="is too small: the process holds") as caught:
        flashmem.Session(bundle, device=DEVICES[0], process_memory=1000)
    limit = caught.value.smallest_bytes + 12 * MB
    with flashmem.Session(bundle, device=DEVICES[0], process_memory=limit) as session:
        assert session.process_memory == limit and session.budget is not None and session.budget < limit - SLACK
        [answer] = session.run(None, {"t0": x})
        assert session.last_run is not None and session.last_run.memory.peak_bytes <= session.budget
    np.testing.assert_array_equal(answer, expected)
    for other in ({"budget": "1GB"}, {"host_budget": "auto"}):
        with pytest.raises(UserError, match="give either it or budgets"):
            flashmem.Session(bundle, device=DEVICES[0], process_memory="1GB", **other)  # type: ignore[arg-type]


def test_a_limit_excludes_budgets(model: Path) -> None:
    for flag in ("--budget", "--m-peak"):
        code, _, err, _ = measured(command("run", model, "--process-memory", "1GB", flag, "100MB"))
        assert code == 2 and "--process-memory gives the budget; give either it or --budget" in err
    code, _, err, _ = measured(command("run", model, "--process-memory", "much"))
    assert code == 2 and "process memory" in err and len(err.strip().splitlines()) == 1


def test_a_device_with_memory_of_its_own_is_refused() -> None:
    from dataclasses import replace

    apart = replace(list_devices()[0], unified_memory=False)
    with pytest.raises(UserError, match="has memory of its own, which no process memory limits"):
        budget_within(10**9, 10**8, apart)
    with pytest.raises(UserError, match="does not report the memory of a process"):
        budget_within(10**9, None, list_devices()[0])
