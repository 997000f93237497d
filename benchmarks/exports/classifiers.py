"""Image classifiers: ResNet, RegNet, MobileNetV2, and the vision transformers ViT and DeepViT."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.exports.recipe import Recipe, Tensors, exporter_class, exporter_module, image
from benchmarks.exports.weights import standardise_batches

_PIXELS = image()
_BRANCH_GAIN = 0.25
"""Gain of the last normalisation in ResNet's residual branches.

Training starts it at 0 (Goyal et al., arXiv 1706.02677, section 5.1) and leaves it small. At 1, sixteen random blocks amplify
the rounding of weights to fp16 to 1-3 % of the output, in every engine. The model could then not reveal a wrong kernel.
"""

_MIXING_NOISE = 0.05
"""Noise of re-attention's matrices around the identity: fully random ones average all heads away."""

_TINY_STAGES = {"num_labels": 10, "embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 1]}
_BOTTLENECK = {"layer_type": "bottleneck", "hidden_act": "relu"}
_TINY_VIT = {"num_labels": 10, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_WIDE = {"patch": 16, "width": 1024, "heads": 16, "head_width": 64, "inner_width": 2048, "classes": 1000}
_TINY = {"patch": 8, "width": 32, "heads": 4, "head_width": 8, "inner_width": 64, "classes": 10}


def _transformers(kind: str, **config: Any) -> Any:
    configuration = exporter_class("transformers", f"{kind}Config")(**config)
    return exporter_class("transformers", f"{kind}ForImageClassification")(configuration)


def _vit(depth: int, size: int, config: dict[str, int], *, mixing: bool = False) -> Any:
    exporter_module("torch")  # imported by the module below
    return exporter_class("benchmarks.exports.vision_transformer", "VisionTransformer")(
        size, depth=depth, mixing=mixing, **config
    )


def _logits(network: Any, inputs: Tensors) -> tuple[Any, ...]:
    return (network(inputs[_PIXELS.name]).logits,)


def _output(network: Any, inputs: Tensors) -> tuple[Any, ...]:
    return (network(inputs[_PIXELS.name]),)


def _centre(torch: Any, network: Any, inputs: Tensors) -> None:
    """Adapt the weights: batch statistics of such images, small branches, re-attention near the identity, logits around
    zero.
    """
    for path, module in network.named_modules():
        if path.endswith("layer.2.normalization"):
            module.weight *= _BRANCH_GAIN
        if getattr(module, "mixing", None) is not None:
            identity = torch.eye(len(module.mixing))
            module.mixing.copy_(identity + _MIXING_NOISE * torch.randn_like(identity))
            module.mixing_norm.weight *= _BRANCH_GAIN
    pictures = standardise_batches(torch, network, inputs[_PIXELS.name])
    *_, classifier = (module for module in network.modules() if isinstance(module, torch.nn.Linear))
    answer = network(pictures)
    classifier.bias -= getattr(answer, "logits", answer).mean(0)


def _model(
    name: str, summary: str, size: int, build: Callable[[int], Any], answer: Any = _logits, *, tiny: bool = False
) -> Recipe:
    return Recipe(name, summary, size, build, (_PIXELS,), answer, tune=_centre, tiny=tiny)


MODELS = (
    _model("resnet50", "ResNet-50, 25.6 M weights", 224, lambda _: _transformers("ResNet", num_labels=1000)),
    _model("vit-b16", "ViT-B/16, 86.6 M weights", 224, lambda size: _transformers("ViT", num_labels=1000, image_size=size)),
    _model("vit-103m", "ViT, 12 wide layers, 102.8 M weights", 224, lambda size: _vit(12, size, _WIDE), _output),
    _model(
        "deepvit-204m",
        "DeepViT: 24 wide layers with re-attention, 203.6 M weights",
        224,
        lambda size: _vit(24, size, _WIDE, mixing=True),
        _output,
    ),
    _model(
        "resnet-tiny",
        "two narrow bottleneck stages",
        32,
        lambda _: _transformers("ResNet", **_TINY_STAGES, **_BOTTLENECK),
        tiny=True,
    ),
    _model(
        "regnet-tiny",
        "two narrow stages of grouped convolution with squeeze and excitation",
        32,
        lambda _: _transformers("RegNet", **_TINY_STAGES, groups_width=4, layer_type="y"),
        tiny=True,
    ),
    _model(
        "mobilenet-tiny",
        "MobileNetV2 with depthwise convolution, very narrow",
        32,
        lambda size: _transformers(
            "MobileNetV2", num_labels=10, image_size=size, depth_multiplier=0.1, expand_ratio=2, finegrained_output=False
        ),
        tiny=True,
    ),
    _model(
        "vit-tiny",
        "two narrow encoder layers",
        32,
        lambda size: _transformers("ViT", **_TINY_VIT, image_size=size, patch_size=8),
        tiny=True,
    ),
    _model(
        "deepvit-tiny",
        "two narrow layers with re-attention",
        32,
        lambda size: _vit(2, size, _TINY, mixing=True),
        _output,
        tiny=True,
    ),
)
