"""Times the opening of sessions: fresh processes open bundles that differ only in kernels, or only in layers."""

from __future__ import annotations

import statistics
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from flashmem.base.child_processes import module_environment, python_module
from flashmem.base.errors import RunError
from flashmem.base.types import TransferMode

from .target import Supply

_ROUNDS = 5


@dataclass(frozen=True)
class OpeningCost:
    """Seconds to open a session: fixed, for each kernel from the program cache, and for each layer. `run`: of a warm run of one
    small layer.
    """

    session: float
    kernel: float
    layer: float
    run: float


def measure_opening(supply: Supply, device: str, mode: TransferMode) -> OpeningCost:
    """Medians over fresh processes in alternation. The cache is filled first; the time of a warm run is subtracted.

    Raises:
        RunError: a process fails.
    """
    with tempfile.TemporaryDirectory(prefix="flashmem-sessions-") as name:
        inside = Path(name)
        made = supply.openings(inside, mode)
        for path in made.bundles.values():
            _open(path, device, inside)
        times = [{key: _open(path, device, inside) for key, path in made.bundles.items()} for _ in range(_ROUNDS)]
    one, kernels, layers = (statistics.median(row[key][0] for row in times) for key in ("one", "kernels", "layers"))
    run = statistics.median(row["one"][1] for row in times)
    layer = max(1e-6, (layers - one) / (made.layers - 1))
    kernel = max(1e-6, (kernels - one) / (made.kernels - 1) - layer)
    return OpeningCost(max(1e-4, one - kernel - layer), kernel, layer, run)


def _open(bundle: Path, device: str, cache: Path) -> tuple[float, float]:
    """Seconds to open a session and run once, minus a warm run, in a fresh process with a loaded driver; and of a warm run.

    Raises:
        RunError: the process fails; with the last line of its output.
    """
    command = python_module("flashmem.profiler.opening", str(bundle), device)
    environment = {**module_environment(), "FLASHMEM_CACHE_DIR": str(cache)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        reason = _last_line(done.stderr) or f"exit code {done.returncode}"
        raise RunError(f"a fresh process could not open a session to time it: {reason}")
    answer = _last_line(done.stdout)  # a driver may print lines before it
    try:
        opening, run = map(float, answer.split())
        return opening, run
    except ValueError as error:
        raise RunError(f"a fresh process was to print the seconds that a session took to open, not {answer!r}") from error


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
