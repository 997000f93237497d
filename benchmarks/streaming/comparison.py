"""Streaming compared with preloading and ONNX Runtime: latency, memory, energy, and a hard memory limit.

    python -m benchmarks.streaming.comparison --zoo DIR [--device pocl] [--runs 5] [--json results.json]

DIR contains resnet50, vit-b16 and gptneo-125m from `benchmarks.exports`, each in its own folder, with external data. Every
number is the median of fresh processes that alternate; the kernels' program cache is filled first. "Cold" drops the file from
the page cache (the host of a virtual machine may still cache it). The disk's rate is measured in the same way in the same run.
ONNX Runtime runs with default settings, and as the simplest rival of streaming ("mapped"): weights in one mapped file of
external data, no prepacking, no arena. Energy is read by RAPL or from a phone's battery (`benchmarks/energy.py`), if the system
permits it; FlashMem's Table 9 has it on a phone, and its Table 1 the memory and latency of an engine that preloads. The hard
limit is a memory cgroup, which needs root; otherwise those rows are missing. Needs the `bench` extra.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import flashmem
from benchmarks.command import Arguments, run_command
from benchmarks.disk import cold_rate
from benchmarks.energy import meter
from benchmarks.memory_cgroup import HardLimit, why_no_limit
from flashmem.base.errors import UserError
from flashmem.base.units import parse_size
from flashmem.bundle.bundle import Bundle

BUDGETS = {"resnet50": "64MB", "vit-b16": "96MB", "gptneo-125m": "128MB"}
MIB = 1 << 20


class Bench:
    """The processes of one model."""

    def __init__(self, name: str, model: Path, folder: Path, device: str, runs: int, energy: bool) -> None:
        self.energy = ["--energy"] if energy else []
        self.name, self.model, self.folder, self.device, self.runs = name, model, folder, device, runs
        self.budget = parse_size(BUDGETS[name])
        self.bundle = folder / f"{name}.flashmem"
        self.mapped = self._with_external_data()

    def _with_external_data(self) -> Path:
        """Write the model with its weights in one file beside it, which ONNX Runtime maps instead of copying."""
        path = self.folder / "external" / "model.onnx"
        path.parent.mkdir()
        onnx.save(onnx.load(self.model), path, save_as_external_data=True, location="model.onnx.data", size_threshold=1024)
        return path

    def compile(self) -> dict[str, float]:
        """Compile in a new process: seconds and peak memory."""
        begun = time.perf_counter()
        code = (
            "import flashmem; from benchmarks.worker import vm; "
            f"flashmem.compile({str(self.model)!r}, {str(self.bundle)!r}, device={self.device!r}, budget={self.budget}); "
            "print(vm('VmHWM'))"
        )
        peak = int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
        return {"seconds": time.perf_counter() - begun, "peak": peak}

    def flashmem(self, *extra: str, cold: bool = False, limit: int | None = None) -> dict[str, Any]:
        """One run of flashmem."""
        files = [Bundle.open(self.bundle).weights_path] if cold else []
        command = ["flashmem", "--bundle", str(self.bundle), "--device", self.device, *extra]
        return self._worker([*command, *(["--cold", *map(str, files)] if cold else [])], limit)

    def onnxruntime(self, *extra: str, cold: bool = False) -> dict[str, Any]:
        """One run of ONNX Runtime; with --mapped, of the model with external data."""
        model = self.mapped if "--mapped" in extra else self.model
        files = [path for path in model.parent.iterdir() if path.is_file()] if cold else []
        command = ["onnxruntime", "--model", str(model), *extra]
        return self._worker([*command, *(["--cold", *map(str, files)] if cold else [])], None)

    def _worker(self, arguments: list[str], limit: int | None) -> dict[str, Any]:
        command = [sys.executable, "-m", "benchmarks.worker", *arguments, *self.energy]
        if limit is None:
            done = subprocess.run(command, capture_output=True, text=True)
        else:
            with HardLimit(limit) as group:
                done = group.run(command)
        if done.returncode != 0:
            return {"failed": done.returncode, "why": done.stderr.strip().splitlines()[-1:] or [""]}
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return result

    def measure(self, *, limited: bool) -> dict[str, Any]:
        """All measurements of this model; `limited`: including the runs inside a hard limit."""
        compiled = self.compile()
        self.flashmem("--repeat", "2")  # fills the program cache of the streamed kernels
        self.flashmem("--strategy", "preload", "--repeat", "2")
        variants = {
            "stream, cold": lambda: self.flashmem(cold=True),
            "stream, cached": lambda: self.flashmem(),
            "preload, cached": lambda: self.flashmem("--strategy", "preload"),
            "preload, cold": lambda: self.flashmem("--strategy", "preload", cold=True),
            "ONNX Runtime, cold": lambda: self.onnxruntime(cold=True),
            "ONNX Runtime, cached": lambda: self.onnxruntime(),
            "ONNX Runtime mapped, cold": lambda: self.onnxruntime("--mapped", cold=True),
            "ONNX Runtime mapped, cached": lambda: self.onnxruntime("--mapped"),
        }
        rows: dict[str, list[dict[str, Any]]] = {key: [] for key in variants}
        disk, gemm = [], []
        for _ in range(self.runs):
            for key, variant in variants.items():
                rows[key].append(variant())
            disk.append(cold_rate(Bundle.open(self.bundle).weights_path))
            gemm.append(gemm_rate())
        macs = sum(launch.macs for launch in flashmem.Bundle.open(self.bundle).program.launches)
        weights = Bundle.open(self.bundle).weights_path.stat().st_size
        floor = max(weights / statistics.median(disk), 2 * macs / statistics.median(gemm))
        table = {key: _median(values) for key, values in rows.items()}
        table["warm"] = {
            "flashmem": self.flashmem("--repeat", "6").get("warm"),
            "ONNX Runtime": self.onnxruntime("--repeat", "6").get("warm"),
        }
        cold, cached = table["stream, cold"], table["stream, cached"]
        result = {
            "budget": self.budget,
            "bundle_bytes": sum(path.stat().st_size for path in self.bundle.iterdir()),
            "disk_bytes_per_second": statistics.median(disk),
            "openblas_flops": statistics.median(gemm),
            "cold over max(bytes / disk, MACs / GEMM)": None if "failed" in cold else cold["integrated"] / floor,
            "compile": compiled,
            "variants": table,
            "outputs": self.compare(),
        }
        if limited and "failed" not in cached:
            limit = int(cached["bare"] + self.budget + 48 * MIB)
            result["hard limit"] = {
                "bytes": limit,
                "streamed": self.flashmem(limit=limit),
                "preloaded": self.flashmem("--strategy", "preload", limit=limit),
            }
        return result

    def compare(self) -> dict[str, Any]:
        """Compare streamed with preloaded answers bit by bit, and with ONNX Runtime's; or return the failed run."""
        arrays = {}
        for key, run in (("streamed", self.flashmem), ("preloaded", self.flashmem), ("reference", self.onnxruntime)):
            path = self.folder / f"{key}.npz"
            extra = ("--strategy", "preload") if key == "preloaded" else ()
            row = run("--outputs", str(path), *extra)
            if "failed" in row:
                return {key: row}
            with np.load(path) as file:
                arrays[key] = [file[name] for name in file.files]
        pairs = list(zip(arrays["streamed"], arrays["reference"], strict=True))
        return {
            "bit_identical": all(np.array_equal(a, b) for a, b in zip(arrays["streamed"], arrays["preloaded"], strict=True)),
            "relative_error": max(float(np.abs(a - b).max() / np.ptp(b)) for a, b in pairs),
        }


