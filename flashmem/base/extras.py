"""Optional dependencies: which extra of the package installs a module, and the error for a missing one."""

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
        "bokeh": "plots",
        "matplotlib": "plots",
        "PIL": "inputs",
        "scipy": "inputs",
        "tokenizers": "inputs",
        "cv2": "demo",
        "rapidocr": "demo",
        "gguf": "gguf",
        "onnxruntime": "bench",
        "starlette": "serve",
        "uvicorn": "serve",
    }
)
"""The extra that installs a module. The extra `desktop` includes all of `compile`."""


def missing(what: str, module: str) -> UserError | None:
    """The error message for `what`, which needs the missing `module`; None if no extra installs that module."""
    extra = EXTRAS.get(module.partition(".")[0])
    if extra is None:
        return None
    named = "`compile` or `desktop`" if extra == "compile" else f"`{extra}`"
    return UserError(f"{what} needs {module}; install flashmem with its {named} extra: pip install 'flashmem[{extra}]'")


def need(what: str, *modules: str) -> None:
    """Raise UserError, before any work begins, if one of `modules` is not installed. `what` is the feature that needs them."""
    for module in modules:
        if importlib.util.find_spec(module) is None and (error := missing(what, module)) is not None:
            raise error


@contextmanager
def offline_half(what: str) -> Iterator[None]:
    """Turn a failed import in the body into a UserError that names the extra to install. `what` is the feature that imports.

    Raises:
        UserError: a module of an extra is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        said = missing(what, error.name or "")
        if said is None:
            raise
        raise said from error
