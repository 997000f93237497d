"""`tokenizer.json`, the file of the library `tokenizers`, as the language part of a bundle (`flashmem.bundle.language`).

Supported are byte-level byte pairs with the patterns of GPT-2, SmolLM, Llama 3 and Qwen 2, and byte pairs over characters with
"▁" for spaces, which are SentencePiece's (Llama 2, Mistral, Phi-3, Gemma). The format is documented by `tokenizers`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flashmem.base.errors import UserError
from flashmem.bundle.language import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED

_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _SPLIT % "{1,3}"
_QWEN2 = _SPLIT % ""

_SPACE = "▁"


def tokenizer_fields(given: Mapping[str, Any], path: Path, size: int) -> dict[str, Any]:
    """The fields `pattern`, `tokens`, `types`, `merges`, `scores`, `space_prefix` and `nfc` of a language.

    `given` is the content of the file `path`, and `size` the number of logits: tokens that the file lacks are unused.

    Raises:
        UserError: a tokenizer of another kind.
        KeyError, TypeError, ValueError: the file is damaged.
    """
    model = given["model"]
    if model.get("type") != "BPE":
        raise _unsupported(path, f"a tokenizer of the kind {model.get('type')!r}")
    merges = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
    numbers = {str(token): int(number) for token, number in model["vocab"].items()}
    added = {int(each["id"]): each for each in given.get("added_tokens", [])}
    numbers |= {str(each["content"]): number for number, each in added.items()}
    count = max(size, 1 + max(numbers.values()))
    tokens = [f"<unused {number}>" for number in range(count)]
    types = [UNUSED] * count
    for token, number in numbers.items():
        tokens[number] = token
        types[number] = NORMAL
    for number, each in added.items():
        types[number] = CONTROL if each["special"] else USER_DEFINED
    pattern, prefix = _kind(given, path)
    scores = [0.0] * count if pattern is None else []
    if pattern is None:
        made = {merge.replace(" ", "", 1): rank for rank, merge in reversed([*enumerate(merges)])}
        for token, number in numbers.items():
            if types[number] == NORMAL:
                types[number] = _character_kind(token, made)
                scores[number] = -float(made.get(token, 0))
        unknown = numbers.get(str(model.get("unk_token")))
        if unknown is not None:
            types[unknown] = UNKNOWN
    return {
        "pattern": pattern,
        "tokens": tokens,
        "types": types,
        "merges": [] if pattern is None else merges,
        "scores": scores,
        "space_prefix": prefix,
        "nfc": any(step["type"] == "NFC" for step in _steps(given.get("normalizer"), "normalizers")),
    }


def begins_with(given: Mapping[str, Any]) -> str | None:
    """The token that `tokenizers` puts before a text, or None."""
    for step in _steps(given.get("post_processor"), "processors"):
        for part in step.get("single", []) if step["type"] == "TemplateProcessing" else []:
            return str(part["SpecialToken"]["id"]) if "SpecialToken" in part else None
    return None


def _character_kind(token: str, made: Mapping[str, int]) -> int:
    """The type of a token of SentencePiece's: some are bytes, and one that no merge makes is never used."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return BYTE
    return NORMAL if len(token) == 1 or token in made else UNUSED


def _kind(given: Mapping[str, Any], path: Path) -> tuple[str | None, str]:
    """The pattern, None for SentencePiece's, and where a space is put before a text."""
    model = given["model"]
    steps = list(_steps(given.get("pre_tokenizer"), "pretokenizers"))
    normal = list(_steps(given.get("normalizer"), "normalizers"))
    if model.get("byte_fallback") and all(step["type"] != "ByteLevel" for step in steps):
        return None, _space_prefix(normal, steps, path)
    if others := [step["type"] for step in normal if step["type"] != "NFC"]:
        raise _unsupported(path, f"a normalizer {others[0]}")
    kinds: Sequence[str] = [step["type"] for step in steps]
    *first, last = [*steps] or [{}]
    if kinds[-1:] != ["ByteLevel"] or last.get("add_prefix_space"):
        raise _unsupported(path, f"a tokenizer that cuts a text by {' and '.join(kinds) or 'nothing'}")
    whole = bool(model.get("ignore_merges"))
    if not first and last.get("use_regex", True) and not whole:
        return "gpt-2", "never"
    if kinds[:-1] == ["Digits"] and first[0].get("individual_digits") and last.get("use_regex", True) and not whole:
        return "smollm", "never"
    if kinds[:-1] == ["Split"] and first[0].get("behavior") == "Isolated" and not last.get("use_regex", True):
        regex = first[0]["pattern"].get("Regex")
        for pattern, known, wanted in (("llama-bpe", _LLAMA3, True), ("qwen2", _QWEN2, False)):
            if regex == known and whole == wanted:
                return pattern, "never"
    raise _unsupported(path, "a tokenizer with a pattern that is not one of GPT-2, SmolLM, Llama 3 and Qwen 2")


def _space_prefix(normal: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]], path: Path) -> str:
    """Where a space is put before a text: one of `bundle.language.SPACE_PREFIXES`."""
    prefix = "never"
    replaced = False
    for step in (*normal, *steps):
        if step["type"] == "Prepend" and step.get("prepend") == _SPACE:
            prefix = "always"
        elif step["type"] == "Replace" and step["pattern"].get("String") == " " and step.get("content") == _SPACE:
            replaced = True
        elif step["type"] == "Metaspace" and step.get("replacement") == _SPACE and not step.get("split", True):
            prefix = step["prepend_scheme"]
            replaced = True
            if prefix == "always":
                raise _unsupported(path, "a Metaspace with the scheme 'always'")
        elif not (step["type"] == "Split" and step["pattern"].get("String") == " "):  # spaces were replaced before
            raise _unsupported(path, f"a step {step['type']} before SentencePiece's tokens")
    if not replaced:
        raise _unsupported(path, "a tokenizer over characters that does not replace spaces")
    return prefix


def _steps(part: Mapping[str, Any] | None, inner: str) -> Iterator[Mapping[str, Any]]:
    """The steps of a normalizer, pre-tokenizer or post-processor; `inner` is the key of a sequence of them."""
    if part is None:
        return
    if part["type"] == "Sequence":
        for each in part[inner]:
            yield from _steps(each, inner)
    else:
        yield part


def _unsupported(path: Path, what: str) -> UserError:
    return UserError(
        f"{path} has {what}, which is not supported; supported are byte pairs as of GPT-2, SmolLM, Llama 3 and Qwen 2, and "
        f"SentencePiece's with byte fallback"
    )
