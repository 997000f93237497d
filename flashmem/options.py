"""Options of `compile`, resolved: device, memory path, transfer mode, limits and precision.

`compile`, `simulate`, `sweep` and `plan` use it; `runtime.request.options` resolves the options of a session. So the same words
have the same meaning everywhere, and are refused with the same message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import numpy as np

from flashmem.base.errors import UserError
from flashmem.base.types import Optimize, Precision, StatePrecision, States
from flashmem.compiler.configs.listed import listed_configs
from flashmem.compiler.kernels.contraction.tensor_cores import Tf32Contraction
from flashmem.compiler.options import Options
from flashmem.planning.limits import Limits
from flashmem.runtime.request.options import choose_mode, find_descriptor
from flashmem.target.descriptor import DeviceDescriptor


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
    """Resolve the target and the limits for which a model is compiled or planned. States are stored in
    `precision` by default.

    Raises:
        UserError: no such device, or it lacks the memory path or the mode; or an unknown precision or optimization.
    """
    if optimize not in get_args(Optimize):
        raise UserError(f"optimize {optimize!r} is unknown; name one of: {', '.join(get_args(Optimize))}")
    of_states: StatePrecision = state_precision or ("fp32" if precision == "tf32" else precision)
    for name, given, known in (
        ("precision", precision, get_args(Precision)),
        ("state precision", of_states, get_args(StatePrecision)),
    ):
        if given not in known:
            raise UserError(f"{name} {given!r} is unknown; name one of: {', '.join(known)}")
    descriptor = find_descriptor(device, memory_path)
    check_precision(descriptor, precision)
    pairs = dict(states) if isinstance(states, Mapping) else states
    try:
        fixed = {name: np.asarray(value).tolist() for name, value in (constants or {}).items()}
    except ValueError:
        raise UserError("a constant has rows of different lengths; give an array, or numbers in its shape") from None
    return Options(
        descriptor, choose_mode(descriptor, mode), limits, precision, dict(shapes or {}), optimize, pairs, fixed,
        of_states,
    )  # fmt: skip


def check_precision(descriptor: DeviceDescriptor, precision: Precision) -> None:
    """Check that the device multiplies in `precision`.

    Raises:
        UserError: it has no tensor cores for TF32, or they would not be used.
    """
    if precision != "tf32":
        return
    if not any(isinstance(each, Tf32Contraction) for each in listed_configs(descriptor)):
        raise UserError(
            f"--precision tf32 is for NVIDIA's tensor cores (compute capability 8.0), which device {descriptor.name} does not "
            "have; use --precision fp32"
        )
    if descriptor.memory_paths[0] != "buffer":
        raise UserError("--precision tf32 needs weights in buffers, not in textures; use --memory-path buffer")
