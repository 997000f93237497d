"""Kernels under minutes of load: the rate of one product over time, and of a sum that streams memory.

    python -m flashmem.profiler.phone_kit.heat LAUNCHES.kit DEVICE-NUMBER FOLDER SECONDS

Prints one line of JSON every few seconds: the first ones are of a cold device, the last ones of a hot one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

from flashmem.base.child_processes import ending_in_a_sentence
from flashmem.runtime.opencl.devices import descriptor_for
from flashmem.runtime.opencl.discovery import device_at

from ..bench import Bench, lower_quartile
from ..kit import Kit
from ..rates import CPU_GEMMS, GPU_GEMMS, TRAFFIC_ELEMENTS

_INTERVAL = 5.0
_BURSTS = 5
_BURST_SECONDS = 0.05


def heat(bench: Bench, seconds: float, interval: float = _INTERVAL) -> Iterator[dict[str, float]]:
    """Keep the device busy for `seconds`; yield both rates every `interval`. The product: the second largest of the rates'."""
    shapes = CPU_GEMMS if bench.descriptor.kind == "cpu" else GPU_GEMMS
    products = bench.supply.matmul(*shapes[min(1, len(shapes) - 1)])
    sums = bench.supply.elementwise(TRAFFIC_ELEMENTS)
    product = bench.prepare(products)
    total = bench.prepare(sums)
    begun = perf_counter()
    while True:
        at = perf_counter() - begun
        gemm, traffic = (lower_quartile(each.burst_seconds(_BURSTS, _BURST_SECONDS)) for each in (product, total))
        rates = {"gemm_flops": 2 * products.launch.macs / gemm, "memory_bandwidth": sums.launch.bytes / traffic}
        yield {"second": at, **rates}
        while (now := perf_counter() - begun) < min(at + interval, seconds):
            product.burst_seconds(1, min(0.5, seconds - now))
        if now >= seconds:
            return


def main() -> None:
    """Measure, and print a line for each interval."""
    launches, number, folder, seconds = sys.argv[1:]
    with ending_in_a_sentence():
        device = device_at(int(number))
        descriptor = descriptor_for(device)
        path = descriptor.memory_paths[0]
        with Bench(device, descriptor.on_path(path), Path(folder), Kit(Path(launches)).supply(path)) as bench:
            for row in heat(bench, float(seconds)):
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
