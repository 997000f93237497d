"""What a session is opened with: a bundle, or a model that the offline half compiles first.

The runtime does not import the offline half. For a model, and only then, it loads one function of it by name.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeGuard, get_args

from flashmem.base.errors import UserError
from flashmem.base.types import MemoryPath, Optimize, Precision, Quantize, StatePrecision, States, TransferMode
from flashmem.bundle.bundle import Bundle
from flashmem.bundle.language import is_language_folder
from flashmem.bundle.shape_variants import Shapes
from flashmem.schedule.plan import Strategy as PlannedStrategy
from flashmem.schedule.plan import Units

if TYPE_CHECKING:
    import onnx

_OFFLINE = "flashmem.tools.cached_model"
_MODEL_FILES = (".onnx", ".gguf")


class ModelOptions(TypedDict, total=False):
    """The options of `flashmem.compile` that a session accepts for a model, besides its own `device`, `mode`, `strategy`,
    `budget` and `host_budget`.
    """

    m_peak: int | str | None
    lambda_: float | None
    chunk: int | str | None
    precision: Precision
    state_precision: StatePrecision | None
    shapes: Shapes | Sequence[Shapes] | None
    states: States | None
    constants: Mapping[str, Any] | None
    max_length: int | None
    batch: int | None
    quantize: Quantize | None
    preload: Sequence[str]
    memory_path: MemoryPath | Literal["auto"]
    objective: str
    unfusion: bool
    mu: float
    alpha: float
    units: Units
    optimize: Optimize


def is_model(given: Any) -> TypeGuard[str | Path | bytes | onnx.ModelProto]:
    """Whether `given` has to be compiled: a model in memory, a file, a path like one, or a language model's folder."""
    if isinstance(given, str | Path):
        path = Path(given)
        return path.is_file() or is_language_folder(path) or (path.suffix in _MODEL_FILES and not path.exists())
    return isinstance(given, bytes | bytearray | memoryview) or type(given).__name__ == "ModelProto"


def bundle_for(
    given: Any,
    *,
    device: str,
    mode: TransferMode | Literal["auto"],
    strategy: str,
    budget: int | str | None,
    host_budget: int | str | None,
    build: bool,
    options: ModelOptions,
) -> Bundle:
    """The bundle that `given` is, names by its path, or is compiled to.

    A model is compiled for the session's `device`, `mode`, `strategy` and budgets, and for `options`. `build`: build its
    kernels then, in child processes.

    Raises:
        UserError: no bundle and no model; an unknown option, or one for a bundle; the compiler is not installed; or an error of
            `flashmem.compile`.
        RunError: the device's driver refuses a kernel.
    """
    _refuse_unknown(options)
    if not is_model(given):
        bundle = given if isinstance(given, Bundle) else Bundle.open(given)
        for name in options:
            raise UserError(f"{name} was fixed when {bundle.path} was compiled; compile the model anew, or leave {name} out")
        return bundle
    if importlib.util.find_spec("flashmem.compile") is None:  # flashmem-runtime
        what = given if isinstance(given, str | Path) else "a model in memory"
        raise UserError(
            f"{what} is no bundle, and the compiler is not installed here; compile it elsewhere, and copy the bundle"
        )
    planned: dict[str, Any] = {"strategy": strategy} if strategy in get_args(PlannedStrategy) else {}
    if host_budget not in (None, "auto") and strategy != "preload":
        planned["host_budget"] = host_budget
    made = importlib.import_module(_OFFLINE).cached_bundle(
        given, build=build, device=device, mode=mode, budget=budget, **planned, **options
    )
    assert isinstance(made, Bundle)
    return made


def _refuse_unknown(options: Mapping[str, Any]) -> None:
    known = list(ModelOptions.__annotations__)
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            meant = f"; did you mean {near[0]!r}?" if near else f"; for a model it also takes: {', '.join(known)}"
            raise UserError(f"a session has no option {name!r}{meant}")
