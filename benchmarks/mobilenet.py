"""MobileNetV3-Large (Howard et al., 2019, table 1) with random weights: a network of many small layers, to try things on.

python -m benchmarks.mobilenet mobilenetv3.onnx [--size 224] [--seed 0]
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.command import Arguments, run_command

BLOCKS = (
    # kernel, expanded, out, squeeze and excite, activation, stride
    (3, 16, 16, False, "Relu", 1),
    (3, 64, 24, False, "Relu", 2),
    (3, 72, 24, False, "Relu", 1),
    (5, 72, 40, True, "Relu", 2),
    (5, 120, 40, True, "Relu", 1),
    (5, 120, 40, True, "Relu", 1),
    (3, 240, 80, False, "HardSwish", 2),
    (3, 200, 80, False, "HardSwish", 1),
    (3, 184, 80, False, "HardSwish", 1),
    (3, 184, 80, False, "HardSwish", 1),
    (3, 480, 112, True, "HardSwish", 1),
    (3, 672, 112, True, "HardSwish", 1),
    (5, 672, 160, True, "HardSwish", 2),
    (5, 960, 160, True, "HardSwish", 1),
    (5, 960, 160, True, "HardSwish", 1),
)


class _Net:
    """Nodes and weights, as they are added."""

    def __init__(self, seed: int) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self._rng = np.random.default_rng(seed)

    def add(self, kind: str, *inputs: str, **attributes: object) -> str:
        """A node; the name of its output."""
        name = f"{kind.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], name=name, **attributes))
        return name

    def weight(self, *shape: int, fan_in: int) -> str:
        """Weights under which activations keep their size; the name."""
        name = f"w{len(self.weights)}"
        values = self._rng.standard_normal(shape) * np.sqrt(2 / fan_in)
        self.weights.append(numpy_helper.from_array(values.astype(np.float32), name))
        return name

    def convolution(self, x: str, inside: int, outside: int, kernel: int = 1, stride: int = 1, group: int = 1) -> str:
        """A convolution with a bias."""
        fan_in = inside // group * kernel * kernel
        weight = self.weight(outside, inside // group, kernel, kernel, fan_in=fan_in)
        bias = self.weight(outside, fan_in=100)
        return self.add(
            "Conv", x, weight, bias,
            kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=[kernel // 2] * 4, group=group,
        )  # fmt: skip

    def squeeze_and_excite(self, x: str, channels: int) -> str:
        """Channels scaled by what the whole image says of them."""
        inner = -(-channels // 4 // 8) * 8
        squeezed = self.add("GlobalAveragePool", x)
        squeezed = self.add("Relu", self.convolution(squeezed, channels, inner))
        return self.add("Mul", x, self.add("HardSigmoid", self.convolution(squeezed, inner, channels), alpha=1 / 6))


def mobilenet(size: int = 224, seed: int = 0) -> onnx.ModelProto:
    """The network for images of `size` x `size`: 5.5 M weights."""
    net = _Net(seed)
    x = net.add("HardSwish", net.convolution("image", 3, 16, 3, 2))
    channels = 16
    for kernel, expanded, out, excites, activation, stride in BLOCKS:
        y = x if expanded == channels else net.add(activation, net.convolution(x, channels, expanded))
        y = net.add(activation, net.convolution(y, expanded, expanded, kernel, stride, group=expanded))
        y = net.convolution(net.squeeze_and_excite(y, expanded) if excites else y, expanded, out)
        x = net.add("Add", x, y) if stride == 1 and out == channels else y
        channels = out
    x = net.add("HardSwish", net.convolution(x, channels, 960))
    x = net.add("Flatten", net.add("GlobalAveragePool", x))
    x = net.add("HardSwish", net.add("Gemm", x, net.weight(960, 1280, fan_in=960), net.weight(1280, fan_in=100)))
    x = net.add("Gemm", x, net.weight(1280, 1000, fan_in=1280), net.weight(1000, fan_in=100))
    graph = helper.make_graph(
        net.nodes,
        "mobilenetv3-large",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, [1, 3, size, size])],
        [helper.make_tensor_value_info(x, TensorProto.FLOAT, [1, 1000])],
        net.weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def main() -> None:
    """Write it."""
    parser = Arguments(__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    onnx.save(mobilenet(args.size, args.seed), args.output)


if __name__ == "__main__":
    run_command(main)
