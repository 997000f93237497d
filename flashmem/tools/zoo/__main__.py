"""`python -m flashmem.tools.zoo NAME DIRECTORY`: export one model, with more options than `flashmem zoo export`."""

from __future__ import annotations

import argparse
from pathlib import Path

from flashmem.base.errors import UserError
from flashmem.tools.zoo.export import OPSET, export
from flashmem.tools.zoo.models import names, tiny_names


def main() -> None:
    """Parse the arguments, export the model, print the path of the file."""
    parser = argparse.ArgumentParser(prog="python -m flashmem.tools.zoo", description="Export a model with random weights.")
    parser.add_argument("name", choices=names() + tiny_names())
    parser.add_argument("directory", type=Path)
    parser.add_argument("--size", type=int, help="in what `flashmem zoo list` names (default: the model's own)")
    parser.add_argument("--exporter", choices=("dynamo", "legacy"), default="dynamo")
    parser.add_argument("--external-data", action="store_true", default=None, help="weights in a file next to the model")
    parser.add_argument("--dynamic", action="store_true", help="leave batch and sequence symbolic")
    parser.add_argument("--opset", type=int, default=OPSET)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--filename", default="model.onnx")
    parser.add_argument("--notes", action="store_true", help="add inputs.npz and export.json, as `flashmem zoo export` does")
    arguments = vars(parser.parse_args())
    try:
        print(export(arguments.pop("name"), arguments.pop("directory"), **arguments))
    except UserError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
