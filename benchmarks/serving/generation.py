"""One word after another by a decoder: its cache as states on the device, beside ONNX Runtime.

    python -m benchmarks.serving.generation --device pocl [--layers 30] [--length 1024] [--words 32]

A decoder in the shapes of SmolLM2-135M, with random float32 weights and grouped-query attention over a cache of `--length`
words, as onnxruntime-genai writes it. Both engines read the same words one at a time, all weights resident. ONNX Runtime takes
and returns the cache in arrays. The benchmark prints the median milliseconds of a word, the bytes of the cache that are inputs
and outputs, and the launches. It compares the last answers. Exit code 1: they differ by more than 1e-3 of their range.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

import flashmem
from benchmarks.command import Arguments, run_command

Arrays = dict[str, NDArray[Any]]

HIDDEN, INNER, HEADS, KEY_HEADS, SIZE, VOCABULARY = 576, 1536, 9, 3, 64, 49152

MOST_DIFFERENCE = 1e-3
"""The largest difference between two engines' answers, as a fraction of their range."""


def write_decoder(path: Path, layers: int, length: int) -> None:
    """Write the decoder for one word, with a cache of `length` words."""
    random = np.random.default_rng(0)
    kept: list[onnx.TensorProto] = []
    nodes: list[onnx.NodeProto] = []

    def weight(name: str, *shape: int) -> str:
        array = random.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[0])) if len(shape) > 1 else np.ones(shape)
        kept.append(numpy_helper.from_array(array.astype(np.float32), name))
        return name

    def node(op: str, *inputs: str, outputs: tuple[str, ...] = (), domain: str = "", **attributes: Any) -> str:
        made = outputs or (f"{op}.{len(nodes)}",)
        nodes.append(helper.make_node(op, list(inputs), list(made), domain=domain, **attributes))
        return made[0]

    def norm(x: str, name: str) -> str:
        return node("SimplifiedLayerNormalization", x, weight(name, HIDDEN), epsilon=1e-5)

    angles = np.arange(length)[:, None] * 1e4 ** (-np.arange(SIZE // 2) / (SIZE // 2))
    for name, table in (("cos", np.cos(angles)), ("sin", np.sin(angles))):
        kept.append(numpy_helper.from_array(table.astype(np.float32), name))
    given = {"x": (TensorProto.FLOAT, [1, 1, HIDDEN]), "seqlens_k": (TensorProto.INT32, [1])}
    given["total_sequence_length"] = (TensorProto.INT32, [])
    made = {"logits": [1, 1, VOCABULARY]}
    x = "x"
    for layer in range(layers):
        pairs = {f"past_key_values.{layer}.{kind}": f"present.{layer}.{kind}" for kind in ("key", "value")}
        qkv = node("MatMul", norm(x, f"norm{layer}"), weight(f"qkv{layer}", HIDDEN, (HEADS + 2 * KEY_HEADS) * SIZE))
        read = [qkv, "", "", *pairs, "seqlens_k", "total_sequence_length", "cos", "sin"]
        outputs = (f"attention{layer}", *pairs.values())
        fields = {"num_heads": HEADS, "kv_num_heads": KEY_HEADS, "do_rotary": 1}
        attended = node("GroupQueryAttention", *read, outputs=outputs, domain="com.microsoft", **fields)
        x = node("Add", x, node("MatMul", attended, weight(f"out{layer}", HEADS * SIZE, HIDDEN)))
        read_by_mlp = norm(x, f"mlp_norm{layer}")
        gate = node("MatMul", read_by_mlp, weight(f"gate{layer}", HIDDEN, INNER))
        up = node("MatMul", read_by_mlp, weight(f"up{layer}", HIDDEN, INNER))
        gated = node("Mul", node("Mul", gate, node("Sigmoid", gate)), up)
        x = node("Add", x, node("MatMul", gated, weight(f"down{layer}", INNER, HIDDEN)))
        for past, present in pairs.items():
            given[past] = (TensorProto.FLOAT, [1, KEY_HEADS, length, SIZE])
            made[present] = [1, KEY_HEADS, length, SIZE]
    node("MatMul", norm(x, "norm"), weight("head", HIDDEN, VOCABULARY), outputs=("logits",))
    graph = helper.make_graph(
        nodes,
        "decoder",
        [helper.make_tensor_value_info(name, *each) for name, each in given.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in made.items()],
        kept,
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    onnx.save(model, path, save_as_external_data=True, location=f"{path.stem}.data")


def word(number: int) -> Arrays:
    """The inputs of word `number`, apart from the cache."""
    x = np.random.default_rng(number).standard_normal((1, 1, HIDDEN), np.float32)
    return {"x": x, "seqlens_k": np.array([number], np.int32), "total_sequence_length": np.array(number + 1, np.int32)}


def timed(step: Callable[[Arrays], NDArray[Any]], words: int) -> tuple[float, NDArray[Any]]:
    """Median milliseconds of a word after the first four, and the last answer."""
    seconds = []
    for number in range(words):
        inputs = word(number)
        begun = perf_counter()
        answer = step(inputs)
        seconds.append(perf_counter() - begun)
    return 1e3 * median(seconds[4:]), answer


def main() -> None:
    """Write, compile, run, compare."""
    parser = Arguments(__doc__)
    parser.add_device()
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--length", type=int, default=1024, help="words that the cache holds")
    parser.add_argument("--words", type=int, default=32)
    args = parser.parse_args()
    parser.check_device(args.device)
    if not 4 < args.words <= args.length:
        parser.error(f"--words {args.words} is not between 5 and --length; give another number")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "decoder.onnx"
        write_decoder(source, args.layers, args.length)
        reference = onnxruntime.InferenceSession(source)
        names = [each.name for each in reference.get_inputs() if each.name.startswith("past")]
        cache = {name: np.zeros((1, KEY_HEADS, args.length, SIZE), np.float32) for name in names}
        passed = 2 * sum(array.nbytes for array in cache.values())

        def through_the_host(inputs: Arrays) -> NDArray[Any]:
            answer, *present = reference.run(None, {**inputs, **cache})
            cache.update(zip(cache, present, strict=True))
            return answer  # type: ignore[no-any-return]

        milliseconds, wanted = timed(through_the_host, args.words)
        print(f"ONNX Runtime: {milliseconds:.1f} ms a word, {passed / 1e6:.1f} MB of cache", flush=True)
        bundle = flashmem.compile(source, Path(folder) / "m.flashmem", device=args.device, states="auto")
        launches = len(bundle.program.launches)
        with flashmem.Session(bundle, device=args.device, strategy="preload") as session:
            milliseconds, answer = timed(lambda inputs: session.run(None, inputs)[0], args.words)
        print(f"flashmem: {milliseconds:.1f} ms a word, {launches} launches")
        if np.abs(answer - wanted).max() > MOST_DIFFERENCE * np.ptp(wanted):
            raise SystemExit("the answers differ")


if __name__ == "__main__":
    run_command(main)
