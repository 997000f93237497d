"""Make inputs in a process of its own: python -m flashmem.tools.inputs OUTPUT.npz < REQUEST.json; prints one JSON object.

So a process that runs a model never loads decoders, tokenizers or ONNX, and its reported memory is that of the run.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from flashmem.base.streams import exit_codes, prepare_streams
from flashmem.runtime.engine.inputs import write_npz
from flashmem.tools.inputs.prepare import Given, prepare


def main() -> None:
    """Read a request, write the arrays, print what was made."""
    request = json.load(sys.stdin)
    paths = {name: value and Path(value) for name, value in request["paths"].items()}
    given = Given(**paths, text=request["text"], rate=request["rate"], image_flags=request["image_flags"])
    made = prepare(Path(request["model"]), given, request["shapes"])
    write_npz(Path(sys.argv[1]), made.arrays.items())
    said = {"sentences": made.sentences, "others": made.others, "labels": asdict(made.labels), "shapes": made.shapes}
    print(json.dumps(said))


if __name__ == "__main__":
    prepare_streams()
    with exit_codes():
        main()
