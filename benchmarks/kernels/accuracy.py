"""How far answers are from float64: each precision and quantisation, on models of the zoo.

    python -m benchmarks.kernels.accuracy [--device pocl] [--models resnet50 vit-b16 ...] [--ways fp32 tf32 ...] [--json FILE]

PyTorch evaluates each model in float64, with the float32 weights and inputs of its export (`benchmarks.exports`, seed 0).
Flashmem runs the export on the device in float32, with `--precision tf32` if the device has it, with `--precision fp16`, and
with `--quantize int8` and `int4`; ONNX Runtime runs it in float32. An error is the largest difference from float64 over all
elements, as a fraction of the range of an output in float64. The largest of all outputs is shown. With random weights the
errors of quantised models say what rounding does to them, and nothing of the quality of answers. Needs the extras `zoo`,
`bench` and `desktop`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

import flashmem
from benchmarks.command import Arguments, run_command
from benchmarks.exports.export import export, seeded_network
from flashmem.base.errors import UserError
from flashmem.base.files import written_whole
from flashmem.base.types import Precision
from flashmem.options import check_precision
from flashmem.runtime.request.options import find_descriptor

MODELS: Mapping[str, int | None] = {
    "resnet50": None, "vit-b16": None, "vit-103m": None, "deepvit-204m": None, "gptneo-125m": None, "sam2-tiny": None,
    "sam2-decoder": None, "depthanything-s": None, "depthanything-l": 252, "whisper-medium-encoder": None,
    "whisper-medium-text": None, "sd15-unet": 32,
}  # fmt: skip
"""By name, the size; None: the model's own."""

WAYS: Mapping[str, dict[str, Any]] = {
    "fp32": {},
    "tf32": {"precision": "tf32"},
    "fp16": {"precision": "fp16"},
    "int8": {"quantize": "int8"},
    "int4": {"quantize": "int4"},
}
"""Arguments of `flashmem.compile`, by column."""

Array = NDArray[Any]


def exact(name: str, size: int | None) -> tuple[dict[str, Array], list[Array]]:
    """Inputs, and outputs in float64."""
    import torch

    network, inputs = seeded_network(name, size=size)
    network = network.double()
    with torch.no_grad():
        answers = network(*(each.double() if each.is_floating_point() else each for each in inputs.values()))
    return {key: each.numpy() for key, each in inputs.items()}, [each.numpy() for each in answers]


def error(answers: Sequence[Array], right: Sequence[Array]) -> float:
    """The largest error, over the range of its output, or over the value of an output of one element."""
    pairs = zip(answers, right, strict=True)
    return max(float(np.abs(one - other).max() / (np.ptp(other) or np.abs(other).max())) for one, other in pairs)


def measure(name: str, size: int | None, device: str, ways: Mapping[str, dict[str, Any]]) -> dict[str, float]:
    """The error of each way."""
    import onnxruntime

    inputs, right = exact(name, size)
    with TemporaryDirectory(prefix="flashmem-") as folder:
        model = export(name, folder, size=size)
        peer = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
        found = {"ONNX Runtime": error(peer.run(None, inputs), right)}
        del peer
        for way, options in ways.items():
            bundle = flashmem.compile(model, Path(folder) / f"{way}.flashmem", device=device, **options)
            with flashmem.Session(bundle, device=device) as session:
                found[way] = error(session.run(None, inputs), right)
    return found


def _offered(device: str, precision: Precision) -> bool:
    """Whether the device multiplies in `precision`."""
    try:
        check_precision(find_descriptor(device), precision)
    except UserError:
        return False
    return True


def main() -> None:
    """Parse the command line, measure, and print a table."""
    parser = Arguments(__doc__)
    parser.add_device("pocl")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS), metavar="NAME")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS), help="those that the device has are run")
    parser.add_argument("--json", type=Path, help="where the numbers are kept as they come")
    args = parser.parse_args()
    parser.check_device(args.device)
    ways = {way: WAYS[way] for way in args.ways if _offered(args.device, WAYS[way].get("precision", "fp32"))}
    columns = ["ONNX Runtime", *ways]
    print(f"| {args.device} | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}", flush=True)
    every = {}
    for name in args.models:
        every[name] = measure(name, MODELS[name], args.device, ways)
        print(f"| {name} | {' | '.join(f'{every[name][each]:.1e}' for each in columns)} |", flush=True)
        if args.json is not None:
            with written_whole(args.json) as file:
                file.write(json.dumps(every, indent=1).encode())


if __name__ == "__main__":
    run_command(main)
