"""Kernels, interpreted, against NumPy and float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from flashmem.interpreter.errors import OutsideError, UnknownTextError
from flashmem.interpreter.launch import Written, interpret_kernel


def run(
    body: str, *given: Any, parameters: str = "__global const float* a, __global float* y", size: int = 8, group: int = 4,
    before: str = "",
) -> Written:  # fmt: skip
    """What a kernel with this body writes to its last pointer, for whole arrays and numbers."""
    text = f"{before}\n__kernel void k({parameters}) {{ const int i = get_global_id(0), l = get_local_id(0); {body} }}"
    arguments = [
        np.ascontiguousarray(each).view(np.uint8).reshape(1, -1) if isinstance(each, np.ndarray) else each for each in given
    ]
    groups = [(each,) for each in range(size // group)]
    return interpret_kernel(text, "k").run((size,), (group,), groups, arguments, 1)[-1]


X = np.array([0.5, -1.25, 3.0, 7.5, -2.0, 0.0, 1.0e-3, 100.0], np.float32)


def outputs(dtype: Any = np.float32, count: int = 8) -> NDArray[Any]:
    return np.zeros(count, dtype)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("y[i] = a[i] * 2.0f - 1.0f;", X * np.float32(2) - np.float32(1)),
        ("y[i] = i < 3 ? a[i] : -a[i];", np.where(np.arange(8) < 3, X, -X)),
        ("float s = 0.0f; for (int k = 0; k <= i; ++k) s += a[k]; y[i] = s;", np.add.accumulate(X)),
        ("float s = 0.0f; for (int k = 0; ; ++k) { if (k > i) break; if (k == 2) continue; s += a[k]; } y[i] = s;",
         np.add.accumulate(np.where(np.arange(8) == 2, 0, X).astype(np.float32))),
        ("int k = i; while (k > 2) k -= 2; do { k += 10; } while (k < 15); y[i] = k;", [20, 11 + 10, 22, 21, 22, 21, 22, 21]),
        ("const float4 v = vload4(i / 4, a); y[i] = i % 4 == 0 ? v.s3 : i % 4 == 1 ? v.y : dot(v.xy, v.zw);",
         [7.5, -1.25, -7.875, -7.875, 100.0, 0.0, np.float32(-2.0e-3), np.float32(-2.0e-3)]),
        ("float4 v = (float4)(1.0f); v.s1 += a[i]; v.hi = (float2)(2.0f, 3.0f); y[i] = v.x + v.y + v.z * v.w;",
         X + np.float32(1) + 1 + 6),
        ("__local float t[4]; t[l] = a[i]; barrier(CLK_LOCAL_MEM_FENCE); y[i] = t[3 - l];", X.reshape(2, 4)[:, ::-1].ravel()),
        ("float t[2][3]; for (int r = 0; r < 2; ++r) for (int c = 0; c < 3; ++c) t[r][c] = 10 * r + c; y[i] = t[i % 2][i % 3];",
         [10 * (i % 2) + i % 3 for i in range(8)]),
        ("__global const float* p[2]; for (int k = 0; k < 2; ++k) p[k] = k && i > 3 ? a + 4 : a; y[i] = p[1][i % 4];", X),
        ("float x = a[i]; float* const p = &x; *p = *p + 1.0f; y[i] = twice(x);", 2 * (X + np.float32(1))),
        ("ushort bits = 0; if (i & 1) vstore_half_rte(a[i], 0, (half*)&bits); y[i] = vload_half(0, (const half*)&bits);",
         np.where(np.arange(8) % 2 == 1, X.astype(np.float16).astype(np.float32), 0)),
        ("y[i] = select(a[i], 0.0f, isnan(a[i])) + (any((int2)(-1, 0)) ? 1.0f : 0.0f);", X + 1),
        ("y[i] = as_float(as_int(a[i]) ^ 0x80000000);", -X),
        ("y[i] = convert_int_rte(a[i]) * 10 + (int)a[i];", np.rint(X).astype(int) * 10 + np.trunc(X).astype(int)),
        ("y[i] = (a[i] > 0.0f) + (a[i] > 1.0f && a[i] < 50.0f) * 2 + !(i & 1) * 4;",
         (X > 0) + ((X > 1) & (X < 50)) * 2 + (np.arange(8) % 2 == 0) * 4),
        ("y[i] = -7 / 2 + -7 % 4 + (7 >> 1) + (1 << i) + (5 & 3) + (5 | 3) + (5 ^ 3) + ~0;",
         -3 - 3 + 3 + 2.0 ** np.arange(8) + 1 + 7 + 6 - 1),
        ("if (i == 3) return; y[i] = 1.0f;", [1, 1, 1, 0, 1, 1, 1, 1]),
        ("y[i] = FIRST(a[i], i);", X),
    ],
)  # fmt: skip
def test_statements(body: str, expected: Any) -> None:
    before = "#define FIRST(x, y) (x)\nstatic inline float twice(float x) { return x + x; }"
    found = run(body, X, outputs(), before=before)
    np.testing.assert_array_equal(found.elements[0], np.asarray(expected, np.float32))
    assert found.where[0].all() or "return" in body


def test_pointers_in_an_array_while_others_have_left_the_loop() -> None:
    """The one in use is the same for all that are in the loop."""
    body = (
        "__global const float* p[3]; p[0] = a; p[1] = a + 1; p[2] = a + 2; y[i] = 0.0f;"
        "for (int k = 0; k < i % 4; ++k) y[i] += p[k][i / 4];"
    )
    found = run(body, X, outputs())
    expected = [sum(X[k + i // 4] for k in range(i % 4)) for i in range(8)]
    np.testing.assert_allclose(found.elements[0], np.asarray(expected, np.float32), rtol=1e-6)


def test_integers_wrap_and_convert_as_in_c() -> None:
    parameters = "__global const uchar* a, __global uint* y"
    given = np.arange(250, 258).astype(np.uint8)
    found = run("y[i] = (uint)a[i] * 0x9E3779B9u + (uint)(char)a[i];", given, outputs(np.uint32), parameters=parameters)
    expected = given.astype(np.uint32) * np.uint32(0x9E3779B9) + given.astype(np.int8).astype(np.uint32)
    np.testing.assert_array_equal(found.elements[0], expected)


def test_halves() -> None:
    parameters = "__global const half* a, __global half* y"
    given = (np.arange(8) / 3).astype(np.float16)
    found = run("vstore_half_rte(vload_half(i, a) * 1.1f, i, y);", given, outputs(np.float16), parameters=parameters)
    np.testing.assert_array_equal(found.elements[0], (given.astype(np.float32) * np.float32(1.1)).astype(np.float16))


def test_textures() -> None:
    parameters = "__read_only image2d_t t, __global float4* y"
    texels = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)
    text = f"__kernel void k({parameters}) {{ const int i = get_global_id(0); y[i] = read_imagef(t, (int2)(i, i / 4)); }}"
    [found] = interpret_kernel(text, "k").run(
        (8,), (4,), [(0,), (1,)], [texels, outputs(count=32).view(np.uint8).reshape(1, -1)], 1
    )
    expected = np.concatenate([texels[min(i // 4, 1), min(i, 2)] for i in range(8)])
    np.testing.assert_array_equal(found.elements[0], expected)


@pytest.mark.parametrize(
    ("body", "exact"),
    [
        ("y[i] = exp(a[i] * 0.1f);", lambda x: np.exp(x * np.float64(np.float32(0.1)))),
        ("y[i] = tanh(a[i]) / (1.0f + fabs(a[i]));", lambda x: np.tanh(x) / (1 + np.abs(x))),
        ("float s = 0.0f; for (int k = 0; k < 8; ++k) s = fma(a[k], a[i], s); y[i] = rsqrt(s * s + 1.0f);",
         lambda x: 1 / np.sqrt((x * x.sum()) ** 2 + 1)),
        ("y[i] = log(1.0f + a[i] * a[i]) - sqrt(fabs(a[i])) + pow(2.0f, a[i] * 0.1f);",
         lambda x: np.log(1 + x * x) - np.sqrt(np.abs(x)) + 2 ** (x * np.float64(np.float32(0.1)))),
        ("y[i] = sin(a[i]) * cos(a[i]);", lambda x: np.sin(x) * np.cos(x)),
    ],
)  # fmt: skip
def test_errors_bound_the_distance_from_the_exact_result(body: str, exact: Any) -> None:
    found = run(body, X, outputs())
    assert found.errors is not None
    distance = np.abs(found.elements[0].astype(np.float64) - exact(X.astype(np.float64)))
    size = np.abs(found.elements[0])
    assert (distance <= found.errors[0] + 2.0**-22 * (1 + size)).all()
    assert (found.errors[0] <= 1e-3 * (1 + size)).all()  # and say something


def test_exact_arithmetic_has_no_error() -> None:
    assert run("y[i] = a[i] + a[7 - i];", X, outputs()).errors is None


@pytest.mark.parametrize("body", ["y[i] = a[i] * a[i] + 1.0e-3f;", "y[i] = mad(a[i], a[i], a[0]);"])
def test_a_product_may_be_fused_into_a_sum(body: str) -> None:
    found = run(body, X, outputs())
    assert found.errors is not None
    fused = (X.astype(np.float64) ** 2 + (np.float64(np.float32(1e-3)) if "e-3" in body else X[0])).astype(np.float32)
    assert (np.abs(found.elements[0] - fused) <= found.errors[0]).all()


def test_rounding_to_an_integer_is_doubtful_beside_a_tie_only() -> None:
    given = np.array([1.2, 2.5, -0.5, 7.9, 3.0, 0.1, 9.5, 4.4], np.float32)
    found = run("y[i] = (as_int(a[i] / 1.0f + 12582912.0f) - 0x4b400000);", given, outputs())
    assert found.errors is not None
    doubtful = found.errors[0] > 0
    np.testing.assert_array_equal(doubtful, [False, True, True, False, False, False, True, False])
    np.testing.assert_array_equal(found.elements[0][~doubtful], np.rint(given[~doubtful]))


def test_what_follows_from_a_doubtful_condition_is_not_known() -> None:
    given = np.array([1, 2, 3, 4, 5, 6, 7, 8], np.float32)
    found = run("float x = exp(log(a[i])); if (x > 3.0f) y[i] = x; else y[i] = -x;", given, outputs(), group=1)
    assert found.errors is not None
    np.testing.assert_array_equal(np.isinf(found.errors[0]), given == 3)


def test_two_work_items_that_write_one_place() -> None:
    found = run("y[i / 2] = a[i];", X, outputs())
    assert found.errors is not None and np.isinf(found.errors[0][:4]).all()
    found = run("y[0] = a[i]; if (i == 7) y[0] = a[7];", X, outputs())  # it stays so, whoever writes last
    assert found.errors is not None and np.isinf(found.errors[0][0])


def test_copies_have_memory_of_their_own() -> None:
    given = np.stack([X, 10 * X]).view(np.uint8).reshape(2, -1)
    text = "__kernel void k(__global const float* a, __global float* y) { y[get_global_id(0)] = a[7 - get_global_id(0)]; }"
    [found] = interpret_kernel(text, "k").run((8,), (4,), [(1,)], [given, np.zeros((2, 32), np.uint8)], 2)
    np.testing.assert_array_equal(found.where, [[False] * 4 + [True] * 4] * 2)
    np.testing.assert_array_equal(found.elements[:, 4:], np.stack([X, 10 * X])[:, 3::-1])


@pytest.mark.parametrize("body", ["y[i + 1] = 1.0f;", "y[i] = a[i - 1];", "y[i] = vload4(0, a + i).x;"])
def test_memory_has_an_end(body: str) -> None:
    with pytest.raises(OutsideError):
        run(body, X, outputs())


@pytest.mark.parametrize("body", ["goto a;", "y[i] = unheard_of(a[i]);", "y[i] = b;", "y[i] = a[i] % 2.0f;", "asm("])
def test_what_is_not_known_is_refused(body: str) -> None:
    with pytest.raises(UnknownTextError):
        run(body, X, outputs())
