"""The matmul template against numpy's OpenBLAS, in one process, turn by turn.

    python -m benchmarks.gemm

GFLOP/s, medians of 15 turns: our kernel on each OpenCL CPU device as a compiled model runs it (packed weights, one launch a
slice), and `numpy.matmul` beside it.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

import flashmem
from flashmem.runtime.opencl import list_devices

SHAPES = ((128, 2048, 2048), (128, 2048, 8192))
TURNS = 15


def model(path: Path, rows: int, depth: int, columns: int) -> None:
    """One MatMul with constant weights."""
    weights = np.random.default_rng(0).standard_normal((depth, columns)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="product")],
        "gemm",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [rows, depth])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [rows, columns])],
        [numpy_helper.from_array(weights, "w")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)


def main() -> None:
    """Print a table."""
    print("| M x K x N | device | flashmem GFLOP/s | OpenBLAS GFLOP/s | ratio |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for rows, depth, columns in SHAPES:
            path = Path(folder) / "gemm.onnx"
            model(path, rows, depth, columns)
            x = np.random.default_rng(1).standard_normal((rows, depth)).astype(np.float32)
            w = numpy_helper.to_array(onnx.load(path).graph.initializer[0])
            flops = 2 * rows * depth * columns
            for device in list_devices():
                if device.kind != "cpu":
                    continue
                bundle = flashmem.compile(path, Path(folder) / "gemm.flashmem", device=device.descriptor_name)
                with flashmem.Session(bundle, device=device.descriptor_name, strategy="preload", trace=True) as session:
                    session.run(None, {"x": x})
                    ours, theirs = [], []
                    for _ in range(TURNS):
                        session.run(None, {"x": x})
                        ours.append(sum(span.end - span.start for span in session.last_run.layers))
                        begun = time.perf_counter()
                        np.matmul(x, w)
                        theirs.append(time.perf_counter() - begun)
                mine, blas = flops / statistics.median(ours) / 1e9, flops / statistics.median(theirs) / 1e9
                print(
                    f"| {rows} x {depth} x {columns} | {device.descriptor_name} | {mine:.0f} | {blas:.0f} | {mine / blas:.2f} |"
                )


if __name__ == "__main__":
    main()
