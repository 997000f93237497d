"""SAM 2: the image encoder, and the decoder from a point to masks."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.exports.recipe import Input, Recipe, Tensors, exporter_class, features, image

_PIXELS = image()
_LEVELS = ("high_resolution_0", "high_resolution_1", "image_embedding")
_PATCH = 16  # pixels a side of a cell of the image embedding

_LARGE = {
    "hidden_size": 144,
    "num_attention_heads": 2,
    "num_attention_heads_per_stage": [2, 4, 8, 16],
    "blocks_per_stage": [2, 6, 36, 4],
    "embed_dim_per_stage": [144, 288, 576, 1152],
    "window_size_per_stage": [8, 4, 16, 8],
    "global_attention_blocks": [23, 33, 43],
    "window_positional_embedding_background_size": [7, 7],
}
_NARROW = {
    "hidden_size": 4,
    "num_attention_heads": 1,
    "num_attention_heads_per_stage": [1, 2, 2, 4],
    "blocks_per_stage": [1, 1, 2, 1],
    "embed_dim_per_stage": [4, 8, 16, 32],
    "window_size_per_stage": [4, 2, 3, 2],  # 3 does not divide the 4 x 4 cells of its stage
    "global_attention_blocks": [3],
    "window_positional_embedding_background_size": [3, 3],
}


def _vision_config(backbone: dict[str, Any], size: int, channels: int) -> Any:
    hiera = exporter_class("transformers", "Sam2HieraDetConfig")(**backbone, image_size=[size, size])
    return exporter_class("transformers", "Sam2VisionConfig")(
        backbone_config=hiera,
        backbone_channel_list=hiera.embed_dim_per_stage[::-1],
        backbone_feature_sizes=[[size // scale] * 2 for scale in (4, 8, 16)],
        fpn_hidden_size=channels,
    )


def _encoder(backbone: dict[str, Any], size: int, channels: int) -> Any:
    if size % 32:
        raise ValueError("sides must be multiples of 32 pixels")
    return exporter_class("transformers", "Sam2VisionModel")(_vision_config(backbone, size, channels))


def _decoder(size: int, channels: int, decoder: dict[str, Any]) -> Any:
    """The model without its encoder: the inputs are the features of an image and a prompt."""
    if size % _PATCH:
        raise ValueError(f"sides must be multiples of {_PATCH} pixels")
    prompt = exporter_class("transformers", "Sam2PromptEncoderConfig")(hidden_size=channels, image_size=size, patch_size=_PATCH)
    config = exporter_class("transformers", "Sam2Config")(
        vision_config=_vision_config(_NARROW, size, channels),
        prompt_encoder_config=prompt,
        mask_decoder_config=exporter_class("transformers", "Sam2MaskDecoderConfig")(hidden_size=channels, **decoder),
    )
    network = exporter_class("transformers", "Sam2Model")(config)
    del network.vision_encoder, network.no_memory_embedding
    return network


def _features(network: Any, inputs: Tensors) -> tuple[Any, ...]:
    return tuple(network(**inputs).fpn_hidden_states)


def _masks(network: Any, inputs: Tensors) -> tuple[Any, ...]:
    answer = network(
        image_embeddings=[inputs[level] for level in _LEVELS],
        input_points=inputs["input_points"],
        input_labels=inputs["input_labels"],
    )
    return answer.pred_masks, answer.iou_scores, answer.object_score_logits


def _encoder_model(name: str, summary: str, size: int, backbone: dict[str, Any], channels: int, **more: Any) -> Recipe:
    return Recipe(
        name, summary, size, lambda side: _encoder(backbone, side, channels), (_PIXELS,), _features, outputs=_LEVELS, **more
    )


def _decoder_model(name: str, summary: str, size: int, channels: int, decoder: dict[str, Any], **more: Any) -> Recipe:
    def level(name: str, scale: int, width: int) -> Input:
        return features(name, lambda side: (1, width, side // scale, side // scale))

    inputs = (
        level(_LEVELS[0], 4, channels // 8),
        level(_LEVELS[1], 8, channels // 4),
        level(_LEVELS[2], _PATCH, channels),
        Input("input_points", lambda generator, side: side * generator.random((1, 1, 1, 2), np.float32)),
        Input("input_labels", lambda generator, _: generator.integers(0, 2, (1, 1, 1))),  # 1: on the object, 0: beside it
    )
    return Recipe(
        name, summary, size, lambda side: _decoder(side, channels, decoder), inputs, _masks,
        outputs=("masks", "iou_scores", "object_scores"), **more,
    )  # fmt: skip


MODELS = (
    _encoder_model("sam2-large", "SAM-2 Large, image encoder: 213 M weights", 1024, _LARGE, 256, paper_size=512),
    _encoder_model("sam2-tiny", "SAM-2 Tiny, image encoder: 27 M weights", 1024, {}, 256),
    _decoder_model("sam2-decoder", "SAM-2, prompt encoder and mask decoder: 4 M weights", 1024, 256, {}),
    _encoder_model("sam2-narrow", "five narrow blocks, windows that need padding", 64, _NARROW, 16, tiny=True),
    _decoder_model(
        "sam2-narrow-decoder", "the prompt encoder and mask decoder, narrow", 64, 16,
        {"mlp_dim": 32, "num_attention_heads": 2, "iou_head_hidden_dim": 16}, tiny=True,
    ),
)  # fmt: skip
