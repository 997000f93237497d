"""Depth Anything: depth estimation for every pixel, with a DPT head on DINOv2."""

from __future__ import annotations

from typing import Any

from benchmarks.exports.recipe import Recipe, Tensors, exporter_class, image

_PIXELS = image()

_SMALL = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6}
_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
_TINY = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "patch_size": 4}


def _network(
    backbone: dict[str, Any], stages: tuple[int, ...], pretrained: int, neck: tuple[int, ...], fusion: int, head: int
) -> Any:
    """`stages` are the input layers of the neck. Positions are learned for `pretrained` pixels and interpolated to others."""
    dino = exporter_class("transformers", "Dinov2Config")(
        **backbone,
        image_size=pretrained,
        out_features=[f"stage{stage}" for stage in stages],
        reshape_hidden_states=False,
    )
    config = exporter_class("transformers", "DepthAnythingConfig")(
        backbone_config=dino,
        reassemble_hidden_size=dino.hidden_size,
        patch_size=dino.patch_size,
        neck_hidden_sizes=list(neck),
        fusion_hidden_size=fusion,
        head_hidden_size=head,
    )
    return exporter_class("transformers", "DepthAnythingForDepthEstimation")(config)


def _depth(network: Any, inputs: Tensors) -> tuple[Any, ...]:
    return (network(**inputs).predicted_depth,)


def _in_front(torch: Any, network: Any, inputs: Tensors) -> None:
    """Shift the last bias so that most depths are positive; the last operator clips the others."""
    seen = []
    hook = network.head.conv3.register_forward_hook(lambda module, given, answer: seen.append(answer))
    network(**inputs)
    hook.remove()
    network.head.conv3.bias += seen[0].std() - seen[0].mean()


def _model(name: str, summary: str, size: int, *network: Any, **more: Any) -> Recipe:
    return Recipe(
        name, summary, size, lambda _: _network(*network), (_PIXELS,), _depth, outputs=("depth",), tune=_in_front, **more
    )


MODELS = (
    _model(
        "depthanything-s", "Depth Anything, small: 24.7 M weights", 518,
        _SMALL, (3, 6, 9, 12), 518, (48, 96, 192, 384), 64, 32, paper_size=280,
    ),
    _model(
        "depthanything-l", "Depth Anything, large: 334 M weights", 518,
        _LARGE, (5, 12, 18, 24), 518, (256, 512, 1024, 1024), 256, 32, paper_size=280,
    ),
    _model(
        "depthanything-tiny", "four narrow layers, a neck of four levels", 32,
        _TINY, (1, 2, 3, 4), 24, (8, 8, 16, 16), 8, 8, tiny=True,
    ),
)  # fmt: skip
