"""Measure one model in a fresh process, and print one JSON object.

    python -m benchmarks.worker flashmem --bundle B [--mode M] [--strategy S] [--no-lanes] [--inputs I.npz]
    python -m benchmarks.worker onnxruntime --model M [--mapped] [--inputs I.npz]
    python -m benchmarks.worker bare [--device D]

With `--energy` the joules of the machine from the creation of the session to the outputs, of all that runs (`energy.py`).

`above_bare` is the peak resident memory (VmHWM) minus the memory of the same process just before the model is opened. At that
point its engine is imported and, for flashmem, the OpenCL device is open. `integrated` is the time from creating the session to
the outputs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.energy import Meter, meter


def vm(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def draw(name: str, shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    """The same input for every engine: token ids below 50000, or standard normal values."""
    generator = np.random.default_rng(sum(map(ord, name)))
    if "int" in dtype:
        return generator.integers(0, 50000, shape).astype(dtype)
    return generator.standard_normal(shape).astype(dtype)


def inputs_for(ports: Iterable[tuple[str, tuple[int, ...], str]], path: Path | None) -> dict[str, np.ndarray[Any, Any]]:
    """The inputs: drawn for (name, shape, dtype) of each port, or the arrays in an .npz file."""
    if path is None:
        return {name: draw(name, shape, dtype) for name, shape, dtype in ports}
    with np.load(path) as file:
        return {name: file[name] for name, _, _ in ports}


def drop(paths: list[Path]) -> None:
    """Drop files from the page cache (a virtual machine's host may still cache them)."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def run_flashmem(args: argparse.Namespace) -> dict[str, Any]:
    """Open the bundle, and run it `--repeat` times."""
    from flashmem import Bundle, Session
    from flashmem.runtime.opencl.context import Context
    from flashmem.runtime.opencl.discovery import find_device

    driver = Context(find_device(args.device)).queue()
    ports = Bundle.open(args.bundle).program.inputs
    inputs = inputs_for([(port.name, port.shape, port.dtype) for port in ports], args.inputs)
    bare = vm("VmHWM")
    trace = args.trace is not None
    options = {"device": args.device, "mode": args.mode, "strategy": args.strategy, "lanes": args.lanes, "trace": trace}
    options["prepare"] = False  # all runs are of one kind
    counting = started_meter(args)
    started = time.perf_counter()
    with Session(args.bundle, **options) as session:
        outputs = session.run(None, inputs)
        integrated = time.perf_counter() - started
        joules = None if counting is None else counting.stop()
        report = session.last_run
        if args.trace:
            write_trace(args.trace, report, started)
        again = []
        for _ in range(args.repeat - 1):
            begun = time.perf_counter()
            outputs_again = session.run(None, inputs)
            again.append(time.perf_counter() - begun)
            if any(not np.array_equal(a, b, equal_nan=True) for a, b in zip(outputs, outputs_again, strict=True)):
                raise SystemExit("two runs of one session differ")
    driver.finish()
    return {
        "integrated": integrated,
        "joules": joules,
        "warm": min(again, default=None),
        "later": statistics.median(again) if again else None,
        "bare": bare,
        "ledger_peak": report.memory.peak_bytes,
        "ledger_average": report.memory.average_bytes,
        "outputs": outputs,
    }


def write_trace(path: Path, report: Any, origin: float) -> None:
    """Launches and loads as (start, end), and the bytes in use, in seconds since the session was opened."""
    spans = {
        kind: [(span.start - origin, span.end - origin) for span in found]
        for kind, found in (("layers", report.layers), ("loads", report.loads))
    }
    held = [(at - origin, nbytes) for at, nbytes in report.memory.over_time]
    changes = [(at - origin, category, nbytes) for at, category, nbytes in report.memory.changes]
    path.write_text(json.dumps({**spans, "held": held, "changes": changes, "integrated": report.latency.integrated}))


def bare_process(device: str) -> int:
    """Resident bytes of interpreter, numpy, pyopencl, the driver and the device's context."""
    from flashmem.runtime.opencl.context import Context
    from flashmem.runtime.opencl.discovery import find_device

    driver = Context(find_device(device)).queue()
    resident = vm("VmRSS")
    driver.finish()
    return resident


def run_onnxruntime(args: argparse.Namespace) -> dict[str, Any]:
    """ONNX Runtime with default settings, or with mapped external data, no prepacking and no arena."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    if args.mapped:
        options.add_session_config_entry("session.disable_prepacking", "1")
        options.enable_cpu_mem_arena = False
    bare = vm("VmHWM")
    counting = started_meter(args)
    started = time.perf_counter()
    session = ort.InferenceSession(args.model, options)
    types = {"tensor(float)": "float32", "tensor(int64)": "int64", "tensor(int32)": "int32"}
    inputs = inputs_for([(i.name, tuple(i.shape), types[i.type]) for i in session.get_inputs()], args.inputs)
    outputs = session.run(None, inputs)
    integrated = time.perf_counter() - started
    joules = None if counting is None else counting.stop()
    again = []
    for _ in range(args.repeat - 1):
        begun = time.perf_counter()
        session.run(None, inputs)
        again.append(time.perf_counter() - begun)
    warm = min(again, default=None)
    return {"integrated": integrated, "joules": joules, "warm": warm, "bare": bare, "outputs": outputs}


def started_meter(args: argparse.Namespace) -> Meter | None:
    """What counts joules from now on, if asked. Raises UserError."""
    if not args.energy:
        return None
    counting = meter()
    counting.start()
    return counting


def main() -> None:
    """Parse the arguments, drop caches if requested, measure, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("engine", choices=("flashmem", "onnxruntime", "bare"))
    parser.add_argument("--bundle", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--inputs", type=Path, help="an .npz file, instead of inputs drawn from their names")
    parser.add_argument("--mapped", action="store_true")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--mode", default="auto")
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--no-lanes", dest="lanes", action="store_false", help="see `flashmem.Session`")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--cold", type=Path, nargs="*", default=[])
    parser.add_argument("--outputs", type=Path)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--energy", action="store_true")
    args = parser.parse_args()
    drop(args.cold)
    if args.engine == "bare":
        print(json.dumps({"bare": bare_process(args.device)}))
        return
    result = (run_flashmem if args.engine == "flashmem" else run_onnxruntime)(args)
    outputs = result.pop("outputs")
    if args.outputs:
        np.savez(args.outputs, *outputs)
    result["above_bare"] = vm("VmHWM") - result["bare"]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
