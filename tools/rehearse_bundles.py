"""The part of the rehearsal that runs where flashmem-runtime, numpy and pyopencl are all there is (`tools/rehearse-arm64`).

    python3 rehearse_bundles.py BUNDLES ANSWERS

Plays each bundle of a folder twice in every transfer mode, on the inputs that lie beside it (NAME.npz). Writes the answers to
ANSWERS/NAME-MODE.npz, and prints one line of JSON for each mode.
"""

from __future__ import annotations

import json
import mmap
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np

import flashmem
from flashmem.base.errors import RunError, UserError
from flashmem.base.types import TransferMode
from flashmem.schedule.modes import MODES


def play(bundle: Path, mode: TransferMode, answers: Path) -> dict[str, Any]:
    """What happened: refused with a sentence, failed with one, or ran, and whether the second run had the bits of the first."""
    with np.load(bundle.with_suffix(".npz")) as file:
        inputs = dict(file)
    try:
        with flashmem.Session(bundle, device="pocl", mode=mode) as session:
            first, second = (session.run(None, inputs) for _ in range(2))
    except UserError as error:
        return {"refused": str(error)}
    except RunError as error:
        return {"failed": str(error)}
    np.savez(answers / f"{bundle.stem}-{mode}.npz", *first)
    same = all(a.tobytes() == b.tobytes() for a, b in zip(first, second, strict=True))
    return {"same": same}


def main() -> None:
    """Plays every bundle in every mode."""
    bundles, answers = map(Path, sys.argv[1:])
    answers.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore", flashmem.base.errors.FlashmemWarning)  # that a bundle was compiled for another device
    for bundle in sorted(bundles.glob("*.flashmem")):
        for mode in MODES:
            said = {"bundle": bundle.stem, "mode": mode, "page": mmap.PAGESIZE, **play(bundle, mode, answers)}
            print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
