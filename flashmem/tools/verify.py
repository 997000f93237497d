"""Compares the outputs of a bundle with those of ONNX Runtime for the same inputs on the original model (`--verify`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmem.base.errors import MissingFileError, UserError
from flashmem.base.types import Precision, Quantize, StatePrecision
from flashmem.program.tensors import ONNX_NAMES, State

TOLERANCE: dict[Precision | StatePrecision, float] = {"fp32": 1e-3, "tf32": 4e-3, "fp16": 1e-2, "int8": 5e-2}
"""The largest accepted error, as a fraction of the range of the reference output, by the lowest precision of what is stored.

TF32 has 10 bits of mantissa. Rounding an operand changes it by at most 2^-11, and a product by 2^-10; four times that are
allowed for all products in a row. Half has as many bits, and also rounds what is stored between products. A code of a cache in
int8 is off by up to 1/254 of the largest element of its row, eight times as much as half.
"""


@dataclass(frozen=True)
class Verification:
    """The result of a comparison. `relative_error` is the largest over the outputs of max abs error / range of the
    reference.
    """

    ok: bool
    max_abs_error: float
    relative_error: float

    def to_json(self) -> dict[str, Any]:
        """The JSON object `verify`; an error that is not a number is null."""
        return {key: value if isinstance(value, bool) or np.isfinite(value) else None for key, value in asdict(self).items()}


def check_installed() -> None:
    """Check that ONNX Runtime is installed, before a model is compiled and run for the comparison.

    Raises:
        UserError: onnxruntime is not installed.
    """
    if find_spec("onnxruntime") is None:
        raise UserError("--verify needs ONNX Runtime; install it with: pip install onnxruntime")


def reference(
    model: Path,
    inputs: Mapping[str, NDArray[Any]],
    outputs: Sequence[str],
    *,
    constants: Mapping[str, Any] = MappingProxyType({}),
    states: Sequence[State] = (),
    runs: int = 1,
    quantize: Quantize | None = None,
) -> list[NDArray[Any]]:
    """The outputs of ONNX Runtime on the CPU, those of the last of `runs` runs that begin with `states` of zeros.

    `constants`: the inputs that the bundle has fixed. `quantize`: how its weights were quantised; ONNX Runtime computes with
    what they became.

    Raises:
        MissingFileError: the model is no longer at the path recorded in the bundle.
        UserError: ONNX Runtime cannot run this model on these inputs.
    """
    if not model.is_file():
        raise MissingFileError(f"{model}: the original model is needed to verify, and is not there; name it with --model")
    if quantize is not None:
        from flashmem.compiler.frontend.quantize import quantised

        with quantised(model, quantize, as_floats=True) as made:
            return reference(made.path, inputs, outputs, constants=constants, states=states, runs=runs)
    import onnxruntime

    onnxruntime.set_default_logger_severity(4)  # the errors that it logs are raised too
    try:
        session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
        fixed = {port.name: _fix(port, constants[port.name]) for port in session.get_inputs() if port.name in constants}
        # A bundle may store a state in fewer bits than the model, and then in another shape.
        ports = {port.name: port for port in session.get_inputs()}
        kept = {state.name: _zeros(ports[state.name], state) for state in states}
        names = [*outputs, *(state.output for state in states)]
        for _ in range(runs if states else 1):
            answers: list[NDArray[Any]] = session.run(names, {**inputs, **fixed, **kept})
            kept = dict(zip(kept, answers[len(outputs) :], strict=True))
    except Exception as error:  # it has an exception class for each kind of failure
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"ONNX Runtime cannot answer with {model} ({reason}); name the bundle's original with --model"
        ) from error
    return answers[: len(outputs)]


def _zeros(port: Any, state: State) -> NDArray[Any]:
    """Zeros for an input of ONNX Runtime that is `state`; dimensions that the model leaves open are the state's."""
    shape = [size if isinstance(size, int) else own for size, own in zip(port.shape, state.shape, strict=True)]
    return np.zeros(shape, _dtype_of(port))


def _dtype_of(port: Any) -> str:
    """The numpy type of an input of ONNX Runtime."""
    name = str(port.type).removeprefix("tensor(").removesuffix(")")
    return {onnx: ours for ours, onnx in ONNX_NAMES.items()}.get(name, name)


def _fix(port: Any, value: Any) -> NDArray[Any]:
    """A constant in the type and shape of an input of ONNX Runtime."""
    array = np.asarray(value, _dtype_of(port))
    if not all(isinstance(size, int) for size in port.shape):
        return array
    return np.resize(array, port.shape)  # as many elements, or one for all


def compare(
    answers: Sequence[NDArray[Any]], references: Sequence[NDArray[Any]], precision: Precision | StatePrecision
) -> Verification:
    """Compare output by output. NaN or infinity is infinitely wrong unless the other output has the same."""
    errors = [_errors(answer, expected) for answer, expected in zip(answers, references, strict=True)]
    absolute = max((error for error, _ in errors), default=0.0)
    relative = max((error for _, error in errors), default=0.0)
    return Verification(relative <= TOLERANCE[precision], absolute, relative)


def complaint(verification: Verification, precision: Precision | StatePrecision) -> str:
    """The message for a failed verification."""
    if precision == "fp16" and not np.isfinite(verification.relative_error):
        return (
            "the answer holds infinities or NaN where ONNX Runtime's holds numbers: fp16 stores what passes 65504 as infinity; "
            "use --precision fp32"
        )
    more = "; --precision fp32 rounds less"
    rounding_less = {"fp16": more, "tf32": more, "int8": "; --state-precision fp16 rounds less"}
    advice = rounding_less.get(precision, "")
    return (
        f"the answer differs from ONNX Runtime's by {verification.relative_error:.2g} of the output's range; "
        f"{TOLERANCE[precision]:g} is allowed{advice}"
    )


def _errors(answer: NDArray[Any], expected: NDArray[Any]) -> tuple[float, float]:
    """The max abs error, and the same relative to the range of `expected` (to its magnitude if it is constant)."""
    if answer.shape != expected.shape:
        return np.inf, np.inf
    got = answer.astype(np.float64)
    want = expected.astype(np.float64)
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    if same.all():
        return 0.0, 0.0
    if not np.isfinite(got[~same]).all() or not np.isfinite(want[~same]).all():
        return np.inf, np.inf
    error = float(np.abs(got[~same] - want[~same]).max())
    finite = want[np.isfinite(want)]
    span = float(np.ptp(finite)) or float(np.abs(finite).max()) or 1.0
    return error, error / span
