"""A folder of a language model: ONNX files of onnxruntime-genai, optimum or transformers.js beside tokenizer and settings.

Files: the decoder (`genai_config.json` names it, or it has one of the usual names), `tokenizer.json`, `tokenizer_config.json`,
`chat_template.jinja`, `config.json` and `generation_config.json`, as the library transformers writes them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import onnx

from flashmem.base.errors import MissingFileError, UserError
from flashmem.bundle.language import BATCH_TOKENS, CONTROL, IDS
from flashmem.compiler.frontend.language.cached_decoder import MASK, POSITIONS, CacheSize, with_fixed_cache
from flashmem.compiler.frontend.language.chat import chat_fields
from flashmem.compiler.frontend.language.model import END_TOKENS, LanguageModel, cache_length
from flashmem.compiler.frontend.language.tokenizer_file import begins_with, tokenizer_fields

_DECODERS = ("model.onnx", "decoder_model_merged.onnx", "decoder_with_past_model.onnx")
_TOKENIZER = "tokenizer.json"
_GENAI = "genai_config.json"
_CONFIG = "config.json"
_CONTEXT = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length")


def read_folder(path: Path, max_length: int | None, batch: int = 1) -> LanguageModel:
    """The language model in the folder `path`. `max_length`: tokens that the cache holds, in each row of the `batch`.

    Raises:
        MissingFileError: no decoder or no tokenizer.
        UserError: a file is damaged or of an unknown kind; the model has no room for `max_length`.
    """
    folder = _Folder(path)
    try:
        return folder.model(max_length, batch)
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise UserError(f"a file in {path} is damaged, or of an unknown kind ({type(error).__name__}: {error})") from error


class _Folder:
    """The settings in a folder. Methods raise any error for a damaged file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.read: list[Path] = []
        self.genai = self._json(_GENAI).get("model", {})
        self.config = self._json(_CONFIG)
        self.config = self.config.get("text_config", self.config)

    def model(self, max_length: int | None, batch: int) -> LanguageModel:
        """The decoder, and its language."""
        decoder = self.genai.get("decoder", {})
        spare = BATCH_TOKENS if batch > 1 else 0  # places in the cache, for which the file must have positions
        length = cache_length(max_length, self._number(*_CONTEXT), self.path, spare)
        onnx_file = self._decoder_file()
        heads = self._number("num_attention_heads", "n_head", "num_heads")
        keys = self._number("num_key_value_heads", default=heads)
        size = self._number("head_size", "head_dim", default=0) or self._number("hidden_size", "n_embd") // heads
        words = self._number("vocab_size")
        rewrite = partial(_rewrite, names=_names(decoder), size=CacheSize(keys, size, length + spare, batch), path=onnx_file)
        language = {**self.language(words), "max_length": length}
        return LanguageModel(onnx_file, json.dumps(language).encode(), rewrite, tuple(self.read))

    def _number(self, *names: str, default: int | None = None) -> int:
        """The first of these settings that is given."""
        settings = (self.genai.get("decoder", {}), self.genai, self.config)
        found = (each[name] for name in names for each in settings if each.get(name) is not None)
        number = next(found, default)
        if number is None:
            raise UserError(f"{self.path} does not say {names[0]} in {_GENAI} or {_CONFIG}")
        return int(number)

    def language(self, words: int) -> dict[str, Any]:
        """The tokenizer, the tokens that begin and end a text, and the chat template in pieces."""
        path = self.path / _TOKENIZER
        given = self._json(_TOKENIZER)
        if not given:
            raise MissingFileError(
                f"{self.path} has no {_TOKENIZER}; save the tokenizer there with transformers (save_pretrained)"
            )
        fields = tokenizer_fields(given, path, words)
        tokens = fields["tokens"]
        types = fields["types"]
        settings = self._json("tokenizer_config.json")
        generation = self._json("generation_config.json")
        first, last = (_token(settings.get(name)) for name in ("bos_token", "eos_token"))
        ends = [
            *_numbers(self.genai, "eos_token_id"),
            *_numbers(generation, "eos_token_id"),
            *_numbers(self.config, "eos_token_id"),
        ]
        ends += [tokens.index(last)] if last in tokens else []
        ends += [number for number, token in enumerate(tokens) if types[number] == CONTROL and token in END_TOKENS]
        begin = begins_with(given)
        if begin is None and settings.get("add_bos_token"):
            begin = first
        template = self._template(settings)
        marks = {"bos_token": first or "", "eos_token": last or ""}
        return {
            **fields,
            "begin": None if begin is None else tokens.index(begin),
            "ends": list(dict.fromkeys(ends)),
            **chat_fields(template, marks),
        }

    def _template(self, settings: Mapping[str, Any]) -> str:
        file = self.path / "chat_template.jinja"
        if file.is_file():
            self.read.append(file)
            return file.read_text(encoding="utf-8")
        given = settings.get("chat_template") or ""
        if isinstance(given, str):
            return given
        return next((str(each["template"]) for each in given if each["name"] == "default"), "")

    def _decoder_file(self) -> Path:
        """The ONNX file of the decoder."""
        named = self.genai.get("decoder", {}).get("filename")
        if named and (Path(named).is_absolute() or ".." in Path(named).parts):
            raise UserError(
                f"{self.path / _GENAI} names the decoder {named!r}, outside the model's folder: only files in it are read"
            )
        places = [self.path / named] if named else [self.path / sub / name for sub in ("", "onnx") for name in _DECODERS]
        if (found := next((place for place in places if place.is_file()), None)) is not None:
            return found
        others = sorted(str(file.relative_to(self.path)) for file in self.path.glob("**/*.onnx"))
        raise MissingFileError(
            f"{self.path} has no {named or 'model.onnx'}"
            + (f"; of {', '.join(others)}, copy or rename one to it" if others else "")
        )

    def _json(self, name: str) -> dict[str, Any]:
        """The content of a file, empty if it is not there."""
        file = self.path / name
        if not file.is_file():
            return {}
        self.read.append(file)
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return content


def _rewrite(model: onnx.ModelProto, *, names: Mapping[str, str], size: CacheSize, path: Path) -> None:
    """Give inputs and outputs their usual names, and the caches a fixed length."""
    if names:
        values = [*model.graph.input, *model.graph.output]
        for value in values:
            value.name = names.get(value.name, value.name)
        for node in model.graph.node:
            node.input[:] = [names.get(name, name) for name in node.input]
            node.output[:] = [names.get(name, name) for name in node.output]
    with_fixed_cache(model, size, path)


def _names(decoder: Mapping[str, Any]) -> dict[str, str]:
    """The usual name of each input and output that `genai_config.json` gives another one."""
    usual = {"input_ids": IDS, "attention_mask": MASK, "position_ids": POSITIONS, "logits": "logits"}
    given = {**decoder.get("inputs", {}), **decoder.get("outputs", {})}
    names = {given[key]: name for key, name in usual.items() if key in given}
    for side, name in (("past", "past_key_values"), ("present", "present")):
        for kind in ("key", "value"):
            if pattern := given.get(f"{side}_{kind}_names"):
                names |= {pattern % layer: f"{name}.{layer}.{kind}" for layer in range(int(decoder["num_hidden_layers"]))}
    return {old: new for old, new in names.items() if old != new}


def _numbers(settings: Mapping[str, Any], name: str) -> list[int]:
    given = settings.get(name)
    return [] if given is None else [int(each) for each in (given if isinstance(given, list) else [given])]


def _token(given: Any) -> str | None:
    """The text of a token: itself, or a field of a description of it."""
    text: str | None = given["content"] if isinstance(given, Mapping) else given
    return text
