"""LSTM, GRU and RNN compared with float64 and ONNX Runtime, on every device: one model contains many forms of a node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from flashmem.base.errors import UnsupportedModelError
from flashmem.compiler.frontend.importer import collect_unsupported, import_model
from flashmem.compiler.operators import why_unsupported
from tests.support.compared import PLACES, answers_of, require_right
from tests.support.inputs import floats

STEPS, BATCH, WIDTH, HIDDEN = 4, 3, 5, 6
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
Array = NDArray[Any]

# Operator, inputs after W and R ("late" ones are computed at run time), attributes.
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("LSTM", "B h c P", {"direction": "bidirectional"}),
    ("LSTM", "B n h c", {"direction": "reverse", "clip": 0.3, "input_forget": 1}),
    ("LSTM", "B late", {
        "activations": ["HardSigmoid", "Softsign", "ScaledTanh"], "activation_alpha": [0.3, 1.5], "activation_beta": [0.4, 0.7],
    }),
    ("LSTM", "B h c", {"layout": 1, "direction": "bidirectional"}),
    ("GRU", "B h", {"direction": "bidirectional", "linear_before_reset": 0}),
    ("GRU", "B n late", {
        "linear_before_reset": 1, "activations": ["Affine", "Elu"], "activation_alpha": [0.2, 0.5], "activation_beta": [0.4],
    }),
    ("GRU", "B h n", {"layout": 1, "clip": 0.5, "direction": "reverse"}),
    ("RNN", "B h", {"direction": "bidirectional", "activations": ["LeakyRelu", "Softplus"], "activation_alpha": [0.2]}),
]  # fmt: skip


def drawn(first: int, kind: str) -> tuple[onnx.ModelProto, onnx.ModelProto, dict[str, Array]]:
    """A model of every other case from `first` on; the same without layout 1, which ONNX Runtime lacks; and inputs.

    `kind`: the numbers that X and the states are of. Weights are within 0.7. Gates by Affine multiply large states until they
    are beyond float32, so those get normal numbers.
    """
    random_ = np.random.default_rng(7)
    feeds: dict[str, Array] = {}
    constants: dict[str, Array] = {}
    nodes: list[onnx.NodeProto] = []
    plain: list[onnx.NodeProto] = []
    names: list[str] = []

    def place(name: str, data: Array, late: bool) -> str:
        (feeds if late else constants)[name] = data
        return name

    def numbers(*shape: int) -> Array:
        return random_.uniform(-0.7, 0.7, shape).astype(np.float32)

    for index, (op, given, attributes) in list(enumerate(CASES))[first::2]:
        directions, rows = 1 + (attributes.get("direction") == "bidirectional"), GATES[op] * HIDDEN
        swapped = attributes.get("layout") == 1
        late = "late" in given
        form = "normal" if "Affine" in attributes.get("activations", ()) else kind
        states = [
            place(f"{name}{index}", floats(directions, BATCH, HIDDEN, kind=form), True) if name in given.split() else ""
            for name in ("h", "c")
        ]
        shared = [
            place(f"W{index}", numbers(directions, rows, WIDTH), late),
            place(f"R{index}", numbers(directions, rows, HIDDEN), late),
            place(f"B{index}", numbers(directions, 2 * rows), late) if "B" in given else "",
            place(f"n{index}", np.array([2, STEPS, 1], np.int32), bool(index % 4)) if "n" in given.split() else "",
        ]
        if op == "LSTM":
            shared += [*states, place(f"P{index}", numbers(directions, 3 * HIDDEN), late) if "P" in given else ""]
        else:
            shared.append(states[0])
        outputs = [f"{part}{index}" for part in ("Y", "H", "C")[: 3 if op == "LSTM" else 2]]
        names += outputs
        attributes = {"hidden_size": HIDDEN, **attributes}
        x = place(f"X{index}", floats(STEPS, BATCH, WIDTH, kind=form), True)
        if not swapped:
            for each in (nodes, plain):
                each.append(helper.make_node(op, [x, *shared], outputs, name=f"n{index}", **attributes))
            continue
        # X and the states swap steps or directions with the batch; the plain model has Transposes around the node for that.
        for name in [x, *filter(None, states)]:
            feeds[name] = np.ascontiguousarray(feeds[name].swapaxes(0, 1))
        nodes.append(helper.make_node(op, [x, *shared], outputs, name=f"n{index}", **attributes))
        turned = {name: f"{name}.turned" for name in [x, *filter(None, states)]}
        plain += [helper.make_node("Transpose", [old], [new], perm=[1, 0, 2]) for old, new in turned.items()]
        inputs = [turned.get(name, name) for name in [x, *shared]]
        del attributes["layout"]
        plain.append(helper.make_node(op, inputs, [f"{name}.plain" for name in outputs], **attributes))
        for name in outputs:
            perm = [2, 0, 1, 3] if name.startswith("Y") else [1, 0, 2]
            plain.append(helper.make_node("Transpose", [f"{name}.plain"], [name], perm=perm))

    def model(made: list[onnx.NodeProto]) -> onnx.ModelProto:
        inputs = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(data.dtype), data.shape)
            for name, data in feeds.items()
        ]
        results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names]
        initializers = [numpy_helper.from_array(data, name) for name, data in constants.items()]
        graph = helper.make_graph(made, "recurrent", inputs, results, initializers)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)

    return model(nodes), model(plain), feeds


@pytest.mark.parametrize("place", PLACES, ids="-".join)
@pytest.mark.parametrize("kind", ["normal", "around 1e3", "tiny", "of many sizes"])
def test_every_form_answers_as_float64(kind: str, place: tuple[str, str], tmp_path: Path) -> None:
    """Each form on one memory path of each device."""
    model, plain, feeds = drawn(PLACES.index(place) % 2, kind)
    require_right(plain, feeds, answers_of(model, feeds, place, tmp_path))


@pytest.mark.parametrize(
    ("attributes", "weights", "sentence"),
    [
        ({"hidden_size": 7}, (1, 24, 5), "LSTM with hidden_size 7 and weights for 6"),
        ({"activations": ["Tanh", "Tanh", "Swish"]}, (1, 24, 5), "LSTM with activation 'Swish' is not implemented"),
        ({"activations": ["Tanh"]}, (1, 24, 5), "LSTM with 1 activations over 1 direction"),
        ({}, (1, 20, 5), "LSTM with input 1 (W) of shape (1, 20, 5), not (1, 24, 5)"),
    ],
)
def test_what_does_not_fit_is_refused(
    attributes: dict[str, Any], weights: tuple[int, ...], sentence: str, tmp_path: Path
) -> None:
    node = helper.make_node("LSTM", ["X", "W", "R"], ["Y"], **{"hidden_size": 6, **attributes})
    inputs = [helper.make_tensor_value_info("X", TensorProto.FLOAT, (4, 3, 5))]
    initializers = [
        numpy_helper.from_array(np.zeros(shape, np.float32), name) for name, shape in (("W", weights), ("R", (1, 24, 6)))
    ]
    outputs = [helper.make_tensor_value_info("Y", TensorProto.FLOAT, None)]
    graph = helper.make_graph([node], "g", inputs, outputs, initializers)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8), tmp_path / "model.onnx")
    with pytest.raises(UnsupportedModelError) as caught:
        collect_unsupported(import_model(tmp_path / "model.onnx", {}, why_unsupported), why_unsupported)
    assert sentence in str(caught.value)
