"""What kind of file is it? Magika (Google, Apache-2.0) recognises 214 kinds by the first and the last bytes.

python -m examples.file_type FILE...
"""

from __future__ import annotations

import json

import numpy as np
from numpy.typing import NDArray

from examples.trained import Run, Trained, command, find, runner
from flashmem.base.streams import exit_codes

NETWORK = Trained("magika", "models/standard_v3_3/model.onnx", {"bytes": (1, 2048)}, "12MB")

_HALF = 1024  # bytes from either end
_BLOCK = 4096  # where they are looked for once white space is gone
_NOTHING = 256  # for places without a byte of the file


def prepare(data: bytes) -> NDArray[np.int32]:
    """The input of the network: the first and the last bytes of a file, without white space around them."""
    first, last = data[:_BLOCK].lstrip()[:_HALF], data[-_BLOCK:].rstrip()[-_HALF:]
    tokens = np.full((1, 2 * _HALF), _NOTHING, np.int32)
    tokens[0, : len(first)] = list(first)
    tokens[0, tokens.size - len(last) :] = list(last)
    return tokens


def labels() -> list[str]:
    """The kinds of file, in the order of the network's output."""
    config = json.loads(find("magika", "models/standard_v3_3/config.min.json").read_text(encoding="utf-8"))
    return list(config["target_labels_space"])


def file_type(data: bytes, run: Run) -> tuple[str, float]:
    """The most likely kind of a file with these bytes, and its probability."""
    (scores,) = run({"bytes": prepare(data)})
    best = int(scores[0].argmax())
    return labels()[best], float(scores[0, best])


if __name__ == "__main__":
    with exit_codes():
        files = command(__doc__, files="FILE").parse_args().files
        with NETWORK.open() as session:
            for name in files:
                kind, sure = file_type(name.read_bytes(), runner(session))
                print(f"{name}: {kind} ({sure:.0%})")
