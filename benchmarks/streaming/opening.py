"""What a session's opening takes beyond the driver's own, in fresh processes.

    python -m benchmarks.streaming.opening [gpt2 | model.onnx] --device nvidia [--share 0.4] [--mode auto] [--runs 7]

The model is a known architecture with random weights, or an ONNX file, compiled for a budget of `--share` of its weights.

- *driver*: pyopencl alone starts the drivers, makes a context and a queue.
- *driver, buffer*: and allocates its first buffer, which many drivers take long for.
- *driver, kernels*: and loads the bundle's compiled kernels, already in memory, and creates a kernel object of each.
- *session*: `flashmem.Session`, from before the drivers start. *first answer*: and its first run.

The processes take turns; a row has medians. The file and the compiled kernels are in the system's page cache: a first process,
which is not counted, puts them there. What `import flashmem` imports is not in the times; what it postpones is.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.command import Arguments, run_command
from benchmarks.disk import warm

if TYPE_CHECKING:
    from flashmem import Bundle
    from flashmem.runtime.opencl.device import Device

KINDS = ("session", "driver")  # the first session puts compiled kernels into the cache


def kernel_keys(bundle: Bundle, device: Device) -> dict[str, str]:
    """The keys in the cache of the kernels that a session of the bundle loads, by name."""
    from flashmem.runtime.engine.opened import OpenedBundle
    from flashmem.runtime.kernels.cache import kernel_key
    from flashmem.runtime.kernels.required import required_kernels
    from flashmem.runtime.request.compatibility import for_processor, mode_for

    bundle = for_processor(bundle, device)
    opened = OpenedBundle(bundle, device, mode_for(bundle, device, "auto", "plan"), verify_weights=False)
    moves = opened.moves(bundle.plan), opened.moves(bundle.plan.later())
    wanted = (each for kernels in required_kernels(opened.program, opened.source, *moves) for each in kernels)
    keys = {each.name: kernel_key(device, each, opened.program.build_options) for each in wanted}
    opened.close()
    return keys


def driver(platform: str, keys: dict[str, str]) -> dict[str, float]:
    """Seconds of the driver's own opening. `keys`: of compiled kernels in the cache, by name."""
    import numpy as np

    from flashmem.runtime.kernels.cache_files import ProgramCache
    from flashmem.runtime.opencl.binding import cl

    cache = ProgramCache()
    binaries = {name: binary for name, key in keys.items() if (binary := cache.read(key)) is not None}
    begun = time.perf_counter()
    devices = [device for each in cl.get_platforms() for device in each.get_devices() if each.name == platform]
    if not devices:
        raise SystemExit(f"pyopencl alone finds no device of {platform}; this needs a driver that is installed in the system")
    device = devices[0]
    context = cl.Context([device])
    queue = cl.CommandQueue(context, device)
    made = time.perf_counter()
    buffer = cl.Buffer(context, cl.mem_flags.READ_WRITE, size=1 << 20)
    cl.enqueue_copy(queue, buffer, np.zeros(1, np.uint8))
    allocated = time.perf_counter()
    kernels = [cl.Kernel(cl.Program(context, [device], [binary]).build(), name) for name, binary in binaries.items()]
    loaded = time.perf_counter()
    row = {"driver": made - begun, "driver, buffer": allocated - begun}
    return row | ({"driver, kernels": loaded - begun} if len(kernels) == len(keys) else {})


def session(bundle: str, device: str) -> dict[str, float]:
    """Seconds of a session's opening, and with its first run."""
    from benchmarks.streaming.random_weights import random_inputs
    from flashmem import Bundle, Session

    inputs = random_inputs(Bundle.open(bundle).program)
    begun = time.perf_counter()
    with Session(bundle, device=device) as opened:
        made = time.perf_counter()
        opened.run(None, inputs)
        return {"session": made - begun, "first answer": time.perf_counter() - begun}


def in_process(kind: str, *given: str) -> dict[str, float]:
    """What a fresh process measures; exits if it fails."""
    command = [sys.executable, "-m", "benchmarks.streaming.opening", "--one", kind, *given]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    row: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return row


def main() -> None:
    """Measure, in turn."""
    parser = Arguments(__doc__)
    parser.add_argument("model", nargs="?", default="gpt2", help="a known architecture, or an .onnx file")
    parser.add_device()
    parser.add_argument("--share", type=float, default=0.4, help="the budget, as a share of the weights")
    parser.add_argument("--mode", default="auto", help="the transfer mode")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--one", choices=KINDS, help="measure this in this process, and print it as JSON")
    parser.add_argument("--bundle", help="of a process with --one")
    parser.add_argument("--keys", help="of compiled kernels, for a process with --one")
    parser.add_argument("--platform", help="of the device, for a process with --one")
    parser.set_defaults(objective="first", memory_path="auto")
    args = parser.parse_args()
    if args.one:
        own = args.one == "driver"
        print(json.dumps(driver(args.platform, json.loads(args.keys)) if own else session(args.bundle, args.device)))
        return
    parser.check_device(args.device)
    from benchmarks.streaming.host_tier import compiled
    from flashmem import Bundle
    from flashmem.runtime.request.options import device_here

    parser.check_model(args.model)
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / "model.flashmem"
        weights = sum(part.nbytes for part in compiled(args.model, args, bundle).slices)
        compiled(args.model, args, bundle, budget=int(args.share * weights))
        warm(Bundle.open(bundle).weights_path)
        device = device_here(args.device)
        keys = json.dumps(kernel_keys(Bundle.open(bundle), device))
        given = ["--device", args.device, "--bundle", str(bundle), "--platform", device.platform, "--keys", keys]
        for turn in range(args.runs + 1):
            for kind in KINDS:
                row = in_process(kind, *given)
                for name, seconds in row.items() if turn else ():
                    found.setdefault(name, []).append(seconds)
    print("| | ms, median (least, most) |\n|---|---|")
    for name in sorted(found, key=lambda name: not name.startswith("driver")):
        times = found[name]
        print(f"| {name} | {1e3 * statistics.median(times):.0f} ({1e3 * min(times):.0f}, {1e3 * max(times):.0f}) |")


if __name__ == "__main__":
    run_command(main)
