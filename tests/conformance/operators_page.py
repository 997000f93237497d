"""Writes docs/reference/operators.md from the operators' declarations and the list of ONNX's node tests.

python -m tests.conformance.operators_page            writes it
"""

from __future__ import annotations

from flashmem.compiler.frontend import contrib
from flashmem.compiler.ir.limits import CHOSEN, UNROLLED
from flashmem.compiler.operators import FAMILIES, REGISTRY, Operator
from flashmem.compiler.operators.registry import ANY, BOOL, FLOAT, INDEX, INTEGERS, NEWEST_OPSET, NUMBERS, WIDE, Types
from tests.conformance.onnx_nodes import counts
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "reference" / "operators.md"

_NAMES: dict[Types, str] = {
    ANY: "any", BOOL: "bool", FLOAT: "float", INDEX: "int32, int64", INTEGERS: "integers", NUMBERS: "numbers",
    WIDE: "float, 32 and 64 bit integers",
}  # fmt: skip

_HEAD = f"""\
# Operators

Made by `python -m tests.conformance.operators_page` of the declarations in `flashmem/compiler/operators/`.
ONNX operator sets 7 to {NEWEST_OPSET}.
Operators that are not listed and that ONNX defines by others run as their definition.

Control flow is decided when compiling. A Loop whose number of iterations is known by then, every Scan, sequences and optional
values become plain nodes, at most {UNROLLED} for all loops. An If with a constant condition becomes one of its branches. If the
condition is computed at run time, both branches are computed, and one result is chosen. They may have {CHOSEN} nodes together,
and outputs of equal types and shapes. Larger ones are refused.

NonMaxSuppression selects as many boxes as the data says. Its output has room for all that it can select, and a run returns
the selected ones. Nodes that compute each row of their output from the same row of their inputs may follow; others are
refused. Its limit and thresholds must be constants.

Random operators draw the same numbers in every run, on every device and under every plan, up to the rounding of functions.
The numbers depend on the `seed` attribute (0 without one) and on the node's name; nodes draw independent ones. A Slice whose
length is fixed may start anywhere, if each end is its start plus a constant. Outside its axis, the run ends with an error.

- *Inputs*: element types of the inputs; the last named holds for all further ones. *float* is float16, bfloat16, float32 and
  float64, all computed in float32. Integers have 8 to 64 bits, signed or not, and keep them.
- *Runs as*: an expression fused into its neighbours, a kernel, or a rewrite into other operators.
- *Streams*: its class in the FlashMem paper's Table 5, which says how much may be streamed during it.
- *Tests*: the onnx package's node tests that pass, of those it has; `tests/conformance/onnx_nodes.txt` says why others fail.
"""

_ODD = """
## NaN, infinities and casts

ONNX says little about them. flashmem computes the same on every device:

- **NaN spreads.** Max, Min, Clip, ReduceMax, ReduceMin, MaxPool, GlobalMaxPool, ScatterElements with `max` or `min`, and all
  arithmetic give NaN where an operand is NaN, as numpy does. ONNX Runtime drops some, depending on their place.
  DynamicQuantizeLinear of NaN has scale NaN.
- **TopK** takes NaN for the largest number: first among the largest, last among the smallest, of several the first. So do ONNX
  Runtime and numpy, for all floating point types. Of equal numbers the first precedes.
- **ArgMax and ArgMin** never choose NaN, but 0 if the row begins with NaN, as ONNX Runtime for all floating point types. numpy
  and ONNX's reference choose the first NaN. Hardmax of a row that begins with NaN is 0 everywhere.
- **NonMaxSuppression** takes boxes whose score is NaN last, and none of them if there is a score threshold.
- **Clip** without a bound ends at the largest finite float32, as ONNX Runtime does.
- **Rows with infinities**, as in ONNX Runtime. Softmax of a row with a positive infinity, or of negative infinities alone, is
  NaN. LpNormalization and RMSNormalization of a row with an infinity are 0 for its numbers and NaN for its infinities;
  LayerNormalization is NaN. Rows of zeros stay 0. If squares exceed float32, LayerNormalization and RMSNormalization are 0;
  LpNormalization is right for all finite numbers.
- **Cast** of a float to an integer truncates to int32, or for int64, uint32 and uint64 to int64, whose lower bits count. NaN
  and what that type cannot hold become its smallest number, whose lower bits are 0. But numbers from 2^63 on become uint64
  exactly, and those from 2^64 on 0. So do x86 processors and, but for uint32, ONNX Runtime on them.
"""


def _types(operator: Operator) -> str:
    return "; ".join(_NAMES.get(types, ", ".join(sorted(types))) for types in operator.inputs)


def _how(operator: Operator) -> str:
    if operator.expression is not None:
        return "expression"
    return f"kernel `{operator.kernel}`" if operator.kernel else "rewrite"


def page() -> str:
    """The text of docs/reference/operators.md."""
    tests = counts()
    passed, total = (sum(count[i] for count in tests.values()) for i in (0, 1))
    parts = [_HEAD, f"\nOf all {total} node tests {passed} pass.\n", _ODD]
    for family in FAMILIES:
        name = family.__name__.removesuffix(".operators").rsplit(".", 1)[1]
        operators = [each for each in REGISTRY.values() if each.onnx and each.family == family.__name__]
        if not operators:  # a family of the compiler's own
            continue
        parts.append(f"\n## {name.capitalize()}\n\n| Operator | Inputs | Runs as | Streams | Tests |\n|---|---|---|---|---|\n")
        for operator in sorted(operators, key=lambda each: each.name):
            done, of = tests.get(operator.name, (0, 0))
            parts.append(
                f"| {operator.name} | {_types(operator)} | {_how(operator)} | {operator.operator_class} | {done} / {of} |\n"
            )
    names = ", ".join(contrib.operators())
    about = "expanded into ONNX's when a model is imported ([onnxruntime.md](onnxruntime.md))"
    parts.append(f"\n## ONNX Runtime's own\n\nOperators of domain com.microsoft, {about}: {names}.\n")
    parts.append(f"Of domain ai.onnx.ml: {', '.join(contrib.operators(contrib.CLASSICAL))}.\n")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
