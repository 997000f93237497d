"""Time of whole models with all weights resident, compared with PyTorch's eager mode, in float32.

Elapsed time from inputs on the host to the answer on the host. Flashmem runs the zoo's graphs without weight files. Every
weight has its own constant value, and only the time is meaningful. PyTorch's models are built from configurations by
transformers, with random weights.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import flashmem
from benchmarks.exports.models import find
from flashmem.bundle.writer import BundleWriter
from flashmem.compiler.adaptive.plan_graph import plan_graph
from flashmem.compiler.passes.pipeline import prepare
from flashmem.compiler.stages.planned import with_layouts
from flashmem.options import resolve
from flashmem.request.request import BundleRequest
from flashmem.tools.zoo.graphs import zoo_graph

Row = dict[str, Any]
MODELS = ("resnet50", "vit-b16", "gptneo-125m")
_SECONDS, _FEWEST, _MOST = 2.0, 5, 100


def rows(device: str, deadline: float) -> Iterator[Row]:
    """A row for each model begun before the deadline: seconds of a later run, flashmem's and PyTorch's, or the error."""
    for name in MODELS:
        if time.monotonic() >= deadline:
            print(f"{name} was not begun", file=sys.stderr, flush=True)
            continue
        row: Row = {"model": name, "seconds": {}, "failed": {}}
        for who, measure in (("flashmem", _ours), ("peer", _pytorch)):
            try:
                row["seconds"][who] = measure(name, device)
            except Exception as error:  # an error of one model; the others are measured
                row["failed"][who] = " ".join(str(error).split())[:300] or type(error).__name__
        yield row


def _ours(name: str, device: str) -> float:
    options = resolve(BundleRequest(device=device, optimize="steady"))
    made, plan = plan_graph(prepare(zoo_graph(name)), options)
    plan = with_layouts(made.program, plan, options.descriptor.modes[made.program.memory_path])
    with tempfile.TemporaryDirectory(prefix="flashmem-kernels-") as scratch:
        path = Path(scratch) / "model.flashmem"
        with BundleWriter(path) as writer:
            made.write(writer)
            writer.commit(made.program, made.source, plan, options.descriptor, {"mode": options.mode})
        with flashmem.Session(path, device=device, strategy="preload") as session:
            generator = np.random.default_rng(0)
            inputs = {port.name: generator.integers(0, 100, port.shape).astype(port.dtype) for port in made.program.inputs}
            return _median(lambda: session.run(None, inputs))


def _pytorch(name: str, device: str) -> float:
    import torch

    where = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    model = find(name)
    network = model.build(model.default_size).eval().to(where)
    examples = {key: torch.from_numpy(value) for key, value in model.examples(np.random.default_rng(0)).items()}
    with torch.inference_mode():
        return _median(lambda: model.answer(network, {key: value.to(where) for key, value in examples.items()})[0].cpu())


def _median(run: Callable[[], Any]) -> float:
    """The median of runs after the first three, for about two seconds."""
    for _ in range(3):
        run()
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < _FEWEST or (len(times) < _MOST and time.perf_counter() - begun < _SECONDS):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def markdown(found: list[Row]) -> str:
    """The table of the measurements; a ratio is PyTorch's time over flashmem's."""
    lines = ["", "| everything resident | flashmem, ms | PyTorch eager, ms | ratio |", "|---|---|---|---|"]
    for row in found:
        ours, theirs = row["seconds"].get("flashmem"), row["seconds"].get("peer")
        ratio = f"{theirs / ours:.2f}" if ours and theirs else ""
        lines.append(f"| {row['model']} | {_ms(ours)} | {_ms(theirs)} | {ratio} |")
    lines += [f"\n- {row['model']}, {who}: {why}" for row in found for who, why in row["failed"].items()]
    return "\n".join(lines) + "\n"


def _ms(seconds: float | None) -> str:
    return f"{1e3 * seconds:.2f}" if seconds else ""
