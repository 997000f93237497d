"""Rotary positions in every form that exporters and ONNX Runtime write: one launch each, right, and the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import flashmem
from tests.compiler.operators.test_rms_norm import Steps
from tests.support.compared import DEVICES, answers_of, apart, by_runtime, compare
from tests.support.inputs import KINDS, floats
from tests.support.launches import families_of
from tests.support.rounding import Answer

Array = np.ndarray[Any, Any]

PLACES_OF_WORDS = 7
"""Words of a sentence in most cases."""


def angles(*shape: int, seed: int = 1) -> tuple[Array, Array]:
    """Cosines and sines of angles of `shape`."""
    turned = np.random.default_rng(seed).uniform(-40, 40, shape)
    return np.cos(turned).astype(np.float32), np.sin(turned).astype(np.float32)


def rotated(x: Array, cos: Array, sin: Array, *, interleaved: bool) -> tuple[Array, Array]:
    """The exact result for tables of one number a pair, and the sum of the absolute values of its products."""
    x, cos, sin = (each.astype(np.float64) for each in (x, cos, sin))
    size = 2 * cos.shape[-1]
    answer, spread = x.copy(), np.zeros_like(x)
    at = np.arange(size).reshape(-1, 2).T if interleaved else np.arange(size).reshape(2, -1)
    one, two = x[..., at[0]], x[..., at[1]]
    answer[..., at[0]], answer[..., at[1]] = one * cos - two * sin, two * cos + one * sin
    for places, products in zip(at, ((one * cos, two * sin), (two * cos, one * sin)), strict=True):
        spread[..., places] = sum(map(np.abs, products)) * 2.0**-24
    return answer, spread


# -- the forms of exporters: x is [2, 3, 7, size], tables [1, 1, 7, ...]


def _part(n: Steps, x: str, start: int, end: int, step: int = 1, axis: int = -1) -> str:
    return n.step("Slice", x, *(n.constant(np.array([i])) for i in (start, end, axis, step)))


def _shape(n: Steps, x: str, *shape: int) -> str:
    return n.step("Reshape", x, n.constant(np.array(shape)))


def _halves(n: Steps, x: str, cos: str, sin: str, half: int) -> str:
    """x * cos + rotate_half(x) * sin, as in Llama."""
    turned = n.step("Concat", n.step("Neg", _part(n, x, half, 2 * half)), _part(n, x, 0, half), axis=-1)
    return n.step("Add", n.step("Mul", x, cos), n.step("Mul", turned, sin))


def _pairs(n: Steps, x: str, cos: str, sin: str, half: int) -> str:
    """x * cos + rotate_every_two(x) * sin, as in GPT-J: a stack of every second element."""
    parts = [n.step("Neg", _part(n, x, 1, 2 * half, 2)), _part(n, x, 0, 2 * half, 2)]
    stacked = n.step("Concat", *(_shape(n, part, 2, 3, PLACES_OF_WORDS, half, 1) for part in parts), axis=-1)
    return n.step("Add", n.step("Mul", x, cos), n.step("Mul", _shape(n, stacked, 2, 3, PLACES_OF_WORDS, 2 * half), sin))


def _complex(n: Steps, x: str, cos: str, sin: str, half: int) -> str:
    """Products of complex numbers, as in Llama's first code: tables of one number a pair."""
    pairs = _shape(n, x, 2, 3, PLACES_OF_WORDS, half, 2)
    real, imaginary = (_part(n, pairs, i, i + 1) for i in (0, 1))
    cos, sin = (_shape(n, table, 1, 1, PLACES_OF_WORDS, half, 1) for table in (cos, sin))
    one = n.step("Sub", n.step("Mul", real, cos), n.step("Mul", imaginary, sin))
    two = n.step("Add", n.step("Mul", real, sin), n.step("Mul", imaginary, cos))
    return _shape(n, n.step("Concat", one, two, axis=-1), 2, 3, PLACES_OF_WORDS, 2 * half)


Form = Callable[[Steps, str, str, str, int], str]

