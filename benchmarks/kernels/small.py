"""Five small networks for benchmarks/kernels/resident.py: their launches take longer than arithmetic.

    python -m benchmarks.kernels.small DIR
    python -m benchmarks.kernels.resident --zoo DIR --device pocl --models mobilenetv3-large efficientnet-b0 \\
        voice-detector wakeword-head gru-tagger

DIR/NAME gets model.onnx and inputs.npz. The voice detector is Silero's, trained (`pip install --no-deps silero-vad==6.2.3`), at
16 kHz. The others have random weights: MobileNetV3-Large; EfficientNet-B0 (arXiv 1905.11946, table 1), batch normalisation
folded; the head of a wake word on 16 embeddings, as openWakeWord has it; and a tagger of 32 words, with two layers of
bidirectional GRUs.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from benchmarks.command import Arguments, run_command
from flashmem.base.errors import MissingFileError
from flashmem.compiler.ir.graph import Graph, Value
from flashmem.tools.zoo.graph_file import write_random, write_with_random_weights
from flashmem.tools.zoo.net import Net

# Of each stage: the factor of inner channels, kernel size, channels, blocks, stride of the first.
_EFFICIENTNET_B0 = (
    (1, 3, 16, 1, 1), (6, 3, 24, 2, 2), (6, 5, 40, 2, 2), (6, 3, 80, 3, 2), (6, 5, 112, 3, 1), (6, 5, 192, 4, 2),
    (6, 3, 320, 1, 1),
)  # fmt: skip
_DETECTOR = "silero_vad/data/silero_vad_16k_op15.onnx"


def efficientnet_b0(pixels: int = 224) -> Graph:
    """EfficientNet-B0 for one image."""
    net = Net("efficientnet-b0")

    def swish(x: Value) -> Value:
        return net.op("Mul", [x, net.op("Sigmoid", [x], x.shape)], x.shape)

    x = swish(net.conv(net.input("pixel_values", (1, 3, pixels, pixels), "float32"), "stem", 32, 3, 2, 1))
    for stage, (factor, kernel, channels, blocks, stride) in enumerate(_EFFICIENTNET_B0):
        for block in range(blocks):
            at, before, inside = f"stages.{stage}.{block}", x, factor * x.shape[1]
            if factor > 1:
                x = swish(net.conv(x, f"{at}.expand", inside, 1, 1, 0))
            x = swish(net.conv(x, f"{at}.depthwise", inside, kernel, 1 if block else stride, kernel // 2, groups=inside))
            scale = swish(net.conv(net.pooled(x), f"{at}.squeeze", before.shape[1] // 4, 1, 1, 0))
            scale = net.conv(scale, f"{at}.excite", inside, 1, 1, 0)
            x = net.op("Mul", [x, net.op("Sigmoid", [scale], scale.shape)], x.shape)
            x = net.conv(x, f"{at}.project", channels, 1, 1, 0)
            x = net.op("Add", [before, x], x.shape) if x.shape == before.shape else x
    x = net.pooled(swish(net.conv(x, "last", 1280, 1, 1, 0)))
    return net.finish(net.gemm(net.reshape(x, (1, 1280)), "classifier", 1000))


def wakeword_head() -> Graph:
    """Two layers with normalisation on 16 embeddings of 96 numbers; one probability."""
    net = Net("wakeword-head")
    x = net.reshape(net.input("embeddings", (1, 16, 96), "float32"), (1, 1536))
    for layer in ("first", "second"):
        x = net.relu(net.layer_norm(net.gemm(x, layer, 128), f"{layer}.norm"))
    y = net.gemm(x, "last", 1)
    return net.finish(net.op("Sigmoid", [y], y.shape))


def gru_tagger(words: int = 32, vocabulary: int = 20000, hidden: int = 128, layers: int = 2, tags: int = 24) -> Graph:
    """Embedded words through bidirectional GRUs; a score for each tag of each word."""
    net = Net("gru-tagger")
    x = net.transpose(net.embed(vocabulary, hidden, words), (1, 0, 2))
    for layer in range(layers):
        shapes = {"w": (3 * hidden, x.shape[2]), "r": (3 * hidden, hidden), "b": (6 * hidden,)}
        weights = [net.weight(f"{layer}.{name}", (2, *shape)) for name, shape in shapes.items()]
        y = net.op(
            "GRU", [x, *weights], (words, 2, 1, hidden), direction="bidirectional", hidden_size=hidden, linear_before_reset=1
        )
        x = net.reshape(net.transpose(y, (0, 2, 1, 3)), (words, 1, 2 * hidden))
    return net.finish(net.linear(x, "tags", tags))


def _voice_detector(path: Path) -> None:
    found = find_spec("silero_vad")
    if found is None or found.origin is None:
        raise MissingFileError("Silero's voice detector is missing; pip install --no-deps silero-vad==6.2.3")
    model = onnx.load(Path(found.origin).parents[1] / _DETECTOR)
    sizes = {"input": (1, 576), "state": (2, 1, 128)}
    del model.graph.input[:]
    model.graph.input.extend(
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in sizes.items()
    )
    model.graph.initializer.append(numpy_helper.from_array(np.array(16000), "sr"))
    onnx.save(model, path)


def write(folder: Path) -> None:
    """Write all five."""
    draw = np.random.default_rng(7)
    inputs: dict[str, dict[str, NDArray[np.generic]]] = {
        "mobilenetv3-large": {"pixel_values": draw.uniform(-2, 2, (1, 3, 224, 224)).astype(np.float32)},
        "efficientnet-b0": {"pixel_values": draw.uniform(-2, 2, (1, 3, 224, 224)).astype(np.float32)},
        "voice-detector": {
            "input": draw.uniform(-0.4, 0.4, (1, 576)).astype(np.float32),
            "state": draw.laplace(0, 0.3, (2, 1, 128)).astype(np.float32),
        },
        "wakeword-head": {"embeddings": draw.laplace(2, 8, (1, 16, 96)).astype(np.float32)},
        "gru-tagger": {"input_ids": draw.integers(0, 20000, (1, 32))},
    }
    made = {"efficientnet-b0": efficientnet_b0(), "wakeword-head": wakeword_head(), "gru-tagger": gru_tagger()}
    for name, arrays in inputs.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        model = folder / name / "model.onnx"
        if name in made:
            write_with_random_weights(made[name], model)
        elif name == "voice-detector":
            _voice_detector(model)
        else:
            write_random(name, model)
        np.savez(model.parent / "inputs.npz", **arrays)  # type: ignore[arg-type]


def main() -> None:
    """Parse the command line, write the networks."""
    parser = Arguments(__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR")
    write(parser.parse_args().folder)


if __name__ == "__main__":
    run_command(main)
