"""What checking kernels adds to `flashmem compile`.

    python -m benchmarks.device.check_cost [MODEL.onnx | MODEL.gguf | ARCHITECTURE ...] --device D

Each model is compiled twice in fresh processes, with empty caches: without checks, then with them. A row has the seconds of
both, what the checks add, the processor seconds that they add, and the number of launches that were checked. Architectures have
random weights. Without models: twelve architectures. Checks are paid once for
each kernel, device and driver.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import Arguments, run_command
from flashmem.base.paths import VARIABLE
from flashmem.runtime.request.options import device_here

MODELS = (
    "mobilenetv2", "mobilenetv3-large", "resnet50", "whisper-tiny-encoder", "vit-b16", "vit-103m", "deepvit-204m", "gpt2",
    "opt-125m", "gptneo-125m", "whisper-medium-encoder", "gptneo-1.3b",
)  # fmt: skip


def compiled(model: str, device: str, *, checks: bool) -> dict[str, Any]:
    """Compile in a fresh process with empty caches: seconds, processor seconds, launches checked, and what was wrong."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "benchmarks.device.check_cost", model, "--device", device, "--into", folder]
        environment = {**os.environ, VARIABLE: str(Path(folder, "cache"))}
        done = subprocess.run([*words, *([] if checks else ["--without"])], env=environment, check=True, stdout=subprocess.PIPE)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def compile_here(model: str, device: str, folder: Path, *, checks: bool) -> dict[str, Any]:
    """What `compiled` asks of its process."""
    import flashmem
    from flashmem.runtime.kernels.checks import CheckJob, ProgramChecks

    run = CheckJob.run
    launches: list[str] = []

    def counted(job: CheckJob, worker: Any) -> str | None:
        failure = run(job, worker)
        launches.extend(job.verdicts)
        return failure

    CheckJob.run = counted  # type: ignore[method-assign]
    if not checks:
        ProgramChecks.jobs = lambda *_, **__: []  # type: ignore[method-assign]
    begun = time.perf_counter()
    flashmem.compile(model, folder / "m.flashmem", device=device)
    seconds = time.perf_counter() - begun
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    processor = sum(each.ru_utime + each.ru_stime for each in used)
    return {"seconds": seconds, "processor": processor, "launches": len(launches)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile each model twice and print a row."""
    parser = Arguments(__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="MODEL", help="files, or known architectures")
    parser.add_device()
    parser.add_argument("--into", type=Path, help="compile one file here, and print JSON")
    parser.add_argument("--without", action="store_true", help="with --into: without checks")
    args = parser.parse_args(arguments)
    parser.check_device(args.device)
    if args.into is not None:
        print(json.dumps(compile_here(args.models[0], args.device, args.into, checks=not args.without)))
        return
    device = device_here(args.device)
    print(f"{device.name} ({device.platform}, driver {device.driver_version}), {os.cpu_count()} processors")
    print(f"{'':24} {'compile s':>9} {'with checks':>11} {'adds':>14} {'processor s':>11} {'launches':>8}")
    shares, added = [], []
    for model in args.models:
        with tempfile.TemporaryDirectory() as folder:
            file = model if Path(model).is_file() else written(model, Path(folder))
            plain, whole = (compiled(file, args.device, checks=checks) for checks in (False, True))
        added.append(whole["seconds"] - plain["seconds"])
        shares.append(added[-1] / plain["seconds"])
        print(
            f"{Path(model).stem[:24]:24} {plain['seconds']:9.1f} {whole['seconds']:11.1f} {added[-1]:6.1f} ({shares[-1]:4.0%}) "
            f"{whole['processor'] - plain['processor']:12.1f} {whole['launches']:8}",
            flush=True,
        )
    print(f"median {statistics.median(shares):.0%} of compiling, at worst {max(added):.1f} s")


def written(architecture: str, folder: Path) -> str:
    """A file of a known architecture with random weights."""
    from flashmem.tools.zoo.graph_file import write_random
    from flashmem.tools.zoo.graphs import check_architecture

    check_architecture(architecture)
    write_random(architecture, folder / f"{architecture}.onnx")
    return str(folder / f"{architecture}.onnx")


if __name__ == "__main__":
    run_command(main)
