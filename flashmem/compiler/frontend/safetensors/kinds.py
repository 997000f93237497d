"""Kinds of decoders as the library transformers writes them: hyperparameters and roles of tensors under GGUF's names.

Defaults are those of the classes of settings in transformers, which leave out no key of their own when they save a model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmem.base.errors import UserError
from flashmem.compiler.frontend.safetensors.settings import Settings

_FULL = "full_attention"
_LOCAL = "sliding_attention"


@dataclass(frozen=True)
class FolderKind:
    """A kind of decoder.

    Attributes:
        name: llama.cpp's.
        defaults: of keys that a `config.json` lacks.
        activation: of the gated MLP.
        has_windows: whether layers may have a window.
        is_gemma: norms are around their scales, most of which are written less 1, and bound each part on both sides.
    """

    name: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    activation: str = "silu"
    has_windows: bool = False
    is_gemma: bool = False


KINDS: Mapping[str, FolderKind] = MappingProxyType(
    {
        "llama": FolderKind("llama"),
        "mistral": FolderKind("llama", {"num_key_value_heads": 8, "sliding_window": 4096}, has_windows=True),
        "qwen2": FolderKind("qwen2", {"num_key_value_heads": 32}),
        "qwen3": FolderKind("qwen3", {"num_key_value_heads": 32, "head_dim": 128}),
        "phi3": FolderKind("phi3", {"rms_norm_eps": 1e-5}, has_windows=True),
        "gemma2": FolderKind(
            "gemma2",
            {
                "head_dim": 256, "num_key_value_heads": 4, "sliding_window": 4096, "query_pre_attn_scalar": 256,
                "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
            },
            "gelu_pytorch_tanh", True, True,
        ),
        "gemma3_text": FolderKind(
            "gemma3",
            {
                "head_dim": 256, "num_key_value_heads": 4, "sliding_window": 4096, "query_pre_attn_scalar": 256,
                "rope_theta": 1e6, "rope_local_base_freq": 1e4,
            },
            "gelu_pytorch_tanh", True, True,
        ),
    }
)  # fmt: skip
"""By the key `model_type`."""

_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""The role of each part of a layer."""

_GEMMA_PARTS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}

_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def kind_of(settings: Settings) -> FolderKind:
    """The kind of a model. Raises UserError for an unknown one."""
    name = str(settings.take("model_type"))
    if name not in KINDS:
        is_mixture = any("expert" in key for key in settings.given)
        what = "is of a mixture of experts" if is_mixture else f"has the model_type {name!r}"
        raise UserError(f"{settings.path} {what}, which is not supported; supported are {', '.join(KINDS)}")
    return KINDS[name]


def role_of(name: str, kind: FolderKind) -> str | None:
    """The role of a tensor; None if it has none that is known."""
    place, _, what = name.rpartition(".")
    if place in _WHOLE:
        return f"{_WHOLE[place]}.{what}"
    *begin, part = place.split(".", 3)
    parts = _PARTS | (_GEMMA_PARTS if kind.is_gemma else {})
    if begin[:2] == ["model", "layers"] and len(begin) == 3 and begin[2].isdigit() and part in parts:
        return f"blk.{begin[2]}.{parts[part]}.{what}"
    return None