def gemm_rate() -> float:
    """FLOP per second of numpy's OpenBLAS at 128 x 2048 x 2048."""
    a, b = np.ones((128, 2048), np.float32), np.ones((2048, 2048), np.float32)
    seconds = []
    for _ in range(15):
        begun = time.perf_counter()
        np.matmul(a, b)
        seconds.append(time.perf_counter() - begun)
    return 2 * 128 * 2048 * 2048 / statistics.median(seconds)


def _median(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of each number; shows a failed process instead."""
    failed = [row for row in rows if "failed" in row]
    if failed:
        return failed[0]
    return {key: statistics.median(row[key] for row in rows) for key in rows[0] if rows[0][key] is not None}


def report(name: str, result: dict[str, Any]) -> None:
    """Print the model's table."""
    print(f"\n### {name}, budget {result['budget'] / 1e6:.0f} MB\n")
    print("| run | integrated, s | above bare process, MiB | energy, J | power, W |\n|---|---|---|---|---|")
    for key, row in result["variants"].items():
        if "integrated" in row:
            joules = row.get("joules")
            energy = " | " if joules is None else f"{joules:.2f} | {joules / row['integrated']:.1f}"
            print(f"| {key} | {row['integrated']:.3f} | {row['above_bare'] / MIB:.0f} | {energy} |")
        elif key != "warm":
            print(f"| {key} | failed: {row} | | | |")
    rest = {key: value for key, value in result.items() if key != "variants"} | {"warm": result["variants"]["warm"]}
    print("\n" + json.dumps(rest, default=str))


def main() -> None:
    """Measure every model in the folder."""
    parser = Arguments(__doc__)
    parser.add_zoo()
    parser.add_device()
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--models", nargs="*", default=list(BUDGETS), choices=list(BUDGETS), metavar="NAME")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    parser.check_device(args.device)
    found = parser.models_in(args.zoo, args.models)
    print(f"flashmem {flashmem.__version__}, {os.cpu_count()} cores, device {args.device}, medians of {args.runs}")
    no_limit = why_no_limit()
    if no_limit is not None:
        print(f"no hard limit can be set ({no_limit}): its rows are left out; they need root")
    energy = True
    try:
        meter()
    except UserError as error:
        energy = False
        print(error)
    results = {}
    for name, model in found.items():
        folder = Path(tempfile.mkdtemp(prefix="flashmem-bench-"))
        try:
            results[name] = Bench(name, model, folder, args.device, args.runs, energy).measure(limited=no_limit is None)
        finally:
            shutil.rmtree(folder)
        report(name, results[name])
    if args.json:
        args.json.write_text(json.dumps(results, indent=1, default=str))


if __name__ == "__main__":
    run_command(main)
