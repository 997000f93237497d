"""Later runs with all weights resident, compared with ONNX Runtime in the same process.

    python -m benchmarks.kernels.resident --zoo DIR --device pocl [--models resnet50] [--rounds 4] [--threads 2]

DIR contains models that `benchmarks.exports` or benchmarks/kernels/small.py wrote, each with its inputs.npz.
Flashmem's bundle is compiled with `--optimize steady` and preloaded. The two engines alternate in turns of six runs. The
processor rests for a moment after each turn, and the first run of a turn is not counted. Prints medians, least times, ratios,
and the largest difference of the answers over the range of ONNX Runtime's. Needs the `bench` extra.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np

import flashmem
from benchmarks.command import Arguments, run_command
from flashmem.tools.verify import compare

MODELS = ("gptneo-125m", "vit-b16", "resnet50")
TURN = 6


def turn(run: Callable[[], object]) -> list[float]:
    """Milliseconds of the runs of a turn, without its first."""
    time.sleep(0.3)
    taken = []
    for _ in range(TURN):
        begun = time.perf_counter()
        run()
        taken.append(1e3 * (time.perf_counter() - begun))
    return taken[1:]


def measure(name: str, model: Path, device: str, rounds: int, threads: int) -> str:
    """A row of the table."""
    import onnxruntime

    inputs = dict(np.load(model.parent / "inputs.npz"))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    with TemporaryDirectory() as folder:
        bundle = flashmem.compile(model, Path(folder) / "model.flashmem", device=device, optimize="steady")
        with flashmem.Session(bundle, device=device, strategy="preload") as session:
            peer = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
            error = compare(session.run(None, inputs), peer.run(None, inputs), "fp32").relative_error
            session.prepared()  # the kernels of later runs
            ours, theirs = [], []
            for _ in range(rounds):
                ours += turn(lambda: session.run(None, inputs))
                theirs += turn(lambda: peer.run(None, inputs))
    both = " | ".join(f"{median(taken):.3g}, {min(taken):.3g}" for taken in (ours, theirs))
    return f"| {name} | {both} | {median(ours) / median(theirs):.2f} | {error:.1e} |"


def main() -> None:
    """Print the table; each row when its model is measured."""
    parser = Arguments(__doc__)
    parser.add_zoo()
    parser.add_device()
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=4, help=f"turns of {TURN} runs")
    parser.add_argument("--threads", type=int, default=2, help="of ONNX Runtime")
    args = parser.parse_args()
    parser.check_device(args.device)
    print("| model | ours: median, least ms | ONNX Runtime | ratio | error |\n|---|---|---|---|---|")
    for name, model in parser.models_in(args.zoo, args.models).items():
        print(measure(name, model, args.device, args.rounds, args.threads), flush=True)


if __name__ == "__main__":
    run_command(main)
