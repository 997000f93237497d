"""Options of `compile`, resolved: device, memory path, transfer mode, limits and precision.

`compile`, `simulate`, `sweep` and `plan` use it; `runtime.request.options` resolves the options of a session. So the same words
have the same meaning everywhere, and are refused with the same message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import numpy as np

from flashmem.base.errors import UserError
from flashmem.base.types import Optimize, StatePrecision, States
from flashmem.compiler.options import Options, Precision
from flashmem.planning.limits import Limits
from flashmem.runtime.request.options import choose_mode, find_descriptor


def resolve(
    limits: Limits,
    *,
    device: str = "auto",
    memory_path: str = "auto",
    mode: str = "auto",
    precision: Precision = "fp32",
    state_precision: StatePrecision | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    optimize: Optimize = "cold",
    states: States | None = None,
    constants: Mapping[str, Any] | None = None,
) -> Options:
    """Resolve the target and the limits for which a model is compiled or planned. States are stored in `precision` by default.

    Raises:
        UserError: no such device, or it lacks the memory path or the mode; or an unknown precision or optimization.
    """
    if optimize not in get_args(Optimize):
        raise UserError(f"optimize {optimize!r} is unknown; name one of: {', '.join(get_args(Optimize))}")
    for name, given, known in (
        ("precision", precision, get_args(Precision)),
        ("state precision", state_precision or precision, get_args(StatePrecision)),
    ):
        if given not in known:
            raise UserError(f"{name} {given!r} is unknown; name one of: {', '.join(known)}")
    descriptor = find_descriptor(device, memory_path)
    pairs = dict(states) if isinstance(states, Mapping) else states
    try:
        fixed = {name: np.asarray(value).tolist() for name, value in (constants or {}).items()}
    except ValueError:
        raise UserError("a constant has rows of different lengths; give an array, or numbers in its shape") from None
    return Options(
        descriptor, choose_mode(descriptor, mode), limits, precision, dict(shapes or {}), optimize, pairs, fixed,
        state_precision or precision,
    )  # fmt: skip
