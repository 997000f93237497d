"""Export one model with PyTorch: `python -m benchmarks.exports NAME DIRECTORY [--notes]`. `--help` has the names."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.exports.export import OPSET, export
from benchmarks.exports.models import names, tiny_names
from flashmem.base.errors import UserError


def main() -> None:
    """Parse the arguments, export the model, print the path of the file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exports", description="Export a model with random weights.")
    parser.add_argument("name", choices=names() + tiny_names())
    parser.add_argument("directory", type=Path)
    parser.add_argument("--size", type=int, help="pixels, tokens or frames (default: the model's own)")
    parser.add_argument("--exporter", choices=("dynamo", "legacy"), default="dynamo")
    parser.add_argument("--external-data", action="store_true", default=None, help="weights in a file next to the model")
    parser.add_argument("--dynamic", action="store_true", help="leave batch and sequence symbolic")
    parser.add_argument("--opset", type=int, default=OPSET)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--filename", default="model.onnx")
    parser.add_argument("--notes", action="store_true", help="add inputs.npz, an example of every input, and export.json")
    arguments = vars(parser.parse_args())
    try:
        print(export(arguments.pop("name"), arguments.pop("directory"), **arguments))
    except UserError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
