"""RMS normalization in every form that exporters write, for many ranges of numbers: one launch each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto

from tests.support.compared import DEVICES, OF_A_GPU, Nodes, answers_of, compare
from tests.support.inputs import KINDS, floats
from tests.support.launches import families_of, launches_of

EPSILON = 1e-5


class Steps(Nodes):
    """Nodes of which only the last of each form is an output."""

    def step(self, op: str, *inputs: str, **attributes: object) -> str:
        """A node whose result other nodes read."""
        [name] = self.node(op, *inputs, **attributes)
        self.outputs.pop()
        return name

    def number(self, value: float) -> str:
        """A constant scalar."""
        return self.constant(np.array(value, np.float32))

    def mean_of_squares(self, square: str, axes: tuple[int, ...]) -> str:
        """Mean over `axes`, plus epsilon."""
        mean = self.step("ReduceMean", square, self.constant(np.array(axes)), keepdims=1)
        return self.step("Add", mean, self.number(EPSILON))


Form = Callable[[Steps, str, str], object]


def _operator(n: Steps, x: str, scale: str) -> object:
    return n.node("RMSNormalization", x, scale, epsilon=EPSILON, axis=-1)


def _reciprocal(n: Steps, x: str, scale: str) -> object:
    root = n.step("Sqrt", n.mean_of_squares(n.step("Pow", x, n.number(2.0)), (-1,)))
    return n.node("Mul", scale, n.step("Mul", x, n.step("Reciprocal", root)))


def _quotient_of_one(n: Steps, x: str, scale: str) -> object:
    root = n.step("Sqrt", n.mean_of_squares(n.step("Mul", x, x), (-1,)))
    return n.node("Mul", n.step("Mul", n.step("Div", n.number(1.0), root), x), scale)


def _quotient(n: Steps, x: str, scale: str) -> object:
    root = n.step("Sqrt", n.mean_of_squares(n.step("Pow", x, n.number(2.0)), (-1,)))
    return n.node("Mul", n.step("Div", x, root), scale)


def _sum_of_squares(n: Steps, x: str, scale: str) -> object:
    total = n.step("ReduceSumSquare", x, n.constant(np.array([-1])), keepdims=1)
    root = n.step("Sqrt", n.step("Add", n.step("Mul", total, n.number(1 / 19)), n.number(EPSILON)))
    return n.node("Mul", n.step("Mul", x, n.step("Reciprocal", root)), scale)


def _inverse_power(n: Steps, x: str, scale: str) -> object:
    moved = n.mean_of_squares(n.step("Pow", x, n.number(2.0)), (-1,))
    return n.node("Mul", n.step("Mul", x, n.step("Pow", moved, n.number(-0.5))), scale)


def _casts(n: Steps, x: str, scale: str) -> object:
    """As PyTorch exports a model in half, in which norms compute in float32."""
    x = n.step("Cast", n.step("Cast", x, to=TensorProto.FLOAT16), to=TensorProto.FLOAT)
    root = n.step("Sqrt", n.mean_of_squares(n.step("Pow", x, n.number(2.0)), (-1,)))
    y = n.step("Cast", n.step("Mul", x, n.step("Reciprocal", root)), to=TensorProto.FLOAT16)
    return n.node("Mul", n.step("Cast", y, to=TensorProto.FLOAT), scale)


def _layer_norm(n: Steps, x: str, scale: str) -> object:
    """The layer normalization of older exports: of x minus its mean."""
    x = n.step("Sub", x, n.step("ReduceMean", x, n.constant(np.array([-1])), keepdims=1))
    root = n.step("Sqrt", n.mean_of_squares(n.step("Pow", x, n.number(2.0)), (-1,)))
    return n.node("Mul", n.step("Div", x, root), scale)


FORMS: dict[str, Form] = {
    "operator": _operator, "reciprocal": _reciprocal, "1 / root": _quotient_of_one, "quotient": _quotient,
    "sum of squares": _sum_of_squares, "power": _inverse_power, "layer norm": _layer_norm,
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_one_launch(form: str, tmp_path: Path) -> None:
    n = Steps(opset=23)
    FORMS[form](n, n.input(floats(2, 5, 19)), n.constant(floats(19, seed=3)))
    assert families_of(n.proto(), tmp_path) == ["reduce_rows"]


@pytest.mark.parametrize("place", DEVICES, ids="-".join)
def test_all_forms_of_numbers_of_every_kind(place: tuple[str, str], tmp_path: Path) -> None:
    n = Steps(opset=23)
    scale = n.constant(1 + 0.1 * floats(19))
    for kind in KINDS:
        x = n.input(floats(2, 5, 19, kind=kind))
        for form in FORMS.values():
            form(n, x, scale)
        n.node("RMSNormalization", x, n.constant(floats(5, 19, seed=4)), axis=1, epsilon=0.1)
        n.node("RMSNormalization", n.step("Transpose", x, perm=[0, 2, 1]), n.constant(floats(5, seed=5)))
    compare(n, place, tmp_path, against_runtime=False)


@pytest.mark.filterwarnings("ignore:.*was compiled for nvidia")
@pytest.mark.parametrize(("device", "path", "kernels"), OF_A_GPU)
def test_rows_that_work_items_share(device: str, path: str, kernels: str, tmp_path: Path) -> None:
    n = Steps(opset=23)
    scale = n.constant(1 + 0.1 * floats(700))
    for kind in KINDS:
        _operator(n, n.input(floats(3, 700, kind=kind)), scale)
    compare(n, (device, path), tmp_path, against_runtime=False, compiled_for=kernels)


@pytest.mark.parametrize("place", DEVICES[:1], ids="-".join)
def test_squares_out_of_range_give_zero_as_onnx_defines(place: tuple[str, str], tmp_path: Path) -> None:
    """The mean square of large numbers is infinite in float32, so their inverse root is 0; that of tiny ones is epsilon."""
    n = Steps(opset=23)
    x = np.stack([floats(19), 1e25 * floats(19), 1e-30 * floats(19), np.zeros(19, np.float32)]).astype(np.float32)
    _operator(n, n.input(x), n.constant(np.ones(19, np.float32)))
    [answer] = answers_of(n.proto(), n.feeds, place, tmp_path)
    with np.errstate(over="ignore"):
        root = np.sqrt(np.mean(x * x, -1, dtype=np.float32, keepdims=True) + np.float32(EPSILON))
    assert np.isinf(root[1]).all()
    np.testing.assert_allclose(answer, x / root, rtol=1e-6, atol=0)
    assert not answer[1].any()


@pytest.mark.parametrize("place", DEVICES[:1], ids="-".join)
def test_a_norm_between_casts_to_half_rounds_like_the_casts(place: tuple[str, str], tmp_path: Path) -> None:
    n = Steps(opset=23)
    x, scale = floats(4, 19, kind="around 1e3"), 1 + floats(19)
    _casts(n, n.input(x), n.constant(scale))
    [answer] = answers_of(n.proto(), n.feeds, place, tmp_path)
    half = x.astype(np.float16).astype(np.float64)
    exact = half / np.sqrt(np.mean(half * half, -1, keepdims=True) + EPSILON)
    wanted = exact.astype(np.float16).astype(np.float64) * scale
    np.testing.assert_allclose(answer, wanted, rtol=2.0**-10)
    assert np.mean(answer == wanted.astype(np.float32)) > 0.95  # others were next to a tie
    assert families_of(n.proto(), tmp_path) == ["reduce_rows"]


def test_what_is_no_norm_stays_as_it_is(tmp_path: Path) -> None:
    """The mean over other axes, of another value, or of which another power is taken."""
    n = Steps(opset=23)
    x, y = n.input(floats(4, 6, 19)), n.input(floats(4, 6, 19, seed=8))
    roots = [
        n.step("Sqrt", n.mean_of_squares(n.step("Pow", x, n.number(2.0)), (-2,))),
        n.step("Sqrt", n.mean_of_squares(n.step("Pow", y, n.number(2.0)), (-1,))),
        n.step("Sqrt", n.mean_of_squares(n.step("Pow", x, n.number(3.0)), (-1,))),
        n.step("Sqrt", n.step("ReduceMean", n.step("Abs", x), n.constant(np.array([-1])), keepdims=1)),
    ]
    for root in roots:
        n.node("Div", x, root)
    names = [name for launch in launches_of(n.proto(), tmp_path) for name in launch.operators]
    assert all(any(op in name for name in names) for op in ("Sqrt", "Div", "ReduceMean"))
    assert sum("Div" in name for name in names) == sum("Sqrt" in name for name in names) == len(roots)
