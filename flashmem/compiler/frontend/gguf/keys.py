"""What becomes of the keys of a GGUF file: read, without effect on an answer, or a reason to refuse the file.

A key that this version does not know may change the answer. So every key of the model and of its tokenizer is read, is in
`HARMLESS`, has a value in `NEUTRAL` that says nothing, or the file is refused. Names are those of llama.cpp
(https://github.com/ggml-org/llama.cpp, `gguf-py/gguf/constants.py`), and so is what they mean.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

from flashmem.compiler.frontend.decoder.file import refused_setting

_DESCRIPTION = "describes the model, its origin or its file"
_SHAPE = "repeats what shapes of tensors say"
_OTHER_NORM = "is of a normalisation that these kinds do not have"
_EXPERTS = "is of experts, which a file without expert_count does not have"
_YARN = "is of YaRN and longrope, which are refused by rope.scaling.type"
_OTHER_TOKENIZER = "is of the other kind of tokenizer"
_NEVER_WRITTEN = "names a token that an answer neither needs nor ends with"
_ON_REQUEST = "is for another use than a conversation"
_SAMPLING = "recommends a way to choose tokens that flashmem does not have; the probabilities are the same"
_PARTS_READ = "is of a part of a model; all parts are read"
_CONTAINER = "is used by the package gguf, which reads the file"

HARMLESS: Mapping[str, str] = MappingProxyType(
    {
        "GGUF.*": _CONTAINER,
        "general.alignment": _CONTAINER,
        "general.sampling.*": _SAMPLING,
        "general.*": _DESCRIPTION,
        "split.*": _PARTS_READ,
        "{arch}.vocab_size": _SHAPE,
        "{arch}.feed_forward_length": _SHAPE,
        "{arch}.tensor_data_layout": _DESCRIPTION,
        "{arch}.attention.layer_norm_epsilon": _OTHER_NORM,
        "{arch}.attention.group_norm_epsilon": _OTHER_NORM,
        "{arch}.attention.group_norm_groups": _OTHER_NORM,
        "{arch}.expert_feed_forward_length": _EXPERTS,
        "{arch}.expert_shared_feed_forward_length": _EXPERTS,
        "{arch}.expert_weights_scale": _EXPERTS,
        "{arch}.expert_weights_norm": _EXPERTS,
        "{arch}.expert_gating_func": _EXPERTS,
        "{arch}.rope.scaling.original_context_length": _YARN,
        "{arch}.rope.scaling.finetuned": _DESCRIPTION,
        "{arch}.rope.scaling.yarn_*": _YARN,
        "tokenizer.chat_template.*": _ON_REQUEST,
        "tokenizer.chat_templates": _ON_REQUEST,
        "tokenizer.huggingface.json": _DESCRIPTION,
        "tokenizer.ggml.merges": _OTHER_TOKENIZER,
        "tokenizer.ggml.scores": _OTHER_TOKENIZER,
        "tokenizer.ggml.token_type_count": _SHAPE,
        "tokenizer.ggml.unknown_token_id": _NEVER_WRITTEN,
        "tokenizer.ggml.seperator_token_id": _NEVER_WRITTEN,
        "tokenizer.ggml.padding_token_id": _NEVER_WRITTEN,
        "tokenizer.ggml.mask_token_id": _NEVER_WRITTEN,
        "tokenizer.ggml.fim_pre_token_id": _ON_REQUEST,
        "tokenizer.ggml.fim_suf_token_id": _ON_REQUEST,
        "tokenizer.ggml.fim_mid_token_id": _ON_REQUEST,
        "tokenizer.ggml.prefix_token_id": _ON_REQUEST,
        "tokenizer.ggml.suffix_token_id": _ON_REQUEST,
        "tokenizer.ggml.middle_token_id": _ON_REQUEST,
    }
)
"""Keys, some with `*` for any end, that are not read, and why no answer depends on them."""

NEUTRAL: Mapping[str, Collection[Any]] = MappingProxyType(
    {
        "general.quantization_version": (2,),
        "general.type": ("model",),
        "{arch}.attention.causal": (True,),
        "{arch}.attention.clamp_kqv": (0,),
        "{arch}.attention.max_alibi_bias": (0,),
        "{arch}.attention.scale": (0,),
        "{arch}.attention.shared_kv_layers": (0,),
        "{arch}.attention.sliding_window": (0,),
        "{arch}.attn_logit_softcapping": (0,),
        "{arch}.embedding_scale": (0, 1),
        "{arch}.expert_shared_count": (0,),
        "{arch}.expert_used_count": (0,),
        "{arch}.final_logit_softcapping": (0,),
        "{arch}.leading_dense_block_count": (0,),
        "{arch}.logit_scale": (0, 1),
        "{arch}.nextn_predict_layers": (0,),
        "{arch}.pooling_type": (0,),
        "{arch}.residual_scale": (0, 1),
        "{arch}.rope.scaling.alpha": (0,),
        "{arch}.rope.scaling.attn_factor": (0, 1),
        "{arch}.swin_norm": (False,),
        "{arch}.use_parallel_residual": (False,),
        "tokenizer.ggml.add_eos_token": (False,),
        "tokenizer.ggml.add_sep_token": (False,),
        "tokenizer.ggml.add_space_prefix": (False,),
        "tokenizer.ggml.remove_extra_whitespaces": (False,),
    }
)
"""Keys that are not read, and their values without effect."""

_PARTS = ("adapter.", "clip.", "diffusion.", "imatrix.", "split.", "tokenizer.", "xielu.")
"""Beginnings of keys of parts of a model, besides its architecture's and "general."; others are notes of other programs."""


def harmless_because(key: str, kind: str) -> str | None:
    """Why no answer depends on this key of a model of the architecture `kind`; None if one may."""
    if (general := _general(key, kind)) in NEUTRAL:
        return None
    if not key.startswith((*_PARTS, "general.", "GGUF.", f"{kind}.")):
        return "is of another program or architecture"
    return next((why for pattern, why in HARMLESS.items() if fnmatchcase(general, pattern)), None)


def check_keys(keys: Iterable[str], value_of: Callable[[str], Any], kind: str, path: Any) -> None:
    """Raise UserError for the first of `keys`, which were not read from the file `path`, that may change the answer."""
    for key in keys:
        if harmless_because(key, kind) is not None:
            continue
        if (value := value_of(key)) not in NEUTRAL.get(_general(key, kind), ()):
            raise refused_setting(path, f"field {key}", value, "use another file of the model")


def _general(key: str, kind: str) -> str:
    """The key as the tables here have it."""
    return f"{{arch}}.{key.removeprefix(f'{kind}.')}" if key.startswith(f"{kind}.") else key
