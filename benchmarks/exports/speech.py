"""Whisper: the encoder of a spectrogram, and the text decoder with and without attention to it."""

from __future__ import annotations

from typing import Any

from benchmarks.exports.recipe import Recipe, Tensors, exporter_class, features, tokens

_MODULE = "transformers.models.whisper.modeling_whisper"
_SECONDS_30 = 3000  # frames of 10 ms, the input of the published encoder
_NO_LEGACY = "it cannot trace how transformers makes the mask of the decoder"

_MEDIUM = {
    "vocab_size": 51865, "num_mel_bins": 80, "d_model": 1024, "encoder_layers": 24, "decoder_layers": 24,
    "encoder_attention_heads": 16, "decoder_attention_heads": 16, "encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096,
}  # fmt: skip
_TINY = {
    "vocab_size": 307, "num_mel_bins": 8, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "max_target_positions": 32, "pad_token_id": 1, "bos_token_id": 1, "eos_token_id": 1, "decoder_start_token_id": 1,
}  # fmt: skip


def _half(kind: str, frames: int, config: dict[str, Any]) -> Any:
    """WhisperEncoder or WhisperDecoder; the encoder halves the number of frames."""
    if frames % 2:
        raise ValueError("the number of frames must be even")
    configuration = exporter_class("transformers", "WhisperConfig")(**config, max_source_positions=frames // 2)
    return exporter_class(_MODULE, kind)(configuration)


def _encoded(network: Any, inputs: Tensors) -> tuple[Any, ...]:
    return (network(**inputs).last_hidden_state,)


def _logits(network: Any, inputs: Tensors) -> tuple[Any, ...]:
    """Logits with the token table as head."""
    return (network(**inputs, use_cache=False).last_hidden_state @ network.embed_tokens.weight.T,)


def _encoder(name: str, summary: str, frames: int, config: dict[str, Any], **more: Any) -> Recipe:
    spectrogram = features("input_features", lambda size: (1, config["num_mel_bins"], size))
    return Recipe(
        name, summary, frames, lambda size: _half("WhisperEncoder", size, config), (spectrogram,), _encoded,
        outputs=("last_hidden_state",), size_means="frames", **more,
    )  # fmt: skip


def _decoder(
    name: str, summary: str, length: int, config: dict[str, Any], frames: int, *, cross: bool = True, **more: Any
) -> Recipe:
    states = features("encoder_hidden_states", lambda _: (1, frames // 2, config["d_model"]))
    return Recipe(
        name, summary, length, lambda _: _half("WhisperDecoder", frames, config),
        (tokens(config["vocab_size"]), *((states,) if cross else ())), _logits,
        size_means="tokens", dynamo_only=_NO_LEGACY, **more,
    )  # fmt: skip


MODELS = (
    _encoder("whisper-medium-encoder", "Whisper-medium, encoder of 30 s: 307 M weights", _SECONDS_30, _MEDIUM),
    _decoder("whisper-medium-decoder", "Whisper-medium, decoder: 457 M weights", 128, _MEDIUM, _SECONDS_30),
    _decoder(
        "whisper-medium-text", "Whisper-medium, decoder without cross attention: 356 M weights", 128, _MEDIUM, _SECONDS_30,
        cross=False, paper_size=152,
    ),
    _encoder("whisper-tiny-encoder", "two narrow encoder layers", 32, _TINY, tiny=True),
    _decoder("whisper-tiny-decoder", "two narrow decoder layers", 12, _TINY, 32, tiny=True),
)  # fmt: skip
