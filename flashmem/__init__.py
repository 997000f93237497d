"""flashmem runs neural networks larger than memory on OpenCL devices, streaming their weights on a plan solved ahead of time.

    bundle = flashmem.compile("model.onnx", device="auto", budget="256MB")
    with flashmem.Session(bundle) as session:
        outputs = session.run(None, {"input": x})

`flashmem.Session("model.onnx", budget="256MB")` does both, and finds the bundle in the user's cache the next time.

Names are imported when they are first used, so that running a bundle never imports the offline half (`flashmem.compile`).
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flashmem.base.version import __version__

if TYPE_CHECKING:
    from flashmem.bundle.bundle import Bundle as Bundle
    from flashmem.compile import compile as compile
    from flashmem.runtime.application.manager import Manager as Manager
    from flashmem.runtime.engine.report import RunReport as RunReport
    from flashmem.runtime.generation.batch import BatchGenerator as BatchGenerator
    from flashmem.runtime.generation.generator import Generator as Generator
    from flashmem.runtime.serving.runtime import Runtime as Runtime
    from flashmem.runtime.session import Session as Session

__all__ = ["BatchGenerator", "Bundle", "Generator", "Manager", "RunReport", "Runtime", "Session", "__version__", "compile"]

_HOMES = {
    "BatchGenerator": "flashmem.runtime.generation.batch",
    "Bundle": "flashmem.bundle.bundle",
    "Generator": "flashmem.runtime.generation.generator",
    "Manager": "flashmem.runtime.application.manager",
    "RunReport": "flashmem.runtime.engine.report",
    "Runtime": "flashmem.runtime.serving.runtime",
    "Session": "flashmem.runtime.session",
    "compile": "flashmem.compile",
}


class _Package(ModuleType):
    """Keeps `flashmem.compile` the function: importing the module of that name would put itself there."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "compile" and isinstance(value, ModuleType):
            value = value.compile
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        from flashmem.base.extras import missing

        said = missing(f"flashmem.{name}", error.name or "")
        if said is None:
            raise
        raise ModuleNotFoundError(str(said), name=error.name) from error