def hyperparameters(settings: Settings, kind: FolderKind) -> dict[str, Any]:
    """The hyperparameters of a model. Raises UserError for values that are not supported."""

    def take(name: str, default: Any = None) -> Any:
        return settings.take(name, kind.defaults.get(name, default))

    has_new_name = "hidden_activation" in settings.given
    settings.expect("hidden_activation" if has_new_name else "hidden_act", kind.activation)
    if has_new_name:
        settings.read.add("hidden_act")  # which old files of Gemma have too, and transformers does not read
    heads = int(settings.take("num_attention_heads"))
    hidden = int(settings.take("hidden_size"))
    size = int(take("head_dim") or hidden // heads)
    layers = int(settings.take("num_hidden_layers"))
    found: dict[str, Any] = {
        "block_count": layers,
        "embedding_length": hidden,
        "attention.head_count": heads,
        "attention.head_count_kv": int(take("num_key_value_heads") or heads),
        "attention.key_length": size,
        "attention.layer_norm_rms_epsilon": float(take("rms_norm_eps", 1e-6)),
        "context_length": int(settings.take("max_position_embeddings")),
    }
    if kind.is_gemma:
        found["attn_logit_softcapping"] = take("attn_logit_softcapping") or 0.0
        found["final_logit_softcapping"] = take("final_logit_softcapping") or 0.0
        found["attention.scale"] = float(take("query_pre_attn_scalar")) ** -0.5
    return {**found, **_windows(settings, kind, layers), **_rotary(settings, kind, size)}


def _windows(settings: Settings, kind: FolderKind, layers: int) -> dict[str, Any]:
    """The window, and which layers have it."""
    window = int(settings.take("sliding_window", kind.defaults.get("sliding_window")) or 0) if kind.has_windows else 0
    settings.read.add("sliding_window")  # others have it for layers that `use_sliding_window` or `layer_types` name
    types: Sequence[str] | None = settings.take("layer_types", None)
    found: dict[str, Any] = {"attention.sliding_window": window}
    if kind.is_gemma:
        period = settings.take("sliding_window_pattern", settings.take("_sliding_window_pattern", None))
        if types is not None:
            found["attention.sliding_window_pattern"] = [each == _LOCAL for each in types]
        elif period is not None:
            found["attention.sliding_window_pattern"] = int(period)
    elif types is not None and set(types) != {_LOCAL if window else _FULL}:
        raise settings.refusal("layer_types")
    if types is not None and not set(types) <= {_FULL, _LOCAL}:
        raise settings.refusal("layer_types")
    return found


def _rotary(settings: Settings, kind: FolderKind, size: int) -> dict[str, Any]:
    """Rotary positions: `rope_theta` and `rope_scaling`, since transformers 5 `rope_parameters`, perhaps by kind of layer."""
    base = settings.take("rope_theta", kind.defaults.get("rope_theta", 1e4))
    local = settings.take("rope_local_base_freq", kind.defaults.get("rope_local_base_freq", 1e4))
    scaling = dict(settings.take("rope_scaling", None) or {})
    given = settings.take("rope_parameters", None) or {}
    where = "rope_parameters" if given else "rope_scaling"
    if _LOCAL in given:
        local = given[_LOCAL].get("rope_theta", local)
        if given[_LOCAL].get("rope_type", "default") != "default":
            raise settings.refusal(where)
    scaling |= given.get(_FULL, given)
    base = scaling.pop("rope_theta", base)
    part = scaling.pop("partial_rotary_factor", settings.take("partial_rotary_factor", 1.0))
    type_ = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    found: dict[str, Any] = {
        "rope.dimension_count": int(size * part), "rope.freq_base": float(base), "rope.freq_base_swa": float(local)
    }  # fmt: skip
    if type_ == "linear":
        found["rope.scaling.factor"] = float(scaling.pop("factor"))
    elif type_ == "llama3":
        numbers = [float(scaling.pop(f"{name}factor")) for name in ("", "low_freq_", "high_freq_")]
        length = float(scaling.pop("original_max_position_embeddings"))
        found["rope_freqs"] = llama3_factors(found["rope.dimension_count"], float(base), length, *numbers)
    elif type_ != "default":
        raise settings.refusal(where)
    if type_ != "default" and scaling:
        raise settings.refusal(where)
    return found


def llama3_factors(size: int, base: float, length: float, factor: float, low: float, high: float) -> NDArray[np.float32]:
    """What the frequencies of Llama 3.1 and later are divided by, [size / 2].

    Waves longer than `length` / `low` become `factor` times as long, those shorter than `length` / `high` stay, and between
    them the frequency is interpolated.
    """
    frequencies = base ** (-np.arange(size // 2) * 2.0 / size)
    waves = 2 * math.pi / frequencies
    share = np.clip((length / waves - low) / (high - low), 0, 1)
    made: NDArray[np.float32] = (1 / ((1 - share) / factor + share)).astype(np.float32)
    return made
