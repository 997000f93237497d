"""What opening a session takes: fresh processes open bundles that differ in kernels alone, or in layers alone."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from flashmem.bundle import BundleWriter
from flashmem.codegen.program import generate
from flashmem.compile import plan_program
from flashmem.device import DeviceDescriptor, TransferMode
from flashmem.errors import RunError
from flashmem.graph.fusion import fuse
from flashmem.graph.ir import Graph, GraphPort
from flashmem.graph.passes import prepare
from flashmem.planning.limits import Limits
from flashmem.request import Options

from .cases import Sketch

_KERNELS, _LAYERS = 28, 280
_ROUNDS = 5


@dataclass(frozen=True)
class Opening:
    """Seconds of opening a session: beside everything, for each kernel from the program cache, and for each layer."""

    session: float
    kernel: float
    layer: float


def measure_opening(descriptor: DeviceDescriptor, device: str, mode: TransferMode) -> Opening:
    """Medians over fresh processes that take turns. The cache is filled first; what a warm run takes is not counted.

    Raises:
        RunError: a process fails.
    """
    graphs = {"one": kernels_graph(1), "kernels": kernels_graph(_KERNELS), "layers": layers_graph(_LAYERS)}
    with tempfile.TemporaryDirectory(prefix="flashmem-sessions-") as name:
        inside = Path(name)
        bundles = {key: inside / f"{key}.flashmem" for key in graphs}
        for key, path in bundles.items():
            _bundle(path, graphs[key], descriptor, mode)
            _open(path, device, inside)
        times = [{key: _open(path, device, inside) for key, path in bundles.items()} for _ in range(_ROUNDS)]
    one, kernels, layers = (statistics.median(row[key] for row in times) for key in graphs)
    layer = max(1e-6, (layers - one) / (_LAYERS - 1))
    kernel = max(1e-6, (kernels - one) / (_KERNELS - 1) - layer)
    return Opening(max(1e-4, one - kernel - layer), kernel, layer)


_ENDINGS = ("Relu", "Gelu", "Tanh", "Sigmoid", "Exp", "HardSwish")


def layers_graph(count: int) -> Graph:
    """A chain of `count` products with weights of their own, all one kernel."""
    g = Sketch()
    y = g.input(1, 8, 64)
    for _ in range(count):
        y = g.node("MatMul", [y, g.weight(64, 64)], y.shape)
    return g.finish(y)


def kernels_graph(count: int) -> Graph:
    """A graph of up to `count` kernels, of the kinds that models have, with as many texts as there are kernels."""
    g = Sketch()
    outputs = []
    for i in range(count):
        x = g.input(1, 8 + i, 64 + 16 * i)
        turn, kind = divmod(i, 4)
        endings = (_ENDINGS[turn % len(_ENDINGS)], _ENDINGS[(turn + turn // len(_ENDINGS) + 1) % len(_ENDINGS)])
        if kind == 2:
            y = g.node("Transpose", [x], (1, x.shape[2], x.shape[1]), perm=[0, 2, 1])
        else:
            y = x
            if kind == 0:
                y = g.node("MatMul", [x, g.weight(x.shape[2], 64)], (1, x.shape[1], 64))
            elif kind == 3:
                y = g.node("Softmax", [x], x.shape, axis=-1)
            for op in endings:
                y = g.node(op, [y], y.shape)
        outputs.append(GraphPort(f"y{i}", "float32", y))
    return Graph("kernels", g.inputs, outputs, g.nodes)


def _bundle(path: Path, graph: Graph, descriptor: DeviceDescriptor, mode: TransferMode) -> None:
    graph = prepare(graph)
    made = generate(graph, fuse(graph), descriptor)
    # The rates are being measured and the model is not trained: the plan must not ask for it.
    options = Options(replace(descriptor, capacity_model=""), mode, Limits())
    with BundleWriter(path) as writer:
        made.weights.write(writer)
        writer.commit(made.program, made.source, plan_program(made.program, options), descriptor, {"mode": mode})


def _open(bundle: Path, device: str, cache: Path) -> float:
    """Seconds to open a session and run once, above a warm run, in a fresh process that has loaded the driver.

    Raises:
        RunError: the process fails; with the last line that it wrote.
    """
    command = [sys.executable, "-m", "flashmem.profiler.opening", str(bundle), device]
    environment = {**os.environ, "FLASHMEM_CACHE_DIR": str(cache)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        reason = _last_line(done.stderr) or f"exit code {done.returncode}"
        raise RunError(f"a fresh process could not open a session to time it: {reason}")
    answer = _last_line(done.stdout)  # above it may stand what a driver prints
    try:
        return float(answer)
    except ValueError as error:
        raise RunError(f"a fresh process was to print the seconds that a session took to open, not {answer!r}") from error


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
