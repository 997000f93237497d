"""Recipes of GPT-Neo."""

from __future__ import annotations

from typing import Any

from benchmarks.exports.recipe import Recipe, Tensors, exporter_class, tokens

_VOCABULARY = 50257
_TINY_VOCABULARY = 307


def _gptneo(**config: Any) -> Any:
    return exporter_class("transformers", "GPTNeoForCausalLM")(exporter_class("transformers", "GPTNeoConfig")(**config))


def _sizes(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    """The configuration of a GPT-Neo: alternating global and local attention, the head not tied to the table."""
    return {
        "hidden_size": hidden,
        "num_layers": layers,
        "num_heads": heads,
        "attention_types": [[["global", "local"], layers // 2]],
        "tie_word_embeddings": False,
    }


_TINY = _sizes(2, 32, 4) | {
    "vocab_size": _TINY_VOCABULARY, "max_position_embeddings": 64, "window_size": 8, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip


def _logits(network: Any, inputs: Tensors) -> tuple[Any, ...]:
    return (network(**inputs, use_cache=False).logits,)


def _scale_scores(torch: Any, network: Any, inputs: Tensors) -> None:
    """Scale the query and key weights, because GPT-Neo does not divide its scores by the root of a head's width."""
    width = network.config.hidden_size // network.config.num_heads
    for path, module in network.named_modules():
        if path.endswith(("q_proj", "k_proj")):
            module.weight *= width**-0.25


def _full(name: str, summary: str, sizes: dict[str, Any], *, dynamo_only: str = "") -> Recipe:
    ids = tokens(_VOCABULARY)
    return Recipe(
        name, summary, 128, lambda _: _gptneo(**sizes), (ids,), _logits, size_means="tokens", tune=_scale_scores,
        dynamo_only=dynamo_only,
    )  # fmt: skip


def _tiny(name: str, summary: str, *, tied: bool) -> Recipe:
    ids = tokens(_TINY_VOCABULARY)
    config = _TINY | {"tie_word_embeddings": tied}
    return Recipe(
        name, summary, 16, lambda _: _gptneo(**config), (ids,), _logits, size_means="tokens", tune=_scale_scores, tiny=True
    )


_TOO_LARGE = "it needs four times the weights in memory, and writes hundreds of files"

MODELS = (
    _full("gptneo-125m", "GPT-Neo-125M, head not tied: 164 M weights", _sizes(12, 768, 12)),
    _full(
        "gptneo-1.3b",
        "GPT-Neo-1.3B, head not tied: 1416 M weights; 6 GB of memory to export",
        _sizes(24, 2048, 16),
        dynamo_only=_TOO_LARGE,
    ),
    _full(
        "gptneo-2.7b",
        "GPT-Neo-2.7B, head not tied: 2786 M weights; 11 GB of memory to export",
        _sizes(32, 2560, 20),
        dynamo_only=_TOO_LARGE,
    ),
    _tiny("gptneo-tiny", "two narrow layers, one global and one local", tied=False),
    _tiny("gptneo-tiny-tied", "the same with the head tied to the table", tied=True),
)
