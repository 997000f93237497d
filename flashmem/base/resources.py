"""Files that ship with flashmem but are not Python: kernel templates, device descriptors and their trained models.

In a checkout their folders are links to `kernels/` and `devices/` at the top of the repository.
"""

from __future__ import annotations

from importlib import resources
from pathlib import PurePosixPath
from typing import Literal

Folder = Literal["kernels", "devices"]


def read_text(folder: Folder, path: str) -> str:
    """The text of `path` inside `folder`, for instance `read_text("kernels", "templates/contraction/matmul.cl.j2")`.

    Raises:
        FileNotFoundError: no such file.
    """
    file = resources.files(f"flashmem.{folder}")
    for part in PurePosixPath(path).parts:
        file = file / part  # one at a time: Python 3.11's namespace folders take no more
    return file.read_text(encoding="utf-8")


def read_bytes(folder: Folder, path: str) -> bytes:
    """The content of `path` directly inside `folder`.

    Raises:
        FileNotFoundError: no such file.
    """
    return (resources.files(f"flashmem.{folder}") / path).read_bytes()


def names(folder: Folder, suffix: str) -> tuple[str, ...]:
    """Names of the files directly inside `folder` that end in `suffix`, sorted and without it."""
    files = resources.files(f"flashmem.{folder}").iterdir()
    return tuple(sorted(file.name.removesuffix(suffix) for file in files if file.name.endswith(suffix)))
