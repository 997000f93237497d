"""The bundle of a model: the one in the cache, or else a compiled one. A session opens a model through it.

The compiler is imported only when there is something to compile.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from flashmem.base.extras import offline_half
from flashmem.bundle.bundle import Bundle
from flashmem.compilation import read_compilation
from flashmem.request.request import BundleRequest

if TYPE_CHECKING:
    import onnx


def cached_bundle(model: str | Path | bytes | onnx.ModelProto, request: BundleRequest, *, build: bool = True) -> Bundle:
    """The bundle of `model` in the user's cache, where `flashmem run` and `flashmem.compile` keep it too.

    Args:
        model: what `flashmem.compile` accepts.
        request: the options that determine the bundle.
        build: if the model is compiled, build its kernels too, in child processes.

    Raises:
        UserError: the model or an option must change, or the compiler is not installed.
        RunError: the device's driver refuses a kernel.
    """
    if (found := read_compilation(model, request).find()) is not None:
        return found
    with offline_half("compiling"):
        from flashmem.compile import compile as compile_model
    return compile_model(model, build=build, **request.given)
