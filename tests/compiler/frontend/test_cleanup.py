"""What makes imports quick changes no graph: rules that are tried at one operator, and types that are inferred once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
from onnxscript import rewriter

from flashmem.compiler.frontend import cleanup, folding
from flashmem.compiler.frontend.cleanup import _RULES, AtOperator
from flashmem.compiler.frontend.importer import import_model

TEXT = """<ir_version: 10, opset_import: ["" : 21]>
decoder (float[2, 6] x) => (float[2, 6] y) {
    s = Constant <value_ints = [2, 6]> ()
    a = Transpose <perm = [1, 0]> (x)
    b = Transpose <perm = [1, 0]> (a)
    c = Cast <to = 1> (b)
    d = Reshape (c, s)
    e = Reshape (d, s)
    f = Relu (e)
    g = Abs (f)
    h = Relu (g)
    y = Neg (h)
}"""


def model() -> ir.Model:
    return ir.from_onnx_text(
        TEXT.replace("Unsqueeze <axes = [0]> (e)", "Relu (e)").replace("Squeeze <axes = [0]> (f)", "Abs (f)")
    )


def shown(made: ir.Model) -> list[tuple[str, list[str]]]:
    """The operators of a model, and by which others their inputs are made."""
    producers = [[value and value.producer() for value in node.inputs] for node in made.graph]
    return [
        (node.op_type, [each.op_type if each else "" for each in inputs])
        for node, inputs in zip(made.graph, producers, strict=True)
    ]


def test_rules_at_one_operator_do_the_same() -> None:
    """Each rule as it is and as it is used: equal models."""
    changed = 0
    for rule in _RULES:
        found = []
        for each in (rule, AtOperator(rule)):
            made = model()
            rewriter.RewritePass(rewriter.RewriteRuleSet([each]))(made)  # type: ignore[list-item]
            found.append(shown(made))
        assert found[0] == found[1], rule
        changed += found[0] != shown(model())
    assert changed > 1


def test_rules_are_tried_at_their_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    class Rule:
        _target_pattern = _RULES[0]._target_pattern

        def try_rewrite(self, model: Any, graph: Any, node: ir.Node, **_: Any) -> None:
            tried.append(node.op_type)

    made = model()
    for node in made.graph:
        AtOperator(Rule()).try_rewrite(made, made.graph, node)
    assert tried == ["Cast"]
    assert {type(rule) for rule in cleanup._REWRITES.rules} == {AtOperator}


def test_types_are_inferred_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of equal nodes, also in the next import; another shape, attribute or constant is another question."""
    asked: list[str] = []
    real = folding.infer_node_outputs

    def count(schema: Any, proto: Any, *rest: Any, **named: Any) -> Any:
        asked.append(proto.op_type)
        return real(schema, proto, *rest, **named)

    monkeypatch.setattr(folding, "infer_node_outputs", count)
    monkeypatch.setattr(folding, "_FOUND", {})
    path = tmp_path / "m.onnx"
    text = """<ir_version: 10, opset_import: ["" : 21]>
    layers (float[n, 6] x) => (float[n, 6] y) {
        s = Constant <value_ints = [0, 3, 2]> ()
        t = Constant <value_ints = [0, 2, 3]> ()
        v = Constant <value_ints = [2]> ()
        w = Constant <value_ints = [1]> ()
        a = Softmax <axis = 1> (x)
        b = Softmax <axis = 1> (a)
        c = Softmax <axis = 0> (b)
        d = Reshape (c, s)
        e = Reshape (c, t)
        f = ReduceSum <keepdims = 0> (d, v)
        g = ReduceSum <keepdims = 0> (e, w)
        y = Concat <axis = 1> (f, g)
    }"""
    ir.save(ir.from_onnx_text(text), path)
    first = import_model(path, {"x": (5, 6)})
    counts = {op: asked.count(op) for op in ("Softmax", "Reshape", "ReduceSum", "Concat")}
    assert counts == {"Softmax": 2, "Reshape": 2, "ReduceSum": 2, "Concat": 1}
    asked.clear()
    again = import_model(path, {"x": (5, 6)})
    assert not asked and [node.outputs[0].shape for node in again.nodes] == [node.outputs[0].shape for node in first.nodes]
    other = import_model(path, {"x": (7, 6)})
    assert asked and [port.value.shape for port in other.outputs] == [(7, 6)]
