"""Known architectures as graphs, from their published configurations, without weights and without PyTorch.

The cost of streaming a model depends on shapes alone, so `flashmem plan zoo:llama2-70b` needs no 280 GB file. The graphs match
what the importer makes of the files that PyTorch exports: operators, their order, folded constants. Weights have a shape and no
data. `tests/tools/zoo/test_graphs.py` compares the graphs of GPT-Neo, ViT, Whisper's encoder and ResNet with exports.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashmem.base.errors import UserError
from flashmem.compiler.ir.graph import Graph
from flashmem.tools.zoo.net import Net


@dataclass(frozen=True)
class GptNeo:
    """GPT-Neo: learned positions, unscaled attention, alternating global and local layers; the head is not tied to the
    table.
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int = 50257
    window: int = 256

    def graph(self, name: str, tokens: int) -> Graph:
        """The graph for one sequence of `tokens`."""
        net = Net(name)
        x = net.embed(self.vocabulary, self.hidden, tokens)
        x = net.op("Add", [x, net.weight("wpe", (1, tokens, self.hidden))], x.shape)
        masks = [net.causal_mask("mask.global", tokens)] * 2
        if tokens > self.window:
            masks[1] = net.causal_mask("mask.local", tokens, self.window)
        causal = net.additive_mask(tokens)
        lowest = net.number(-3.4e38)
        for layer in range(self.layers):
            at = f"h.{layer}"
            y = net.layer_norm(x, f"{at}.ln_1")
            q, k, v = [net.linear(y, f"{at}.{part}", self.hidden) for part in "qkv"]
            q, v = (net.heads(part, self.heads) for part in (q, v))
            k = net.transpose(net.split_heads(k, self.heads), (0, 2, 3, 1))
            scores = net.matmul(q, k)
            scores = net.op("Where", [masks[layer % 2], scores, lowest], scores.shape)
            scores = net.op("Add", [scores, causal], scores.shape)
            y = net.merge_heads(net.matmul(net.softmax(scores), v))
            x = net.op("Add", [net.linear(y, f"{at}.out_proj", self.hidden, bias=True), x], x.shape)
            y = net.linear(net.layer_norm(x, f"{at}.ln_2"), f"{at}.c_fc", 4 * self.hidden, bias=True)
            x = net.op("Add", [x, net.linear(net.gelu_tanh(y), f"{at}.c_proj", self.hidden, bias=True)], x.shape)
        return net.finish(net.linear(net.layer_norm(x, "ln_f"), "lm_head", self.vocabulary))


