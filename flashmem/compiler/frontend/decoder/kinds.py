"""The kinds of decoders: what each makes of the hyperparameters of its file, under llama.cpp's names.

The forms of the models are those of their papers and of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from flashmem.base.errors import UserError
from flashmem.compiler.frontend.decoder.description import Decoder, Rotary
from flashmem.compiler.frontend.decoder.file import DecoderFile

_LAYERS_2 = 2
_LAYERS_3 = 6
"""Gemma 2 and 3: of how many layers the last one has no window."""

_LOCAL_BASE = 10000.0
"""Gemma 3: the base of rotary positions in layers with a window."""

_WIDE = {"gemma2": 46, "gemma3": 62}
"""Layers of the models of 27 billion weights, whose scores are scaled by another size than that of a head."""


def decoder_of(file: DecoderFile) -> Decoder:
    """The decoder in `file`. Raises UserError for an unknown kind, or one with parts that are not supported."""
    if file.kind not in _KINDS:
        raise UserError(f"{file.path} has the architecture {file.kind!r}; supported are {', '.join(_KINDS)}")
    if file.value("expert_count", 0) or file.has("blk.0.ffn_gate_inp.weight"):
        raise UserError(f"{file.path} is a mixture of experts, which is not supported; use a dense model")
    return _KINDS[file.kind](file, _common(file))


def _common(file: DecoderFile) -> Decoder:
    """What all kinds share."""

    def number(name: str, default: int | None = None) -> int:
        value = file.value(name, default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise UserError(f"{file.path} has layers of several sizes ({name}), which is not supported")
            value = value[0]
        return int(value)

    layers, heads, hidden = (number(name) for name in ("block_count", "attention.head_count", "embedding_length"))
    size = number("attention.key_length", hidden // heads)
    if number("attention.value_length", size) != size:
        raise UserError(f"{file.path} has values of another length than keys, which is not supported")
    rotary = Rotary(
        number("rope.dimension_count", size),
        float(file.value("rope.freq_base", 10000.0)),
        _scaling(file),
    )
    return Decoder(
        layers,
        hidden,
        heads,
        number("attention.head_count_kv", heads),
        size,
        file.tensor("token_embd.weight").shape[0],
        float(file.value("attention.layer_norm_rms_epsilon")),
        [rotary] * layers,
        [0] * layers,
    )


def _scaling(file: DecoderFile) -> float:
    """What positions are divided by. A factor without a type is linear, also under its name in files of 2023."""
    scaling = str(file.value("rope.scaling.type", "linear"))
    if scaling not in ("none", "linear"):
        raise UserError(f"{file.path} scales its rotary positions ({scaling!r}), which is not supported")
    earlier = file.value("rope.scale_linear", 0.0)
    factor = float(file.value("rope.scaling.factor", earlier))
    return factor if factor and scaling == "linear" else 1.0


def _llama(file: DecoderFile, common: Decoder) -> Decoder:
    """Llama (Touvron et al. 2023), SmolLM, Mistral."""
    return replace(common, interleaved=file.interleaved, windows=[_window(file)] * common.layers)


def _qwen(file: DecoderFile, common: Decoder) -> Decoder:
    """Qwen 2 has biases of queries, keys and values; Qwen 3 normalises the heads of queries and keys. Tensors say so."""
    return common


def _phi3(file: DecoderFile, common: Decoder) -> Decoder:
    """Phi-3 (Abdin et al. 2024), without the long context."""
    if file.has("rope_factors_long.weight"):
        raise UserError(f"{file.path} scales its rotary positions for a long context, which is not supported")
    return replace(common, windows=[_window(file)] * common.layers)


def _gemma(file: DecoderFile, common: Decoder) -> Decoder:
    """What all Gemma models share (Gemma Team 2024)."""
    return replace(common, gelu=True, embedding_scale=math.sqrt(common.hidden))


def _gemma2(file: DecoderFile, common: Decoder) -> Decoder:
    """Gemma 2: every other layer has a window, from the first on; scores and logits are bounded."""
    window = _window(file, 4096)
    return replace(
        _gemma(file, common),
        windows=[window if each else 0 for each in _local(file, common.layers, _LAYERS_2)],
        scale=_scale(file, common),
        score_cap=float(file.value("attn_logit_softcapping", 50.0)),
        logit_cap=float(file.value("final_logit_softcapping", 30.0)),
    )


def _gemma3(file: DecoderFile, common: Decoder) -> Decoder:
    """Gemma 3: one of six layers has no window, and rotary positions of its own."""
    window = int(file.value("attention.sliding_window"))
    is_local = _local(file, common.layers, _LAYERS_3)
    local = Rotary(common.rotary[0].size, float(file.value("rope.freq_base_swa", _LOCAL_BASE)))
    return replace(
        _gemma(file, common),
        rotary=[local if each else whole for each, whole in zip(is_local, common.rotary, strict=True)],
        windows=[window if each else 0 for each in is_local],
        scale=_scale(file, common),
        score_cap=float(file.value("attn_logit_softcapping", 0.0)),
        logit_cap=float(file.value("final_logit_softcapping", 0.0)),
    )


def _window(file: DecoderFile, default: int = 0) -> int:
    """Keys that a query sees in a layer with a window; 0 for all of them."""
    return int(file.value("attention.sliding_window", default))


def _local(file: DecoderFile, layers: int, period: int) -> list[bool]:
    """Whether each layer has a window: all but the last one of each `period`, unless the file has another one or a list."""
    given = file.value("attention.sliding_window_pattern", period)
    if not isinstance(given, list):
        return [given == 0 or layer % given < given - 1 for layer in range(layers)]
    if len(given) != layers:
        raise UserError(f"{file.path} says of {len(given)} layers whether they have a window, and has {layers}")
    return [bool(each) for each in given]


def _scale(file: DecoderFile, decoder: Decoder) -> float:
    """The scale of scores."""
    is_wide = decoder.layers == _WIDE[file.kind]
    usual = 1 / math.sqrt(decoder.hidden / decoder.heads if is_wide else decoder.size)
    return float(file.value("attention.scale", 0.0)) or usual


_KINDS: Mapping[str, Callable[[DecoderFile, Decoder], Decoder]] = MappingProxyType(
    {
        "llama": _llama,
        "qwen2": _qwen,
        "qwen3": _qwen,
        "phi3": _phi3,
        "gemma2": _gemma2,
        "gemma3": _gemma3,
    }
)
