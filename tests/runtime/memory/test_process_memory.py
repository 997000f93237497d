"""Memory of the running process above its budget: interpreter, driver, kernels, and at most 32 MiB more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import flashmem
from flashmem.base.errors import BudgetError
from flashmem.runtime.engine.inputs import write_outputs
from flashmem.runtime.opencl.discovery import list_devices

pytestmark = pytest.mark.build_apart

ROWS = 4096  # an output of 64 MiB
MIB = 1 << 20


def write_model(path: Path) -> None:
    """A column times a row gives a matrix, an output; a temporary tensor of the same size is alive with it."""
    nodes = [
        helper.make_node("Add", ["column", "row"], ["sums"]),
        helper.make_node("Softmax", ["sums"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in INPUTS.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [ROWS, ROWS])],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)


INPUTS = {"column": (ROWS, 1), "row": (1, ROWS)}


@pytest.mark.parametrize("device", [device.descriptor_name for device in list_devices() if device.kind == "cpu"])
def test_the_first_run_holds_its_budget_and_little_else(device: str, tmp_path: Path) -> None:
    """The cache is empty, so kernels are built; the output is saved; later runs follow."""
    write_model(tmp_path / "m.onnx")
    with pytest.raises(BudgetError) as refused:
        flashmem.compile(tmp_path / "m.onnx", tmp_path / "b", device=device, budget=1, build=False)
    smallest = refused.value.smallest_bytes
    assert smallest < 2.1 * 4 * ROWS * ROWS
    bundle = flashmem.compile(tmp_path / "m.onnx", tmp_path / "b", device=device, budget=smallest, build=False)
    values = {name: np.random.default_rng(0).standard_normal(shape, np.float32) for name, shape in INPUTS.items()}
    np.savez(tmp_path / "x.npz", **values)
    command = [sys.executable, "-m", "flashmem", "run", str(bundle.path), "--device", device, "--json", "--repeat", "2"]
    files = ["--input", str(tmp_path / "x.npz"), "--output", str(tmp_path / "y.npz")]
    environment = {**os.environ, "FLASHMEM_CACHE_DIR": str(tmp_path / "cache"), "POCL_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([*command, *files], env=environment, capture_output=True, text=True, check=True)
    memory = json.loads(done.stdout)["memory"]
    assert memory["budget_bytes"] == smallest and "outputs" not in memory["by_category"]
    above = memory["process_peak_rss_bytes"] - memory["process_bare_rss_bytes"] - smallest
    assert above <= 32 * MIB, f"{above / MIB:.1f} MiB above bare process and budget"
    sums = np.exp(values["column"] + values["row"])
    with np.load(tmp_path / "y.npz") as saved:
        np.testing.assert_allclose(saved["y"], sums / sums.sum(1, keepdims=True), rtol=1e-4)


def test_outputs_are_written_as_numpy_writes_them(tmp_path: Path) -> None:
    arrays = [
        np.arange(12, dtype=np.int64).reshape(3, 4).T, np.array(2.5, np.float16), np.empty((0, 3), bool),
        np.zeros((3 << 19) + 1, np.float32),
    ]  # fmt: skip
    names = ["file", "b", "c", "d"]
    write_outputs(tmp_path / "o.npz", names, arrays)
    with np.load(tmp_path / "o.npz") as saved:
        assert saved.files == names
        for name, array in zip(names, arrays, strict=True):
            assert saved[name].dtype == array.dtype and saved[name].shape == array.shape
            np.testing.assert_array_equal(saved[name], array)
