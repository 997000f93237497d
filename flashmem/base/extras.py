"""Modules that come with an extra of the package: which one, and the sentence that says so where one is missing."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

from flashmem.base.errors import UserError

EXTRAS: Mapping[str, str] = MappingProxyType(
    {
        "jinja2": "compile",
        "onnx": "compile",
        "onnx_ir": "compile",
        "onnxscript": "compile",
        "ortools": "compile",
        "xgboost": "compile",
        "matplotlib": "plots",
        "PIL": "demo",
        "cv2": "demo",
        "rapidocr": "demo",
        "diffusers": "zoo",
        "torch": "zoo",
        "transformers": "zoo",
        "onnxruntime": "bench",
    }
)
"""The extra that a module comes with; `desktop` has all of `compile`."""


def missing(what: str, module: str) -> UserError | None:
    """The error of `what`, which needs `module`; None for a module that comes with no extra."""
    extra = EXTRAS.get(module.partition(".")[0])
    if extra is None:
        return None
    named = "`compile` or `desktop`" if extra == "compile" else f"`{extra}`"
    return UserError(f"{what} needs {module}; install flashmem with its {named} extra: pip install 'flashmem[{extra}]'")


def need(what: str, *modules: str) -> None:
    """Raises UserError, before any work, if one of `modules` is not installed."""
    for module in modules:
        if importlib.util.find_spec(module) is None and (error := missing(what, module)) is not None:
            raise error


@contextmanager
def offline_half(what: str) -> Iterator[None]:
    """Around what imports modules that come with an extra; `what` needs them.

    Raises:
        UserError: such a module is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        said = missing(what, error.name or "")
        if said is None:
            raise
        raise said from error
