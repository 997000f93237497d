"""The first program of a phone kit: unpacks it and runs its steps. Only the standard library is needed to read this file.

python flashmem-phone-kit.pyz [--device NAME] [--minutes 10] [-o FILE] [--fresh] [--folder DIR]
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

_INSTALL = "pkg install python python-numpy"
_FOLDER = ".flashmem-phone-kit"


def main() -> None:
    """Unpack this file into --folder (default: a folder in the home folder), and run the steps."""
    words = sys.argv[1:]
    folder = Path.home() / _FOLDER
    if "--folder" in words:
        at = words.index("--folder")
        if at + 1 == len(words):
            sys.exit(_refuse("--folder needs a path"))
        folder = Path(words[at + 1])
        del words[at : at + 2]
    if sys.version_info < (3, 11):  # noqa: UP036  a phone may have any Python
        sys.exit(_refuse("this needs Python 3.11 or newer; type: pkg install python"))
    if importlib.util.find_spec("numpy") is None:
        sys.exit(_refuse(f"this needs numpy; type: {_INSTALL}"))
    archive = Path(sys.argv[0])
    try:
        library = unpack(archive, folder)
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError, ValueError, KeyError, NotImplementedError) as error:
        sys.exit(_refuse(f"{archive} cannot be unpacked into {folder} ({error}); copy it again, or name a --folder"))
    environment = {**os.environ, "PYTHONPATH": str(library)}
    command = [sys.executable, "-P", "-m", "flashmem.profiler.phone_kit.measuring", str(folder), *words]
    try:
        sys.exit(subprocess.run(command, env=environment, check=False).returncode)
    except KeyboardInterrupt:  # the steps have stopped too; the next call continues
        sys.exit(130)


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack a kit into `folder`, unless it is there; returns the folder of the package flashmem.

    Files with equal content are stored once, under `blobs/`.
    """
    with zipfile.ZipFile(archive) as file:
        about = json.loads(file.read("kit.json"))
        library = folder / "library"
        done = folder / "kit.json"
        if done.is_file() and done.read_bytes() == file.read("kit.json"):
            return library
        done.unlink(missing_ok=True)  # another kit's: it is written last
        for name, blob in about["files"].items():
            target = folder / name
            if ".." in target.parts or Path(name).is_absolute():
                raise ValueError(f"{name} is outside the kit")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read(f"blobs/{blob}"))
        done.write_bytes(file.read("kit.json"))
        return library


def _refuse(sentence: str) -> int:
    print(sentence, file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
