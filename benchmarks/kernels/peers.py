"""Libraries that flashmem's kernels are compared with: PyTorch on an NVIDIA GPU; OpenBLAS and ONNX Runtime on a CPU."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import numpy as np

from benchmarks.kernels.cliffs import Single
from flashmem.base.types import Precision
from flashmem.profiler.shapes import Attention, Batched, Convolution, Matmul, Shape

_SECONDS = 0.1  # a shape is repeated for this long
_MOST = 100
_IN_GRAPH = 20  # calls in a CUDA graph


class Peer(Protocol):
    """Kernels of another library. `about`: its name and versions."""

    about: str

    def seconds(self, shape: Shape | Single, precision: Precision = "fp32") -> float:
        """The median time of one call; operands and results of "fp16" are halves. Raises the library's errors."""


class Cuda:
    """PyTorch's kernels: cuBLAS, cuDNN and scaled_dot_product_attention, all settings default, but TF32 as `precision` says.

    Convolutions by tensor cores have channels last, as flashmem's.

    Timed by events around the replay of a CUDA graph of 20 calls. Host time is excluded, as for flashmem.
    """

    def __init__(self) -> None:
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError("PyTorch finds no CUDA device")
        self._torch: Any = torch
        self.about = f"PyTorch {torch.__version__}, {torch.cuda.get_device_name()}"

    def seconds(self, shape: Shape | Single, precision: Precision = "fp32") -> float:
        """Seconds of one call."""
        torch = self._torch
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
        with torch.inference_mode():
            call = self._call(shape, precision)
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for _ in range(3):
                    call()
            torch.cuda.synchronize()
            replay, calls = self._graph(call)
            once = self._between_events(replay) / calls
            turns = max(5, min(_MOST, math.ceil(_SECONDS / (once * calls))))
            found = statistics.median(self._between_events(replay) / calls for _ in range(turns))
        torch.cuda.empty_cache()
        return found

    def _graph(self, call: Callable[[], Any]) -> tuple[Callable[[], Any], int]:
        torch = self._torch
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(_IN_GRAPH):
                    call()
        except RuntimeError:  # an operator that cannot be captured is called directly
            torch.cuda.synchronize()

            def repeat() -> None:
                for _ in range(_IN_GRAPH):
                    call()

            return repeat, _IN_GRAPH
        replay: Callable[[], Any] = graph.replay
        replay()
        torch.cuda.synchronize()
        return replay, _IN_GRAPH

    def _between_events(self, run: Callable[[], Any]) -> float:
        torch = self._torch
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) * 1e-3

    def _call(self, shape: Shape | Single, precision: Precision) -> Callable[[], Any]:
        if isinstance(shape, Single):
            raise RuntimeError(f"PyTorch has no call for {shape}")
        torch = self._torch
        functional = torch.nn.functional

        def draw(*sizes: int) -> Any:
            drawn = torch.rand(*sizes, device="cuda") + 0.5
            if precision == "fp16":
                drawn = drawn.half()
            last = isinstance(shape, Convolution) and len(sizes) == 4 and precision != "fp32"
            return drawn.to(memory_format=torch.channels_last) if last else drawn

        if isinstance(shape, Matmul):
            a, b = draw(shape.rows, shape.depth), draw(shape.depth, shape.columns)
            return lambda: torch.matmul(a, b)
        if isinstance(shape, Batched):
            a, b = draw(shape.batches, shape.rows, shape.depth), draw(shape.batches, shape.depth, shape.columns)
            return lambda: torch.matmul(a, b)
        if isinstance(shape, Convolution):
            x, w = draw(1, shape.channels, shape.height, shape.width), draw(shape.columns, shape.channels, *shape.kernel)
            return lambda: functional.conv2d(x, w, stride=shape.stride, padding=shape.pads)
        keys = shape.keys or shape.rows
        q, k, v = (draw(1, shape.heads, rows, shape.width) for rows in (shape.rows, keys, keys))
        return lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=shape.causal)