FORMS: dict[str, tuple[Form, bool, str]] = {
    "halves": (_halves, False, "halves"), "pairs": (_pairs, True, "pairs"), "complex": (_complex, True, "one"),
}  # fmt: skip
"""The form, whether pairs are neighbours, and how a table repeats its numbers."""

_REPEATED: dict[str, Callable[[Array], Array]] = {
    "halves": lambda table: np.concatenate([table, table], -1),
    "pairs": lambda table: np.repeat(table, 2, -1),
    "one": lambda table: table,
}


def form_of(name: str, x: Array, size: int, *, constant: bool = True) -> tuple[Steps, Array, Array]:
    """A model of the form `name`, in which the first `size` elements of each row of `x` rotate; the exact answer."""
    form, interleaved, repeats = FORMS[name]
    cos, sin = angles(1, 1, PLACES_OF_WORDS, size // 2)
    n = Steps(opset=18)
    tables = [(n.constant if constant else n.input)(_REPEATED[repeats](table)) for table in (cos, sin)]
    source = n.input(x)
    value = form(n, source if size == x.shape[-1] else _part(n, source, 0, size), *tables, size // 2)
    if size < x.shape[-1]:
        value = n.step("Concat", value, _part(n, source, size, x.shape[-1]), axis=-1)
    n.node("Identity", value)
    return n, *rotated(x, cos, sin, interleaved=interleaved)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [24, 16])
def test_each_form_is_one_launch(form: str, size: int, tmp_path: Path) -> None:
    n, *_ = form_of(form, floats(2, 3, PLACES_OF_WORDS, 24), size)
    assert families_of(n.proto(), tmp_path) == ["rotary"]


@pytest.mark.parametrize("place", DEVICES, ids="-".join)
@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_numbers_of_every_kind(form: str, place: tuple[str, str], tmp_path: Path) -> None:
    for index, kind in enumerate(KINDS):
        size = 24 if index % 2 else 16
        x = floats(2, 3, PLACES_OF_WORDS, 24, kind=kind)
        n, exact, spread = form_of(form, x, size, constant=index % 3 > 0)
        [answer] = answers_of(n.proto(), n.feeds, place, tmp_path)
        wrong = apart(answer, Answer(exact, (exact - spread, exact + spread)))
        assert not wrong.any(), kind


@pytest.mark.parametrize("place", DEVICES[:1], ids="-".join)
@pytest.mark.parametrize("size", [2, 6, 34, 128])
def test_rows_of_many_sizes(size: int, place: tuple[str, str], tmp_path: Path) -> None:
    for form in FORMS:
        x = floats(2, 3, PLACES_OF_WORDS, size)
        n, exact, spread = form_of(form, x, size)
        [answer] = answers_of(n.proto(), n.feeds, place, tmp_path)
        assert not apart(answer, Answer(exact, (exact - spread, exact + spread))).any(), form


# -- operators


def operator(
    domain: str, *, interleaved: int, size: int, flat: bool, width: int = 12
) -> tuple[onnx.ModelProto, dict[str, Any]]:
    """A model of one RotaryEmbedding of ONNX (opset 23) or of ONNX Runtime."""
    batch, heads, words, width = 2, 3, 5, 12
    shape = (batch, words, heads * width) if flat else (batch, heads, words, width)
    x, positions = floats(*shape, kind="around 1e3"), np.random.default_rng(3).integers(0, 40, (batch, words))
    cos, sin = angles(40, size // 2)
    given = {"interleaved": interleaved} | ({"rotary_embedding_dim": size} if size < width else {})
    if flat or (size < width and domain):
        given["num_heads"] = heads
    names = ["x", "positions", "cos", "sin"] if domain else ["x", "cos", "sin", "positions"]
    node = helper.make_node("RotaryEmbedding", names, ["y"], domain=domain, **given)
    float32, int64 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64
    graph = helper.make_graph(
        [node], "rotary",
        [helper.make_tensor_value_info("x", float32, shape), helper.make_tensor_value_info("positions", int64, (batch, words))],
        [helper.make_tensor_value_info("y", float32, shape)],
        [numpy_helper.from_array(cos, "cos"), numpy_helper.from_array(sin, "sin")],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 23), *([helper.make_opsetid(domain, 1)] if domain else [])]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10), {"x": x, "positions": positions}


