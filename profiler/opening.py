"""`python -m flashmem.profiler.opening BUNDLE DEVICE`: seconds to open a session and run once, minus a warm run, and of that.

The OpenCL driver is loaded before the clock starts, as in every comparison with other engines (benchmarks/worker.py).
"""

from __future__ import annotations

import sys
from time import perf_counter

import numpy as np

from flashmem.base.child_processes import ending_in_a_sentence
from flashmem.bundle.bundle import Bundle
from flashmem.runtime.opencl.context import Context
from flashmem.runtime.opencl.discovery import find_device
from flashmem.runtime.session import Session

_WARM_RUNS = 10


def main() -> None:
    """Measure, and print the seconds."""
    path, device = sys.argv[1:]
    with ending_in_a_sentence():
        _measure(path, device)


def _measure(path: str, device: str) -> None:
    driver = Context(find_device(device)).queue()
    inputs = {port.name: np.zeros(port.shape, port.dtype) for port in Bundle.open(path).program.inputs}
    times = [perf_counter()]
    with Session(path, device=device) as session:
        for _ in range(1 + _WARM_RUNS):
            session.run(None, inputs)
            times.append(perf_counter())
    driver.finish()
    first, *warm = np.diff(times)
    print(first - min(warm), np.median(warm))


if __name__ == "__main__":
    main()
