"""What the calls of all commands have in common, and the texts of options that several of them have."""

from __future__ import annotations

import importlib.util
from typing import ClassVar, Literal

from flashmem.request.opening import SessionRequest
from flashmem.request.request import BundleRequest, CompileCall

Disk = Literal["cold", "cached"]

BUILD = str(CompileCall.options["build"].help)
BUNDLE = "A bundle."
DEVICE = str(BundleRequest.options["device"].help)
DISK = "Whether the weight file is in the page cache."
HOST_BUDGET = str(SessionRequest.options["host_budget"].help)
JSON = "Print one JSON object on stdout instead of a report."
LANGUAGE_MODEL = "A language model: a .gguf file, a folder, or a bundle."
PLANNED = "An .onnx model, a bundle, or zoo:NAME for a known architecture."
SHAPE = str(BundleRequest.options["shapes"].help)


class CommandCall:
    """A call of a command: a description of its options, and what it does. The docstring of a class is the text of its help.

    The work is in `module`, which is imported when a command runs.
    """

    module: ClassVar[str] = ""

    def run(self) -> int | None:
        """Do it; returns an exit code other than 0."""
        raise NotImplementedError

    @classmethod
    def is_here(cls) -> bool:
        """Whether the command is installed; `flashmem-runtime` has those of a phone."""
        try:
            return importlib.util.find_spec(cls.module) is not None
        except ModuleNotFoundError:  # not even its package is here
            return False
