"""Products of 8-bit integers: by dot products of words, without them, in float32, and in ONNX Runtime.

    python -m benchmarks.kernels.integers [--device pocl] [--seconds 4] [--qdq] [--shapes ...]

Each model has one product with constant weights: QLinearMatMul, or QLinearConv of 3 x 3 taps; with `--qdq`, MatMul or Conv
between DequantizeLinear and QuantizeLinear, which is computed in float32 without dot products. `fp32` is the same MatMul or
Conv of floats. Sessions of all four are open at a time and run in turns. Times are medians of later runs with everything
resident, in milliseconds; a ratio is another way's time over that of dot products.
"""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

import flashmem
from benchmarks.command import Arguments, run_command

SHAPES = ("1x1024x4096", "8x1024x4096", "128x1024x1024", "512x768x3072", "56x64", "14x256")
"""Rows x depth x columns of a MatMul; pixels x channels of a Conv, as many of both kinds."""

_LOWERING = "flashmem.compiler.kernels.contraction.packed_product.dot_product"


def model(shape: str, *, quantised: bool, qdq: bool = False, seed: int = 0) -> tuple[bytes, dict[str, NDArray[Any]]]:
    """The model of a shape, and its input."""
    draw = np.random.default_rng(seed)
    sizes = [int(size) for size in shape.split("x")]
    conv = len(sizes) == 2
    x, w, y = (
        ((1, sizes[1], sizes[0], sizes[0]), (sizes[1], sizes[1], 3, 3), (1, sizes[1], sizes[0], sizes[0]))
        if conv
        else ((sizes[0], sizes[1]), (sizes[1], sizes[2]), (sizes[0], sizes[2]))
    )
    values, weights = draw.integers(0, 256, x).astype(np.uint8), draw.integers(-128, 128, w).astype(np.int8)
    named: dict[str, Any] = {"w": weights if quantised else (weights / 64).astype(np.float32)}
    inputs, kind = ["x", "w"], TensorProto.FLOAT
    if quantised:
        named |= {"xs": np.float32(1 / 64), "xz": np.uint8(120), "ws": np.full(w[0] if conv else w[1], 1 / 64, np.float32)}
        named |= {"wz": np.zeros(named["ws"].shape, np.int8), "ys": np.float32(1), "yz": np.uint8(128)}
        inputs, kind = ["x", "xs", "xz", "w", "ws", "wz", "ys", "yz"], TensorProto.UINT8
    op, pads = "Conv" if conv else "MatMul", {"pads": [1, 1, 1, 1]} if conv else {}
    nodes = [helper.make_node(f"QLinear{op}" if quantised else op, inputs, ["y"], **pads)]
    if quantised and qdq:
        nodes = [
            helper.make_node("DequantizeLinear", ["x", "xs", "xz"], ["xf"]),
            helper.make_node("DequantizeLinear", ["w", "ws", "wz"], ["wf"], axis=0 if conv else 1),
            helper.make_node(op, ["xf", "wf"], ["yf"], **pads),
            helper.make_node("QuantizeLinear", ["yf", "ys", "yz"], ["y"]),
        ]
    graph = helper.make_graph(
        nodes, "integers", [helper.make_tensor_value_info("x", kind, x)], [helper.make_tensor_value_info("y", kind, y)],
        [numpy_helper.from_array(np.asarray(value), key) for key, value in named.items()],
    )  # fmt: skip
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(made)
    return made.SerializeToString(), {"x": values if quantised else (values / 64).astype(np.float32)}


def measure(shape: str, device: str, seconds: float, *, qdq: bool) -> dict[str, float]:
    """Median milliseconds of each way."""
    import onnxruntime

    integers, given = model(shape, quantised=True, qdq=qdq)
    floats, numbers = model(shape, quantised=False)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="flashmem-")))
        runs: dict[str, Any] = {}

        def add(name: str, source: bytes, inputs: dict[str, NDArray[Any]]) -> None:
            (folder / f"{name}.onnx").write_bytes(source)
            bundle = flashmem.compile(folder / f"{name}.onnx", folder / name, device=device, optimize="steady")
            session = stack.enter_context(flashmem.Session(bundle, device=device))
            runs[name] = lambda: session.run(None, inputs)

        add("dots", integers, given)
        with patch(_LOWERING, lambda *given: None):
            add("without", integers, given)
        add("fp32", floats, numbers)
        peer = onnxruntime.InferenceSession(integers, providers=["CPUExecutionProvider"])
        runs["onnxruntime"] = lambda: peer.run(None, given)
        off = np.abs(runs["dots"]()[0].astype(int) - runs["without"]()[0].astype(int)).max()
        assert off <= qdq, f"{shape}: answers with and without dot products differ by {off}"
        taken: dict[str, list[float]] = {name: [] for name in runs}
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(taken["dots"]) < 7:
            for name, run in runs.items():
                start = time.perf_counter()
                run()
                taken[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(times[2:]) for name, times in taken.items()}


def main() -> None:
    """Parse the command line, measure, and print a table."""
    parser = Arguments(__doc__)
    parser.add_device("pocl")
    parser.add_argument("--seconds", type=float, default=4.0, help="for each shape")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--qdq", action="store_true", help="products between DequantizeLinear and QuantizeLinear")
    args = parser.parse_args()
    parser.check_device(args.device)
    print(f"| {args.device} | dots, ms | without | fp32 | ONNX Runtime |\n|---|---|---|---|---|")
    for shape in args.shapes:
        found = measure(shape, args.device, args.seconds, qdq=args.qdq)
        others = (found[name] / found["dots"] for name in ("without", "fp32", "onnxruntime"))
        print(f"| {shape} | {found['dots']:.3f} | {' | '.join(f'{ratio:.2f}' for ratio in others)} |", flush=True)


if __name__ == "__main__":
    run_command(main)
