"""Small language models in folders, and what ONNX Runtime generates with their files.

`compiler/frontend/language/data/language_folders.tar.xz` has decoders of two layers with random weights, multiples of 1/8, that
compress well: `llama`, `gemma`, `gpt2` and `mistral` (a window of 16 tokens) were exported by optimum-onnx 0.1.0 with
transformers 4.57 (`optimum-cli export onnx --task text-generation-with-past`), and `genai` by the builder of
onnxruntime-genai 0.18.0 (`-p int4 -e cpu`).
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper

ARCHIVE = Path(__file__).parents[1] / "compiler/frontend/language/data/language_folders.tar.xz"
EXPORTED = ("llama", "gemma", "gpt2")


def unpack(folder: Path) -> Path:
    """Write all models into `folder`."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


def merged(folder: Path) -> None:
    """Bring the exported decoder in `folder` to the form of merged decoders: two branches, of which one has a cache."""
    model = onnx.load(folder / "model.onnx")
    graph = model.graph
    branch = onnx.GraphProto(name="with_past", node=graph.node, output=graph.output)
    node = helper.make_node(
        "If", ["use_cache_branch"], [value.name for value in graph.output], then_branch=branch, else_branch=branch
    )
    del graph.node[:]
    graph.node.append(node)
    graph.input.append(helper.make_tensor_value_info("use_cache_branch", onnx.TensorProto.BOOL, [1]))
    onnx.save(model, folder / "decoder_model_merged.onnx")
    (folder / "model.onnx").unlink()


def reference(folder: Path, prompt: Sequence[int], count: int) -> list[tuple[int, float]]:
    """The likeliest tokens after `prompt` by ONNX Runtime, with a growing cache, and the margin of each over the next one.

    The margin is relative to the range of the logits.
    """
    model = onnx.load(folder / "model.onnx")
    for node in model.graph.node:
        if node.op_type == "MatMulNBits":  # accuracy level 4 rounds activations to 8 bits
            next(each for each in node.attribute if each.name == "accuracy_level").i = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    given = {value.name: value for value in session.get_inputs()}
    outputs = [value.name for value in session.get_outputs()]
    past: dict[str, Any] = {
        name: np.zeros((1, value.shape[1], 0, _head_size(folder, value.shape[3])), np.float32)
        for name, value in given.items()
        if name.startswith("past_key_values.")
    }
    tokens, new, found = list(prompt), list(prompt), list[tuple[int, float]]()
    for _ in range(count):
        feed = {"input_ids": np.array([new]), "attention_mask": np.ones((1, len(tokens)), np.int64), **past}
        if "position_ids" in given:
            feed["position_ids"] = np.arange(len(tokens) - len(new), len(tokens))[None]
        made = dict(zip(outputs, session.run(None, feed), strict=True))
        logits = made["logits"][0, -1]
        second, best = np.sort(logits)[-2:]
        found.append((int(logits.argmax()), float((best - second) / np.ptp(logits))))
        new = [found[-1][0]]
        tokens += new
        past = {name: made[name.replace("past_key_values", "present")] for name in past}
    return found


def _head_size(folder: Path, declared: int | str) -> int:
    if isinstance(declared, int):
        return declared
    return int(json.loads((folder / "genai_config.json").read_text())["model"]["decoder"]["head_size"])
