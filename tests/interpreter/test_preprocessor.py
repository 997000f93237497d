from __future__ import annotations

import pytest

from flashmem.interpreter.errors import UnknownTextError
from flashmem.interpreter.preprocessor import preprocess


def words(text: str, **defined: str) -> str:
    return " ".join(preprocess(text, defined))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a /* b */ c // d\ne", "a c e"),
        ("#define N 3 + 1\nN * N", "3 + 1 * 3 + 1"),
        ("#define SQUARE(x) ((x) * (x))\nSQUARE(a + 1)", "( ( a + 1 ) * ( a + 1 ) )"),
        ("#define AS(x, T) as_##T(x)\nAS(v, float4)", "as_float4 ( v )"),
        ("#define F(x) x\n#define G(x) F(x) + G\nG(1)", "1 + G"),
        ("#define PICK(each) each##0\n#define MOVE(m) PICK(lane_##m)\nMOVE(src)", "lane_src0"),
        ("#define A B\n#define B A\nA", "A"),
        ("#define TWO(x, y) x y\nTWO((a, b), c)", "( a , b ) c"),
        ("#define F(x) x\nF", "F"),
        ("#define F() 1\nF()", "1"),
        ("#define LONG a \\\n b\nLONG", "a b"),
        ("#define N 1\n#undef N\nN", "N"),
        ("x\n#pragma OPENCL FP_CONTRACT OFF\ny", "x y"),
        ("#define F(x) (x)\nF(\n1)", "( 1 )"),
    ],
)
def test_macros(text: str, expected: str) -> None:
    assert words(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("#ifdef A\nyes\n#else\nno\n#endif", "yes"),
        ("#ifndef A\nyes\n#else\nno\n#endif", "no"),
        ("#if __OPENCL_C_VERSION__ < 300\nold\n#elif defined(A)\nnew\n#endif", "old"),
        ("#if VERSION >= 300 && defined A\nnew\n#else\nold\n#endif", "new"),
        ("#ifdef B\n#ifdef A\nboth\n#else\nsecond\n#endif\n#else\nnone\n#endif", "none"),
        ("#if !(1 + 2 == 3)\nno\n#elif 7 / 2 == 3 && -7 % 4 == -3\nyes\n#endif", "yes"),
    ],
)
def test_conditions(text: str, expected: str) -> None:
    assert words(text, A="1", VERSION="300") == expected


@pytest.mark.parametrize(
    "text", ["#include <a>", "#if f(1)\n#endif", "@", "#define F(x) x\nF(1", "#else", "#define F(x) x\nF(1, 2)"]
)
def test_what_is_not_understood(text: str) -> None:
    with pytest.raises(UnknownTextError):
        preprocess(text)
