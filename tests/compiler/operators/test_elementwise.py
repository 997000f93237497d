"""Vectorised elementwise functions, for many ranges of numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import helper

from tests.support.compared import DEVICES, Nodes, answers_of, by_runtime, compare
from tests.support.inputs import KINDS, floats

UNARY = (
    "Abs", "Acosh", "Asinh", "Atan", "Ceil", "Celu", "Cos", "Cosh", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid",
    "HardSwish", "LeakyRelu", "Log", "Mish", "Neg", "Reciprocal", "Round", "Selu", "Sigmoid", "Sign", "Sin", "Sinh",
    "Softplus", "Softsign", "Sqrt", "Tan", "Tanh",
)  # fmt: skip
BINARY = ("Add", "Div", "Max", "Min", "Mul", "Sub")


@pytest.mark.parametrize("place", DEVICES, ids="-".join)
def test_functions_of_numbers_of_every_kind(place: tuple[str, str], tmp_path: Path) -> None:
    """A kernel for each operator, a launch for each range of numbers."""
    n = Nodes(opset=22)
    exponents = [n.constant(np.float32(each)) for each in (2.5, 3.0, -0.7)]
    for kind in KINDS:
        x, y = n.input(floats(9, 17, kind=kind)), n.input(floats(9, 17, kind=kind, seed=9))
        for op in UNARY:
            n.node(op, x)
        n.node("Gelu", x, approximate="tanh")
        for op in BINARY:
            n.node(op, x, y)
        n.node("Mod", x, y, fmod=1)
        for exponent in exponents:
            n.node("Pow", x, exponent)
    inside = n.input(0.3 * floats(9, 17))
    for op in ("Acos", "Asin", "Atanh"):
        n.node(op, inside)
    compare(n, place, tmp_path)


@pytest.mark.parametrize("place", DEVICES, ids="-".join)
def test_sines_of_small_numbers_beside_huge_ones(place: tuple[str, str], tmp_path: Path) -> None:
    """PoCL's own functions are wrong there (docs/research/opencl-notes.md)."""
    angles = np.random.default_rng(0).normal(0, 0.5, (64, 16)).astype(np.float32)
    angles[:, -1] = np.resize(np.array([1e9, 1e30, -3e7, 2e6, 100.0], np.float32), 64)
    n = Nodes()
    x = n.input(angles)
    for op in ("Sin", "Cos", "Tan"):
        n.node(op, x)
    compare(n, place, tmp_path)


@pytest.mark.parametrize("place", DEVICES, ids="-".join)
def test_casts_of_floats_that_integers_cannot_hold(place: tuple[str, str], tmp_path: Path) -> None:
    """ONNX leaves them undefined. Here they are the same on every device, and in constants: as on processors of x86."""
    powers = [sign * 2.0**power for power in (7, 8, 15, 16, 31, 32, 63, 64, 100) for sign in (1, -1)]
    odd = [np.nan, np.inf, -np.inf, 2.5, -2.5, -0.5, 3e9, -3e9, 5e9, -5e9, 1e19, 1e20, -1e20, 300, -300, 70000]
    n = Nodes()
    x, fixed, types = (
        n.input(np.float32(powers + odd)),
        n.constant(np.float32(powers + odd)),
        [f"int{8 << i}" for i in range(4)],
    )
    types += [f"u{name}" for name in types]
    for dtype in types:
        for source in (x, fixed):
            n.node("Cast", source, dtypes=(dtype,), to=helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))
    model = n.proto()
    expected = dict(zip(types, by_runtime(model, n.feeds)[::2], strict=True))
    expected["uint32"] = expected["int64"].astype(np.uint32)  # ONNX Runtime's depend on the place in the vector
    answers = answers_of(model, n.feeds, place, tmp_path)
    for dtype, (at_run_time, constant) in zip(types, zip(answers[::2], answers[1::2], strict=True), strict=True):
        np.testing.assert_array_equal(at_run_time, expected[dtype], err_msg=dtype)
        np.testing.assert_array_equal(constant, expected[dtype], err_msg=dtype)


@pytest.mark.parametrize("opset", [10, 13])
def test_clip_without_a_bound_ends_at_the_largest_finite_number(opset: int, tmp_path: Path) -> None:
    """In ONNX's text and in ONNX Runtime; up to operator set 10 the bounds are attributes with that default."""
    n = Nodes(opset=opset)
    x = n.input(np.float32([-np.inf, np.inf, -3, 5, np.nan]))
    if opset < 11:
        for bounds in ({}, {"min": -1.0}, {"max": 2.0}):
            n.node("Clip", x, **bounds)
    else:
        low, high = n.input(np.float32(-1)), n.constant(np.float32(2))
        for inputs in ([], [low], ["", high]):
            n.node("Clip", x, *inputs)
    answers = answers_of(n.proto(), n.feeds, DEVICES[0], tmp_path)
    for answer, wanted in zip(answers, by_runtime(n.proto(), n.feeds), strict=True):
        np.testing.assert_array_equal(answer, wanted)