@dataclass(frozen=True)
class TiedDecoder:
    """GPT-2, and OPT below its larger sizes: learned positions, biases everywhere, and the token table as head.

    With `joined`, queries, keys and values are one product, and the activation is GELU (GPT-2); else three, and ReLU (OPT).
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    joined: bool

    def graph(self, name: str, tokens: int) -> Graph:
        """The graph for one sequence of `tokens`."""
        net = Net(name)
        table = net.weight("embedding", (self.vocabulary, self.hidden))
        x = net.op("Gather", [table, net.input("input_ids", (1, tokens), "int64")], (1, tokens, self.hidden), axis=0)
        x = net.op("Add", [x, net.weight("positions", (1, tokens, self.hidden))], x.shape)
        causal = net.additive_mask(tokens)
        scale = net.number((self.hidden // self.heads) ** -0.5)
        for layer in range(self.layers):
            at = f"h.{layer}"
            y = net.layer_norm(x, f"{at}.ln_1")
            if self.joined:
                y = net.linear(y, f"{at}.attn", 3 * self.hidden, bias=True)
                y = net.reshape(y, (1, tokens, 3, self.heads, self.hidden // self.heads))
                q, k, v = net.unbind(net.transpose(y, (2, 0, 3, 1, 4)))
            else:
                q, k, v = (net.heads(net.linear(y, f"{at}.{part}", self.hidden, bias=True), self.heads) for part in "qkv")
            scores = net.matmul(net.op("Mul", [q, scale], q.shape), net.transpose(k, (0, 1, 3, 2)))
            scores = net.op("Add", [scores, causal], scores.shape)
            y = net.merge_heads(net.matmul(net.softmax(scores), v))
            x = net.op("Add", [net.linear(y, f"{at}.proj", self.hidden, bias=True), x], x.shape)
            y = net.linear(net.layer_norm(x, f"{at}.ln_2"), f"{at}.fc1", 4 * self.hidden, bias=True)
            y = net.gelu_tanh(y) if self.joined else net.relu(y)
            x = net.op("Add", [x, net.linear(y, f"{at}.fc2", self.hidden, bias=True)], x.shape)
        return net.finish(net.matmul(net.layer_norm(x, "ln_f"), net.transpose(table, (1, 0)), "lm_head"))


@dataclass(frozen=True)
class Llama:
    """Llama 2: RMSNorm, rotary positions, grouped-query attention where `kv_heads` is below `heads`, SwiGLU."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int = 32000

    def graph(self, name: str, tokens: int) -> Graph:
        """The graph for one sequence of `tokens`."""
        net = Net(name)
        width = self.hidden // self.heads
        x = net.embed(self.vocabulary, self.hidden, tokens)
        mask = net.additive_mask(tokens)
        turn = (net.weight("cos", (1, 1, tokens, width)), net.weight("sin", (1, 1, tokens, width)))
        scale = net.number(width**-0.25)
        for layer in range(self.layers):
            at = f"layers.{layer}"
            y = net.rms_norm(x, f"{at}.input_layernorm")
            q = net.rotary(net.heads(net.linear(y, f"{at}.q_proj", self.heads * width), self.heads), *turn)
            k = net.rotary(net.heads(net.linear(y, f"{at}.k_proj", self.kv_heads * width), self.kv_heads), *turn)
            v = net.heads(net.linear(y, f"{at}.v_proj", self.kv_heads * width), self.kv_heads)
            k, v = (net.repeat_heads(each, self.heads // self.kv_heads) for each in (k, v))
            q = net.op("Mul", [q, scale], q.shape)
            k = net.transpose(k, (0, 1, 3, 2))
            k = net.op("Mul", [k, scale], k.shape)
            scores = net.matmul(q, k)
            scores = net.op("Add", [scores, mask], scores.shape)
            y = net.merge_heads(net.matmul(net.softmax(scores), v))
            x = net.op("Add", [x, net.linear(y, f"{at}.o_proj", self.hidden)], x.shape)
            y = net.rms_norm(x, f"{at}.post_attention_layernorm")
            gate = net.linear(y, f"{at}.gate_proj", self.intermediate)
            gate = net.op("Mul", [gate, net.op("Sigmoid", [gate], gate.shape)], gate.shape)
            y = net.op("Mul", [gate, net.linear(y, f"{at}.up_proj", self.intermediate)], gate.shape)
            x = net.op("Add", [x, net.linear(y, f"{at}.down_proj", self.hidden)], x.shape)
        return net.finish(net.linear(net.rms_norm(x, "norm"), "lm_head", self.vocabulary))


@dataclass(frozen=True)
class Vit:
    """A vision transformer with a class token, a classifier on it, and the exact GELU."""

    layers: int
    hidden: int
    heads: int
    intermediate: int
    patch: int
    classes: int = 1000

    def graph(self, name: str, pixels: int) -> Graph:
        """The graph for one square image with sides of `pixels`."""
        net = Net(name)
        side = pixels // self.patch
        image = net.input("pixel_values", (1, 3, pixels, pixels), "float32")
        x = net.conv(image, "patches", self.hidden, self.patch, self.patch, 0)
        x = net.transpose(net.reshape(x, (1, self.hidden, side * side)), (0, 2, 1))
        shape = (1, side * side + 1, self.hidden)
        x = net.op("Concat", [net.weight("cls_token", (1, 1, self.hidden)), x], shape, axis=1)
        x = net.op("Add", [x, net.weight("position_embeddings", shape)], shape)
        scale = net.number((self.hidden // self.heads) ** -0.25)
        for layer in range(self.layers):
            at = f"layer.{layer}"
            y = net.layer_norm(x, f"{at}.layernorm_before")
            k, v, q = (
                net.heads(net.linear(y, f"{at}.{part}", self.hidden, bias=True), self.heads)
                for part in ("key", "value", "query")
            )
            k = net.transpose(k, (0, 1, 3, 2))
            q, k = (net.op("Mul", [each, scale], each.shape) for each in (q, k))
            y = net.merge_heads(net.matmul(net.softmax(net.matmul(q, k)), v))
            x = net.op("Add", [net.linear(y, f"{at}.output", self.hidden, bias=True), x], x.shape)
            y = net.linear(net.layer_norm(x, f"{at}.layernorm_after"), f"{at}.mlp.up", self.intermediate, bias=True)
            x = net.op("Add", [net.linear(net.gelu(y), f"{at}.mlp.down", self.hidden, bias=True), x], x.shape)
        first = net.op("Gather", [net.layer_norm(x, "layernorm"), net.integers(0)], (1, self.hidden), axis=1)
        return net.finish(net.gemm(first, "classifier", self.classes))


@dataclass(frozen=True)
class WideVit:
    """The ViT and, with `mixing`, DeepViT of vit-pytorch: patches are normalised vectors."""

    layers: int
    hidden: int
    heads: int
    intermediate: int
    patch: int
    classes: int = 1000
    mixing: bool = False

    def graph(self, name: str, pixels: int) -> Graph:
        """The graph for one square image with sides of `pixels`."""
        net = Net(name)
        side = pixels // self.patch
        x = net.input("pixel_values", (1, 3, pixels, pixels), "float32")
        x = net.reshape(x, (1, 3, side, self.patch, side, self.patch))
        x = net.reshape(net.transpose(x, (0, 2, 4, 3, 5, 1)), (1, side * side, 3 * self.patch**2))
        x = net.layer_norm(net.linear(net.layer_norm(x, "patches.0"), "patches.1", self.hidden, bias=True), "patches.2")
        shape = (1, side * side + 1, self.hidden)
        x = net.op("Concat", [net.weight("cls_token", (1, 1, self.hidden)), x], shape, axis=1)
        x = net.op("Add", [x, net.weight("positions", shape)], shape)
        scale = net.number((self.hidden // self.heads) ** -0.5)
        for layer in range(self.layers):
            at = f"layers.{layer}"
            y = net.linear(net.layer_norm(x, f"{at}.norm"), f"{at}.query_key_value", 3 * self.hidden)
            y = net.reshape(y, (1, shape[1], 3, self.heads, self.hidden // self.heads))
            q, k, v = net.unbind(net.transpose(y, (2, 0, 3, 1, 4)))
            scores = net.matmul(q, net.transpose(k, (0, 1, 3, 2)))
            scores = net.softmax(net.op("Mul", [scores, scale], scores.shape))
            if self.mixing:
                mixing = net.weight(f"{at}.mixing", (self.heads, self.heads))
                scores = net.op("Einsum", [scores, mixing], scores.shape, equation="bhij,hg->bgij")
                scores = net.layer_norm(net.transpose(scores, (0, 2, 3, 1)), f"{at}.mixing_norm")
                scores = net.transpose(scores, (0, 3, 1, 2))
            y = net.linear(net.merge_heads(net.matmul(scores, v)), f"{at}.project", self.hidden, bias=True)
            x = net.op("Add", [x, y], x.shape)
            y = net.linear(net.layer_norm(x, f"{at}.mlp.norm"), f"{at}.mlp.up", self.intermediate, bias=True)
            x = net.op("Add", [x, net.linear(net.gelu(y), f"{at}.mlp.down", self.hidden, bias=True)], x.shape)
        first = net.op("Gather", [x, net.integers(0)], (1, self.hidden), axis=1)
        return net.finish(net.gemm(net.layer_norm(first, "head.0"), "head.1", self.classes))


@dataclass(frozen=True)
class WhisperEncoder:
    """Whisper's encoder: two convolutions over the frames, the second with stride 2, and layers without a class token."""

    layers: int
    hidden: int
    heads: int
    intermediate: int
    bins: int = 80

    def graph(self, name: str, frames: int) -> Graph:
        """The graph for one spectrogram of `frames`."""
        net = Net(name)
        x = net.input("input_features", (1, self.bins, frames), "float32")
        for number, stride in enumerate((1, 2)):
            x = net.gelu(net.conv(x, f"conv{number + 1}", self.hidden, 3, stride, 1))
        x = net.transpose(x, (0, 2, 1))
        x = net.op("Add", [x, net.weight("embed_positions", x.shape[1:])], x.shape)
        scale = net.number((self.hidden // self.heads) ** -0.5)
        for layer in range(self.layers):
            at = f"layers.{layer}"
            y = net.layer_norm(x, f"{at}.self_attn_layer_norm")
            q = net.linear(y, f"{at}.q_proj", self.hidden, bias=True)
            q = net.heads(net.op("Mul", [q, scale], q.shape), self.heads)
            k = net.heads(net.linear(y, f"{at}.k_proj", self.hidden), self.heads)
            v = net.heads(net.linear(y, f"{at}.v_proj", self.hidden, bias=True), self.heads)
            y = net.merge_heads(net.matmul(net.softmax(net.matmul(q, net.swap_last(k))), v))
            x = net.op("Add", [x, net.linear(y, f"{at}.out_proj", self.hidden, bias=True)], x.shape)
            y = net.linear(net.layer_norm(x, f"{at}.final_layer_norm"), f"{at}.fc1", self.intermediate, bias=True)
            x = net.op("Add", [x, net.linear(net.gelu(y), f"{at}.fc2", self.hidden, bias=True)], x.shape)
        return net.finish(net.layer_norm(x, "layer_norm"), "last_hidden_state")


@dataclass(frozen=True)
class ResNet:
    """A ResNet with bottleneck blocks; batch normalisation is folded into the convolutions."""

    depths: tuple[int, ...]
    widths: tuple[int, ...]
    stem: int = 64
    classes: int = 1000

    def graph(self, name: str, pixels: int) -> Graph:
        """The graph for one square image with sides of `pixels`."""
        net = Net(name)
        image = net.input("pixel_values", (1, 3, pixels, pixels), "float32")
        x = net.relu(net.conv(image, "stem", self.stem, 7, 2, 3))
        side = (x.shape[2] + 2 - 3) // 2 + 1
        x = net.op("MaxPool", [x], (1, self.stem, side, side), kernel_shape=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1))
        for stage, (depth, width) in enumerate(zip(self.depths, self.widths, strict=True)):
            for block in range(depth):
                at = f"stages.{stage}.{block}"
                stride = 2 if stage and not block else 1
                y = net.relu(net.conv(x, f"{at}.0", width // 4, 1, 1, 0))
                y = net.relu(net.conv(y, f"{at}.1", width // 4, 3, stride, 1))
                y = net.conv(y, f"{at}.2", width, 1, 1, 0)
                if not block:
                    x = net.conv(x, f"{at}.shortcut", width, 1, stride, 0)
                x = net.relu(net.op("Add", [y, x], y.shape))
        channels = x.shape[1]
        return net.finish(net.gemm(net.reshape(net.pooled(x), (1, channels)), "classifier", self.classes))


@dataclass(frozen=True)
class MobileNet:
    """MobileNetV2: inverted residuals around depthwise convolutions; batch normalisation is folded.

    `stages` have the expansion of a block, its channels, the number of such blocks, and the stride of the first.
    """

    stages: tuple[tuple[int, int, int, int], ...]
    stem: int = 32
    head: int = 1280
    classes: int = 1000

    def graph(self, name: str, pixels: int) -> Graph:
        """The graph for one square image with sides of `pixels`."""
        net = Net(name)
        image = net.input("pixel_values", (1, 3, pixels, pixels), "float32")
        x = net.relu6(net.conv(image, "stem", self.stem, 3, 2, 1))
        for stage, (factor, channels, depth, first) in enumerate(self.stages):
            for block in range(depth):
                at = f"stages.{stage}.{block}"
                before = x
                inside = factor * x.shape[1]
                stride = 1 if block else first
                if factor > 1:
                    x = net.relu6(net.conv(x, f"{at}.expand", inside, 1, 1, 0))
                x = net.relu6(net.conv(x, f"{at}.depthwise", inside, 3, stride, 1, groups=inside))
                x = net.conv(x, f"{at}.project", channels, 1, 1, 0)
                if x.shape == before.shape:
                    x = net.op("Add", [before, x], x.shape)
        x = net.relu6(net.conv(x, "head", self.head, 1, 1, 0))
        return net.finish(net.gemm(net.reshape(net.pooled(x), (1, self.head)), "classifier", self.classes))


@dataclass(frozen=True)
class MobileNetV3:
    """MobileNetV3: inverted residuals with squeeze-and-excitation in some blocks, batch normalisation folded.

    `blocks`: kernel size, inner channels, channels, whether it has squeeze-and-excitation, whether HardSwish (else ReLU),
    stride.
    """

    blocks: tuple[tuple[int, int, int, bool, bool, int], ...]
    stem: int = 16
    last: int = 960
    head: int = 1280
    classes: int = 1000

    def graph(self, name: str, pixels: int) -> Graph:
        """The graph for one square image with sides of `pixels`."""
        net = Net(name)
        x = net.hard_swish(net.conv(net.input("pixel_values", (1, 3, pixels, pixels), "float32"), "stem", self.stem, 3, 2, 1))
        for block, (kernel, inside, channels, squeezes, swish, stride) in enumerate(self.blocks):
            at = f"blocks.{block}"
            before = x
            activate = net.hard_swish if swish else net.relu
            if inside != x.shape[1]:
                x = activate(net.conv(x, f"{at}.expand", inside, 1, 1, 0))
            x = activate(net.conv(x, f"{at}.depthwise", inside, kernel, stride, kernel // 2, groups=inside))
            if squeezes:
                scale = net.relu(net.conv(net.pooled(x), f"{at}.squeeze", -(-inside // 32) * 8, 1, 1, 0))
                scale = net.conv(scale, f"{at}.excite", inside, 1, 1, 0)
                x = net.op("Mul", [x, net.op("HardSigmoid", [scale], scale.shape, alpha=1 / 6)], x.shape)
            x = net.conv(x, f"{at}.project", channels, 1, 1, 0)
            if x.shape == before.shape:
                x = net.op("Add", [before, x], x.shape)
        x = net.pooled(net.hard_swish(net.conv(x, "last", self.last, 1, 1, 0)))
        x = net.hard_swish(net.gemm(net.reshape(x, (1, self.last)), "head", self.head))
        return net.finish(net.gemm(x, "classifier", self.classes))


Config = GptNeo | TiedDecoder | Llama | Vit | WideVit | WhisperEncoder | ResNet | MobileNet | MobileNetV3


@dataclass(frozen=True)
class _Known:
    config: Config
    size: int  # tokens, frames, or pixels a side
    source: str


_MOBILENET_V3_LARGE = (
    (3, 16, 16, False, False, 1), (3, 64, 24, False, False, 2), (3, 72, 24, False, False, 1), (5, 72, 40, True, False, 2),
    (5, 120, 40, True, False, 1), (5, 120, 40, True, False, 1), (3, 240, 80, False, True, 2), (3, 200, 80, False, True, 1),
    (3, 184, 80, False, True, 1), (3, 184, 80, False, True, 1), (3, 480, 112, True, True, 1), (3, 672, 112, True, True, 1),
    (5, 672, 160, True, True, 2), (5, 960, 160, True, True, 1), (5, 960, 160, True, True, 1),
)  # fmt: skip

_ZOO = {
    "resnet50": _Known(ResNet((3, 4, 6, 3), (256, 512, 1024, 2048)), 224, "microsoft/resnet-50"),
    "mobilenetv2": _Known(
        MobileNet(((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))),
        224,
        "arXiv 1801.04381, table 2",
    ),
    "mobilenetv3-large": _Known(MobileNetV3(_MOBILENET_V3_LARGE), 224, "arXiv 1905.02244, table 1"),
    "vit-b16": _Known(Vit(12, 768, 12, 3072, 16), 224, "google/vit-base-patch16-224"),
    "vit-103m": _Known(WideVit(12, 1024, 16, 2048, 16), 224, "lucidrains/vit-pytorch, sized by the paper's parameters"),
    "deepvit-204m": _Known(WideVit(24, 1024, 16, 2048, 16, mixing=True), 224, "the same"),
    # The paper gives no dimensions for its ViT-8B; this is the published vision transformer of that size.
    "vit-8b": _Known(Vit(32, 4096, 32, 20480, 14), 224, "BAAI/EVA-CLIP-8B, vision tower (arXiv 2402.04252)"),
    "gptneo-125m": _Known(GptNeo(12, 768, 12), 128, "EleutherAI/gpt-neo-125m"),
    "gptneo-1.3b": _Known(GptNeo(24, 2048, 16), 128, "EleutherAI/gpt-neo-1.3B"),
    "gptneo-2.7b": _Known(GptNeo(32, 2560, 20), 128, "EleutherAI/gpt-neo-2.7B"),
    "gpt2": _Known(TiedDecoder(12, 768, 12, 50257, joined=True), 128, "openai-community/gpt2"),
    "opt-125m": _Known(TiedDecoder(12, 768, 12, 50272, joined=False), 128, "facebook/opt-125m"),
    "whisper-tiny-encoder": _Known(WhisperEncoder(4, 384, 6, 1536), 3000, "openai/whisper-tiny"),
    "whisper-medium-encoder": _Known(WhisperEncoder(24, 1024, 16, 4096), 3000, "openai/whisper-medium"),
    "llama2-13b": _Known(Llama(40, 5120, 40, 40, 13824), 128, "meta-llama/Llama-2-13b-hf"),
    "llama2-70b": _Known(Llama(80, 8192, 64, 8, 28672), 128, "meta-llama/Llama-2-70b-hf"),
}


def zoo_graph(name: str, size: int | None = None) -> Graph:
    """The graph of a known architecture as the importer would make it: before decomposition, batch 1, for inputs of `size` or
    the model's own.

    Raises:
        UserError: no such architecture, or a size that it cannot take.
    """
    check_architecture(name)
    known = _ZOO[name]
    if size is None:
        return known.config.graph(name, known.size)
    unit, step = _sizes(known.config)
    if size < 1 or size % step:
        raise UserError(f"the size of {name} is a positive multiple of {step} {unit}, not {size}")
    return known.config.graph(name, size)


def architectures() -> Iterator[tuple[str, str, str]]:
    """Name, size of the input with its unit, and source of each architecture."""
    for name, known in _ZOO.items():
        unit, _ = _sizes(known.config)
        yield name, f"{known.size} {unit}", known.source


def _sizes(config: Config) -> tuple[str, int]:
    """The unit of the size of an input, and what it is a multiple of."""
    match config:
        case GptNeo() | TiedDecoder() | Llama():
            return "tokens", 1
        case WhisperEncoder():
            return "frames", 2
        case Vit() | WideVit():
            return "pixels", config.patch
        case _:
            return "pixels", 32


def check_architecture(name: str) -> None:
    """Raise UserError unless `zoo_graph` has `name`."""
    if name not in _ZOO:
        raise UserError(f"no architecture {name!r} in the zoo: choose one of {', '.join(_ZOO)}")
