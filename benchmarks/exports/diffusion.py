"""The denoising network of Stable Diffusion 1.5."""

from __future__ import annotations

from typing import Any

from benchmarks.exports.recipe import Input, Recipe, Tensors, exporter_class, features

_TOKENS = 77  # of a prompt
_STEPS = 1000  # that the network was trained on

_SD15 = {
    "block_out_channels": (320, 640, 1280, 1280),
    "layers_per_block": 2,
    "down_block_types": ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
    "up_block_types": ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
    "cross_attention_dim": 768,
    "attention_head_dim": 8,  # the number of heads, in the files of version 1
}
_TINY = {
    "block_out_channels": (4, 8),
    "layers_per_block": 1,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 16,
    "attention_head_dim": 2,
    "norm_num_groups": 2,
}


def _unet(config: dict[str, Any], size: int) -> Any:
    return exporter_class("diffusers", "UNet2DConditionModel")(sample_size=size, **config)


def _denoised(network: Any, inputs: Tensors) -> tuple[Any, ...]:
    return (network(**inputs).sample,)


def _model(name: str, summary: str, size: int, config: dict[str, Any], length: int, **more: Any) -> Recipe:
    inputs = (
        features("sample", lambda side: (1, 4, side, side)),
        Input("timestep", lambda generator, _: generator.integers(0, _STEPS, (1,))),
        features("encoder_hidden_states", lambda _: (1, length, config["cross_attention_dim"])),
    )
    return Recipe(
        name, summary, size, lambda side: _unet(config, side), inputs, _denoised, outputs=("noise",),
        size_means="latents a side", **more,
    )  # fmt: skip


MODELS = (
    _model("sd15-unet", "Stable Diffusion 1.5, UNet: 859.5 M weights", 64, _SD15, _TOKENS, paper_size=32),
    _model("sd-tiny-unet", "two narrow levels with cross attention", 8, _TINY, 6, tiny=True),
)
