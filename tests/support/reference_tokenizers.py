"""Tokenizers of the library `tokenizers`, as the files of well-known models have them."""

from __future__ import annotations

from functools import cache

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tests.support.gguf_models import sentence_pieces, vocabulary

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@cache
def byte_pairs(pattern: str) -> Tokenizer:
    """As the configurations of the models' tokenizers say (tokenizer.json of GPT-2, SmolLM2, Llama 3 and Qwen 2)."""
    tokens, merges = vocabulary()
    whole = pattern == "llama-bpe"
    made = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges, ignore_merges=whole))
    cut = {
        "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
        "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    }
    for name, digits in (("llama-bpe", "{1,3}"), ("qwen2", "")):
        split = pre_tokenizers.Split(Regex(_LLAMA3 % digits), "isolated")
        cut[name] = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    made.pre_tokenizer = pre_tokenizers.Sequence(cut[pattern])
    made.decoder = decoders.ByteLevel()
    return made


@cache
def characters(space_prefix: str) -> Tokenizer:
    """As transformers converts a SentencePiece model of byte pairs: each token is merged from any two others.

    `space_prefix`: one of `flashmem.bundle.language.SPACE_PREFIXES`.
    """
    tokens, scores, _ = sentence_pieces()
    numbers = {token: number for number, token in enumerate(tokens)}
    merges = [
        (token[:at], token[at:])
        for token in sorted(tokens[260:], key=lambda token: -scores[numbers[token]])
        for at in range(1, len(token))
        if token[:at] in numbers and token[at:] in numbers
    ]
    made = Tokenizer(models.BPE(numbers, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if space_prefix == "first":
        made.pre_tokenizer = pre_tokenizers.Metaspace("▁", "first", split=False)
    else:
        before = [normalizers.Prepend("▁")] if space_prefix == "always" else []
        made.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", "▁")])
    return made
