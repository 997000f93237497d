"""Rewrites Gemm before a Reshape, an optimizer's form of a product with more dimensions, as MatMul and Add.

Without the Reshape, operators after the product can be fused with it.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter import MatchResult, RewriteRuleClassBase


class ReshapedGemm(RewriteRuleClassBase):
    """Reshape(Gemm(x, w, c)) -> Reshape(x) @ w + c, if the rows of the result get more dimensions and its columns stay."""

    def pattern(self, op: Any, x: ir.Value, w: ir.Value, c: ir.Value, shape: ir.Value) -> Any:
        """The pattern. The shape may have any source; only the resulting shape counts."""
        product = op.Gemm(x, w, c, _allow_other_attributes=True, _outputs=["product"])
        return op.Reshape(product, shape, _allow_other_attributes=True, _outputs=["result"])

    def check(self, op: Any, *args: Any, **kwargs: Any) -> MatchResult:
        """Whether columns stay columns, and the node only multiplies and adds the same to every row."""
        outcome = MatchResult()
        product = kwargs["product"]
        shapes = [kwargs[name].shape for name in ("x", "product", "result", "c")]
        if any(shape is None or not shape.is_static() for shape in shapes):
            return outcome.fail("a shape is unknown")
        rows, columns, after, added = (shape.numpy() for shape in shapes)
        if len(rows) != 2 or len(after) < 3 or columns[-1:] != after[-1:] or len(added) > 1 or 0 in after:
            return outcome.fail("the shape changes more than how many dimensions the rows have")
        node = product.producer()
        if node is None or _flag(node, "transA") or _factors(node) != (1.0, 1.0):
            return outcome.fail("the first operand is transposed, or there are factors")
        return outcome

    def rewrite(self, op: Any, x: ir.Value, w: ir.Value, c: ir.Value, product: ir.Value, result: ir.Value, **_: Any) -> Any:
        """The replacement. The second operand keeps its place: a transposed constant is read in its stored order."""
        node = product.producer()
        assert node is not None and x.shape is not None and result.shape is not None
        if _flag(node, "transB"):
            w = op.Transpose(w, perm=[1, 0])
        shape = op.Constant(value_ints=[*result.shape.numpy()[:-1], x.shape.numpy()[-1]])
        return op.Add(op.MatMul(op.Reshape(x, shape), w), c)


def _flag(node: ir.Node, name: str) -> bool:
    return name in node.attributes and bool(node.attributes[name].value)


def _factors(node: ir.Node) -> tuple[float | None, float | None]:
    return node.attributes.get_float("alpha", 1.0), node.attributes.get_float("beta", 1.0)