CASES = [
    {"domain": domain, "interleaved": interleaved, "size": size, "flat": flat}
    for domain in ("", "com.microsoft")
    for interleaved in (0, 1)
    for size in (12, 8)
    for flat in (False, True)
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_operators_are_one_launch_and_right(case: dict[str, Any], tmp_path: Path) -> None:
    """In addition to the launches that gather rows of both tables."""
    model, feeds = operator(**case)
    assert families_of(model, tmp_path) == ["gather", "gather", "rotary"]
    [answer] = answers_of(model, feeds, DEVICES[0], tmp_path)
    [other] = by_runtime(model, feeds)
    np.testing.assert_allclose(answer, other, rtol=0, atol=4e-4)  # two roundings of products up to 1000


# -- what the matcher may not take


def test_other_sums_of_products_are_no_rotary_positions(tmp_path: Path) -> None:
    """Other signs, columns or tables than those of a rotation."""
    cos, sin = angles(1, 1, PLACES_OF_WORDS, 16)
    x = floats(2, 3, PLACES_OF_WORDS, 16)

    def model(change: Callable[[Steps, str, str, str], str]) -> Steps:
        n = Steps(opset=18)
        n.node("Identity", change(n, n.input(x), n.constant(cos), n.constant(sin)))
        return n

    def backwards(n: Steps, x: str, cos: str, sin: str) -> str:
        turned = n.step("Concat", _part(n, x, 8, 16), n.step("Neg", _part(n, x, 0, 8)), axis=-1)
        return n.step("Add", n.step("Mul", x, cos), n.step("Mul", turned, sin))

    def uneven(n: Steps, x: str, cos: str, sin: str) -> str:
        turned = n.step("Concat", n.step("Neg", _part(n, x, 6, 16)), _part(n, x, 0, 6), axis=-1)
        return n.step("Add", n.step("Mul", x, cos), n.step("Mul", turned, sin))

    def of_words(n: Steps, x: str, cos: str, sin: str) -> str:
        turned = n.step("Concat", n.step("Neg", _part(n, x, 3, 7, axis=2)), _part(n, x, 0, 3, axis=2), axis=2)
        return n.step("Add", n.step("Mul", x, cos), n.step("Mul", turned, sin))

    for change in (backwards, uneven, of_words):
        n = model(change)
        assert "rotary" not in families_of(n.proto(), tmp_path), change.__name__
        compare(n, DEVICES[0], tmp_path)


# -- precision and transfer modes


@pytest.mark.parametrize("form", FORMS)
def test_activations_in_half(form: str, tmp_path: Path) -> None:
    """Stored halves on both sides; the tables stay float32, also those computed at run time."""
    x = floats(2, 3, PLACES_OF_WORDS, 64)
    interleaved, repeats = FORMS[form][1:]
    cos, sin = angles(1, 1, PLACES_OF_WORDS, 32)
    n = Steps(opset=18)
    tables = [n.step("Tanh", n.input(_REPEATED[repeats](table))) for table in (cos, sin)]
    value = FORMS[form][0](n, n.step("Tanh", n.input(x)), *tables, 32)
    n.node("Softmax", value)
    onnx.save(n.proto(), tmp_path / "m.onnx")
    bundle = flashmem.compile(tmp_path / "m.onnx", tmp_path / "b.flashmem", precision="fp16")
    with flashmem.Session(bundle) as session:
        [answer] = session.run(None, n.feeds)
    known, *_ = rotated(np.tanh(x).astype(np.float16), np.tanh(cos), np.tanh(sin), interleaved=interleaved)
    exact = np.exp(known.astype(np.float16).astype(np.float64))
    np.testing.assert_allclose(answer, exact / exact.sum(-1, keepdims=True), rtol=3e-3)
