"""Lowering of LSTM, GRU and RNN: each step is a MatMul of the hidden state by packed weights, and a launch for the gates.

A step needs the whole hidden state of the step before, and a device has no barrier across work-groups except the end of a
launch. Every step runs the same kernels with other arguments. The recurrent weights are streamed once and stay until the last
step.
"""

from __future__ import annotations

from flashmem.compiler.ir.fusion_group import FusionGroup
from flashmem.compiler.ir.graph import Node, Value
from flashmem.compiler.kernels.contraction.lowering import lower_matmul
from flashmem.compiler.kernels.recurrent.operators import GATES
from flashmem.compiler.lowering.context import LoweringContext
from flashmem.compiler.lowering.registry import lowers
from flashmem.compiler.operators.vector import scalar_literal
from flashmem.program.launches import Arg, KernelShape

_ACTIVATIONS = {
    "affine": "A * $ + B",
    "elu": "($ < 0.0f ? A * expm1($) : $)",
    "hardsigmoid": "fm_min(fm_max(A * $ + B, 0.0f), 1.0f)",
    "leakyrelu": "($ < 0.0f ? A * $ : $)",
    "relu": "fm_max($, 0.0f)",
    "scaledtanh": "A * fm_tanh(B * $)",
    "sigmoid": "1.0f / (1.0f + exp(-$))",
    "softplus": "fmax($, 0.0f) + log1p(exp(-fabs($)))",
    "softsign": "$ / (1.0f + fabs($))",
    "tanh": "fm_tanh($)",
    "thresholdedrelu": "($ > A ? $ : 0.0f)",
}


def _activation(name: str, alpha: float, beta: float) -> str:
    """An activation of the variable `$` as a C expression."""
    literals = {"A": scalar_literal("float32", alpha), "B": scalar_literal("float32", beta)}
    return "".join(literals.get(letter, letter) for letter in _ACTIVATIONS[name])


@lowers("recurrent")
def lower_recurrent(context: LoweringContext, group: FusionGroup) -> None:
    """Lower all steps of one direction, in order."""
    node = group.main
    a = node.attributes
    steps = a["steps"]
    batch = a["batch"]
    hidden = a["hidden"]
    projected, recurrence, candidate, lengths, first_h, first_c, peepholes, bias = node.inputs
    assert projected is not None and recurrence is not None
    state, cell, reset = (Value(f"{node.name}.{part}", (batch, hidden), "float32") for part in ("h", "c", "reset"))
    products = Value(f"{node.name}.products", (batch, recurrence.shape[0]), "float32")
    inner = Value(f"{node.name}.inner", (batch, hidden), "float32")
    zeros = context.zeros(batch * GATES[node.op] * hidden)
    by_step, by_batch = (1, steps) if a["layout"] else (batch, 1)
    vector = context.vector_dividing(hidden) if context.descriptor.kind == "cpu" else 1
    items = (hidden // vector, batch)
    local = context.work_group(items)
    values = {
        "op": node.op,
        "gates": GATES[node.op],
        "functions": [_activation(*each) for each in a["activations"]],
        "clip": None if a["clip"] is None else scalar_literal("float32", a["clip"]),
        "input_forget": a["input_forget"],
        "split": candidate is not None,
        "lengths": lengths is not None,
        "peepholes": peepholes is not None,
        "bias": bias is not None,
        "finals": a["finals"],
        "attributes": context.attributes(local),
        **context.vectors(vector),
    }

    def launch(step: int, phase: str, pointers: list[Arg]) -> None:
        kernel = context.kernels.kernel("recurrent/recurrent", phase=phase, **values)
        shape = KernelShape(rows=batch, columns=hidden, run=hidden, vector=vector)
        numbers = [batch, hidden, steps, step, int(a["reverse"]), by_step, by_batch]
        nbytes = 4 * batch * hidden * (2 * GATES[node.op] + 4)
        context.launch(group, kernel, [*pointers, *numbers], items, local, shape, nbytes=nbytes, part=f"[{step}]{phase}")

    def multiply(step: int, rows: Value, weights: Value, output: Value) -> None:
        lower_matmul(context, FusionGroup(Node("MatMul", f"{node.name}[{step}]", [rows, weights], [output], {"transposed": 1})))

    for step in range(steps):
        before = first_h if step == 0 else state
        parts = [context.operand(projected)]
        if before is None:  # the products of a zero state are zeros
            parts += [zeros, zeros] if candidate is not None else [zeros]
        else:
            multiply(step, before, recurrence, products)
            parts.append(context.tensor(products))
            if candidate is not None:
                options = [context.operand(lengths)] if lengths is not None else []
                launch(step, "reset", [*parts, *options, context.operand(before), context.tensor(reset)])
                multiply(step, reset, candidate, inner)
                parts.append(context.tensor(inner))
        parts += [context.operand(each) for each in (lengths, peepholes, bias) if each is not None]
        parts += [zeros if before is None else context.operand(before), context.tensor(state)]
        if node.op == "LSTM":
            cell_before = first_c if step == 0 else cell
            parts += [zeros if cell_before is None else context.operand(cell_before), context.tensor(cell)]
        launch(step, "", [*parts, context.tensor(group.output)])
