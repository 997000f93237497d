"""The models of the zoo: known architectures, built from their configurations with PyTorch and transformers.

Both are imported only when a model is built; they come with the `zoo` extra.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flashmem.errors import UserError

IMAGE_INPUT = "pixel_values"
TOKEN_INPUT = "input_ids"


@dataclass(frozen=True)
class ZooModel:
    """One architecture. `size` is the side of the square image in pixels, or the length of the sequence in tokens."""

    name: str
    summary: str
    default_size: int
    build: Callable[[], Any]
    input_name: str
    vocabulary: int = 0
    tiny: bool = False

    @property
    def size_means(self) -> str:
        """What `size` counts."""
        return "tokens" if self.vocabulary else "pixels"


def zoo_module(name: str) -> Any:
    """The module `name` of the `zoo` extra.

    Raises:
        UserError: the extra is missing.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"the zoo needs {name.partition('.')[0]}: install flashmem with its `zoo` extra ({error})") from error


def _resnet(**config: Any) -> Any:
    transformers = zoo_module("transformers")
    return transformers.ResNetForImageClassification(transformers.ResNetConfig(**config))


def _regnet(**config: Any) -> Any:
    transformers = zoo_module("transformers")
    return transformers.RegNetForImageClassification(transformers.RegNetConfig(**config))


def _mobilenet(**config: Any) -> Any:
    transformers = zoo_module("transformers")
    return transformers.MobileNetV2ForImageClassification(transformers.MobileNetV2Config(**config))


def _vit(**config: Any) -> Any:
    transformers = zoo_module("transformers")
    return transformers.ViTForImageClassification(transformers.ViTConfig(**config))


def _gptneo(**config: Any) -> Any:
    transformers = zoo_module("transformers")
    return transformers.GPTNeoForCausalLM(transformers.GPTNeoConfig(**config))


def _gptneo_size(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    """A GPT-Neo of the published family: global and local attention in turn, the head not tied to the table."""
    return {
        "hidden_size": hidden,
        "num_layers": layers,
        "num_heads": heads,
        "attention_types": [[["global", "local"], layers // 2]],
        "tie_word_embeddings": False,
    }


_TINY_GPTNEO = _gptneo_size(2, 32, 4) | {"vocab_size": 307, "max_position_embeddings": 64, "window_size": 8}

_MODELS = (
    ZooModel("resnet50", "ResNet-50, 25.6 M weights", 224, lambda: _resnet(num_labels=1000), IMAGE_INPUT),
    ZooModel("vit-b16", "ViT-B/16, 86.6 M weights", 224, lambda: _vit(num_labels=1000), IMAGE_INPUT),
    ZooModel(
        "gptneo-125m",
        "GPT-Neo-125M, head not tied: 164 M weights",
        128,
        lambda: _gptneo(**_gptneo_size(12, 768, 12)),
        TOKEN_INPUT,
        vocabulary=50257,
    ),
    ZooModel(
        "gptneo-1.3b",
        "GPT-Neo-1.3B, head not tied: 1416 M weights; dynamo only, 6 GB of memory to export",
        128,
        lambda: _gptneo(**_gptneo_size(24, 2048, 16)),
        TOKEN_INPUT,
        vocabulary=50257,
    ),
    ZooModel(
        "gptneo-2.7b",
        "GPT-Neo-2.7B, head not tied: 2786 M weights; dynamo only, 11 GB of memory to export",
        128,
        lambda: _gptneo(**_gptneo_size(32, 2560, 20)),
        TOKEN_INPUT,
        vocabulary=50257,
    ),
    ZooModel(
        "resnet-tiny",
        "two narrow bottleneck stages",
        32,
        lambda: _resnet(
            num_labels=10, embedding_size=8, hidden_sizes=[16, 32], depths=[1, 1], layer_type="bottleneck", hidden_act="relu"
        ),
        IMAGE_INPUT,
        tiny=True,
    ),
    ZooModel(
        "regnet-tiny",
        "two narrow stages of grouped convolution with squeeze and excitation",
        32,
        lambda: _regnet(num_labels=10, embedding_size=8, hidden_sizes=[16, 32], depths=[1, 1], groups_width=4, layer_type="y"),
        IMAGE_INPUT,
        tiny=True,
    ),
    ZooModel(
        "mobilenet-tiny",
        "MobileNetV2 with depthwise convolution, very narrow",
        32,
        lambda: _mobilenet(num_labels=10, image_size=32, depth_multiplier=0.1, expand_ratio=2, finegrained_output=False),
        IMAGE_INPUT,
        tiny=True,
    ),
    ZooModel(
        "vit-tiny",
        "two narrow encoder layers",
        32,
        lambda: _vit(
            num_labels=10,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            image_size=32,
            patch_size=8,
        ),
        IMAGE_INPUT,
        tiny=True,
    ),
    ZooModel(
        "gptneo-tiny",
        "two narrow layers, one global and one local",
        16,
        lambda: _gptneo(**_TINY_GPTNEO),
        TOKEN_INPUT,
        vocabulary=307,
        tiny=True,
    ),
    ZooModel(
        "gptneo-tiny-tied",
        "the same with the head tied to the table",
        16,
        lambda: _gptneo(**(_TINY_GPTNEO | {"tie_word_embeddings": True})),
        TOKEN_INPUT,
        vocabulary=307,
        tiny=True,
    ),
)

MODELS = {model.name: model for model in _MODELS}


def names() -> tuple[str, ...]:
    """The full-size models, in the order they are listed to a person."""
    return tuple(model.name for model in _MODELS if not model.tiny)


def tiny_names() -> tuple[str, ...]:
    """The narrow two-layer versions that the tests' data is exported from."""
    return tuple(model.name for model in _MODELS if model.tiny)


def find(name: str) -> ZooModel:
    """The model called `name`; a UserError lists what there is."""
    try:
        return MODELS[name]
    except KeyError:
        raise UserError(f"no model {name!r} in the zoo: choose one of {', '.join(names() + tiny_names())}") from None