class Cpu:
    """numpy's OpenBLAS for products; ONNX Runtime operators for the rest (attention: its four operators); on every core."""

    def __init__(self) -> None:
        import onnxruntime

        self._runtime: Any = onnxruntime
        self.threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        blas = ""
        with suppress(ImportError):
            import threadpoolctl

            threadpoolctl.threadpool_limits(self.threads, user_api="blas")
            blas = ", ".join(f"{each['internal_api']} {each.get('version')}" for each in threadpoolctl.threadpool_info())
        self.about = (
            f"numpy {np.__version__} ({blas or 'its BLAS'}), ONNX Runtime {onnxruntime.__version__}, {self.threads} cores"
        )

    def seconds(self, shape: Shape | Single, precision: Precision = "fp32") -> float:
        """Seconds of one call."""
        if precision != "fp32":
            raise RuntimeError(f"no library here is measured in {precision}")
        call = self._product(shape) if isinstance(shape, Matmul | Batched) else self._operator(shape)
        call()
        once = _clock(call)
        turns = max(3, min(_MOST, math.ceil(_SECONDS / max(once, 1e-9))))
        return statistics.median(_clock(call) for _ in range(turns))

    def _product(self, shape: Matmul | Batched) -> Callable[[], Any]:
        batch = (shape.batches,) if isinstance(shape, Batched) else ()
        a, b = _draw(*batch, shape.rows, shape.depth), _draw(*batch, shape.depth, shape.columns)
        out = np.empty((*batch, shape.rows, shape.columns), np.float32)
        return lambda: np.matmul(a, b, out=out)

    def _operator(self, shape: Convolution | Attention | Single) -> Callable[[], Any]:
        if isinstance(shape, Single):
            return self._session(shape.model())
        import onnx
        from onnx import helper, numpy_helper

        def declare(name: str, sizes: tuple[int, ...]) -> Any:
            return helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, sizes)

        if isinstance(shape, Convolution):
            inputs = {"x": (1, shape.channels, shape.height, shape.width)}
            weights = {"w": _draw(shape.columns, shape.channels, *shape.kernel)}
            pads = [*shape.pads, *shape.pads]
            nodes = [helper.make_node("Conv", ["x", "w"], ["y"], strides=list(shape.stride), pads=pads)]
            output = (1, shape.columns, *shape.out)
        else:
            keys = shape.keys or shape.rows
            heads = (1, shape.heads)
            inputs = {
                "q": (*heads, shape.rows, shape.width),
                "k": (*heads, shape.width, keys),
                "v": (*heads, keys, shape.width),
            }
            weights = {"scale": np.array(0.01, np.float32)}
            nodes = [
                helper.make_node("MatMul", ["q", "k"], ["scores"]),
                helper.make_node("Mul", ["scores", "scale"], ["scaled"]),
                helper.make_node("Softmax", ["scaled"], ["shares"], axis=-1),
                helper.make_node("MatMul", ["shares", "v"], ["y"]),
            ]
            output = inputs["q"]
        graph = helper.make_graph(
            nodes, "operator", [declare(*each) for each in inputs.items()], [declare("y", output)],
            [numpy_helper.from_array(value, name) for name, value in weights.items()],
        )  # fmt: skip
        return self._session(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9))

    def _session(self, model: Any) -> Callable[[], Any]:
        """A run of `model` with its inputs bound."""
        options = self._runtime.SessionOptions()
        options.intra_op_num_threads = self.threads
        session = self._runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        binding = session.io_binding()
        for given in session.get_inputs():
            binding.bind_cpu_input(given.name, _draw(*given.shape))
        for made in session.get_outputs():
            binding.bind_output(made.name)
        return lambda: session.run_with_iobinding(binding)


def _draw(*sizes: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(0).uniform(0.5, 1.5, sizes).astype(np.float32)


def _clock(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def peer_of(kind: str) -> Peer | None:
    """The peer for a device of this kind; None, with a line on stderr, if it is not installed."""
    try:
        return Cuda() if kind == "gpu" else Cpu()
    except (ImportError, RuntimeError, OSError) as error:
        print(f"no peer to compare with: {error}", flush=True)
        return None
