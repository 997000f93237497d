"""What a session is opened with: a bundle, or a model that the offline half compiles first.

The runtime does not import the offline half. For a model, and only then, it loads one function of it by name.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from flashmem.base.errors import UserError
from flashmem.bundle.bundle import Bundle
from flashmem.bundle.language import is_language_folder
from flashmem.request.opening import SessionRequest

if TYPE_CHECKING:
    import onnx

_OFFLINE = "flashmem.tools.cached_model"
_MODEL_FILES = (".onnx", ".gguf")


def is_model(given: Any) -> TypeGuard[str | Path | bytes | onnx.ModelProto]:
    """Whether `given` has to be compiled: a model in memory, a file, a path like one, or a language model's folder."""
    if isinstance(given, str | Path):
        path = Path(given)
        return path.is_file() or is_language_folder(path) or (path.suffix in _MODEL_FILES and not path.exists())
    return isinstance(given, bytes | bytearray | memoryview) or type(given).__name__ == "ModelProto"


def bundle_for(given: Any, opening: SessionRequest, *, build: bool) -> Bundle:
    """The bundle that `given` is, names by its path, or is compiled to, as `opening` asks. `build`: build its kernels then, in
    child processes.

    Raises:
        UserError: no bundle and no model; an option for a bundle that was fixed when it was compiled; the compiler is not
            installed; or an error of `flashmem.compile`.
        RunError: the device's driver refuses a kernel.
    """
    if not is_model(given):
        bundle = given if isinstance(given, Bundle) else Bundle.open(given)
        for name in opening.fixed:
            raise UserError(f"{name} was fixed when {bundle.path} was compiled; compile the model anew, or leave {name} out")
        return bundle
    if importlib.util.find_spec("flashmem.compile") is None:  # flashmem-runtime
        what = given if isinstance(given, str | Path) else "a model in memory"
        raise UserError(
            f"{what} is no bundle, and the compiler is not installed here; compile it elsewhere, and copy the bundle"
        )
    made = importlib.import_module(_OFFLINE).cached_bundle(given, opening.of_bundle, build=build)
    assert isinstance(made, Bundle)
    return made
