"""What becomes of the keys of a `config.json`: read, without effect on an answer, or a reason to refuse the model.

A key that this version does not know may change the answer. So every key is read, is in `HARMLESS`, has a value in `NEUTRAL`
that says nothing, or the model is refused. Names and meanings are those of the library transformers
(https://github.com/huggingface/transformers).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flashmem.base.errors import UserError
from flashmem.compiler.frontend.decoder.file import refused_setting

_TRAINING = "is of training"
_DESCRIPTION = "describes the model or its origin"
_SHAPE = "repeats what shapes of tensors say"
_RUNNING = "is of how transformers runs the model"
_TOKENS = "names a token; those that begin and end a text are read with the tokenizer"
_CHOICE = "is of choosing tokens, as old files have it; generation_config.json is read for that"

HARMLESS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            ("*_dropout*", "*_pdrop", "initializer_range", "gradient_checkpointing"), _TRAINING
        ),
        **dict.fromkeys(
            (
                "_name_or_path", "architectures", "auto_map", "dtype", "finetuning_task", "id2label", "is_llama_config",
                "label2id", "model_type", "problem_type", "task_specific_params", "tokenizer_class", "torch_dtype",
                "transformers.js_config", "transformers_version", "unsloth_*",
            ),
            _DESCRIPTION,
        ),
        **dict.fromkeys(
            ("attention_bias", "intermediate_size", "mlp_bias", "vocab_size", "original_max_position_embeddings"), _SHAPE
        ),
        **dict.fromkeys(
            (
                "_attn_implementation*", "attn_implementation", "cache_implementation", "chunk_size_feed_forward",
                "output_attentions", "output_hidden_states", "output_scores", "pretraining_tp", "return_dict*", "torchscript",
                "use_bfloat16", "use_cache",
            ),
            _RUNNING,
        ),
        "max_window_layers": "is of windows, which use_sliding_window turns on",
        **dict.fromkeys(("*_token_id", "prefix", "bad_words_ids", "*suppress_tokens"), _TOKENS),
        **dict.fromkeys(
            (
                "diversity_penalty", "do_sample", "early_stopping", "*no_repeat_ngram_size", "exponential_decay_length_penalty",
                "length_penalty", "max_length", "min_length", "num_beam*", "num_return_sequences", "remove_invalid_values",
                "repetition_penalty", "temperature", "tf_legacy_loss", "top_k", "top_p", "typical_p",
            ),
            _CHOICE,
        ),
    }
)  # fmt: skip
"""Keys, some with `*` for any part, that are not read, and why no answer depends on them."""

NEUTRAL: Mapping[str, Collection[Any]] = MappingProxyType(
    {
        "add_cross_attention": (False,),
        "cross_attention_hidden_size": (None,),
        "is_decoder": (False, True),
        "is_encoder_decoder": (False,),
        "pruned_heads": ({}, None),
        "quantization_config": (None,),
        "rope_interleaved": (False,),
        "tie_encoder_decoder": (False,),
        "use_bidirectional_attention": (False, None),
        "use_mrope": (False,),
        "use_sliding_window": (False,),
    }
)
"""Keys that are not read, and their values without effect."""

_ABSENT = object()


class Settings:
    """The keys of a `config.json` at `path`, and which of them were read."""

    def __init__(self, given: Mapping[str, Any], path: Path) -> None:
        self.given = given
        self.path = path
        self.read: set[str] = set()

    def take(self, name: str, default: Any = _ABSENT) -> Any:
        """The value of a key, None if it is null. Raises UserError if it is missing and has no default."""
        self.read.add(name)
        found = self.given.get(name, default)
        if found is _ABSENT:
            raise UserError(f"{self.path} does not say {name}; download it again")
        return found

    def expect(self, name: str, value: Any) -> None:
        """Raise UserError if a key is there and has another value than `value`."""
        if self.take(name, value) != value:
            raise self.refusal(name)

    def refusal(self, name: str) -> UserError:
        """What to say of a value that is not supported."""
        return refused_setting(self.path, f"key {name}", self.given.get(name), "use another model")

    def check(self) -> None:
        """Raise UserError for the first key that was not read and may change the answer."""
        for name, value in self.given.items():
            is_neutral = value in NEUTRAL.get(name, ())
            if name not in self.read and not is_neutral and not any(fnmatchcase(name, each) for each in HARMLESS):
                raise self.refusal(name)
