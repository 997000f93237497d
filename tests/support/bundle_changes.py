"""Changes to the files of a bundle: damage, and deliberate edits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def files_of(bundle: Path) -> Path:
    """The folder that the bundle's manifest names."""
    return bundle / str(json.loads((bundle / "manifest.json").read_text())["version_directory"])


def rewrite(bundle: Path, name: str, change: Callable[[Any], None]) -> None:
    """Change a JSON file of a bundle and correct every hash and checksum, as an attacker would."""
    path = bundle / name if name == "manifest.json" else files_of(bundle) / name
    data = json.loads(path.read_text())
    change(data)
    if name == "manifest.json":
        data.pop("checksum", None)
        canonical = json.dumps(data, sort_keys=True, separators=(",", ":"))
        path.write_text(json.dumps({**data, "checksum": hashlib.sha256(canonical.encode()).hexdigest()}))
        return
    path.write_text(json.dumps(data))
    fit(bundle, name)


def fit(bundle: Path, name: str) -> None:
    """Correct the manifest's entry for a small file."""
    content = (files_of(bundle) / name).read_bytes()
    entry = {"nbytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    rewrite(bundle, "manifest.json", lambda manifest: manifest["files"].update({name: entry}))
