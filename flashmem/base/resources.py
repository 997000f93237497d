"""Data files of the package: kernel templates, device descriptors and their trained models.

In a checkout their folders are links to `kernels/` and `devices/` at the top of the repository.
"""

from __future__ import annotations

from functools import cache
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
        file = file / part  # one part at a time: namespace folders of Python 3.11 accept no more
    return file.read_text(encoding="utf-8")


def read_bytes(folder: Folder, path: str) -> bytes:
    """The content of `path` directly inside `folder`.

    Raises:
        FileNotFoundError: no such file.
    """
    return (resources.files(f"flashmem.{folder}") / path).read_bytes()


@cache  # a descriptor is looked up many times while a model is compiled
def names(folder: Folder, suffix: str) -> tuple[str, ...]:
    """Names of the files directly inside `folder` with the suffix `suffix`, sorted, without the suffix."""
    files = resources.files(f"flashmem.{folder}").iterdir()
    return tuple(sorted(file.name.removesuffix(suffix) for file in files if file.name.endswith(suffix)))
