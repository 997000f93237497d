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
from flashmem.bundle.language import BATCH_TOKENS, IDS
from flashmem.compiler.frontend.language.cached_decoder import MASK, POSITIONS, CacheSize, with_fixed_cache
from flashmem.compiler.frontend.language.folder_settings import CONFIG, FolderSettings, numbers_of
from flashmem.compiler.frontend.language.model import LanguageModel, cache_length

_DECODERS = ("model.onnx", "decoder_model_merged.onnx", "decoder_with_past_model.onnx")
_GENAI = "genai_config.json"
_CONTEXT = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length")


def read_folder(path: Path, max_length: int | None, batch: int = 1) -> LanguageModel:
    """The language model in the folder `path`. `max_length`: tokens that the cache holds, in each row of the `batch`.

    Raises:
        MissingFileError: no decoder or no tokenizer.
        UserError: a file is damaged or of an unknown kind; the model has no room for `max_length`.
    """
    try:
        return _Folder(path).model(max_length, batch)
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise UserError(f"a file in {path} is damaged, or of an unknown kind ({type(error).__name__}: {error})") from error


class _Folder(FolderSettings):
    """The settings and the decoder in a folder. Methods raise any error for a damaged file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.genai = self.json(_GENAI).get("model", {})

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
        language = {**self.language(words, numbers_of(self.genai, "eos_token_id")), "max_length": length}
        return LanguageModel(onnx_file, json.dumps(language).encode(), rewrite, tuple(self.files))

    def _number(self, *names: str, default: int | None = None) -> int:
        """The first of these settings that is given."""
        settings = (self.genai.get("decoder", {}), self.genai, self.config)
        found = (each[name] for name in names for each in settings if each.get(name) is not None)
        number = next(found, default)
        if number is None:
            raise UserError(f"{self.path} does not say {names[0]} in {_GENAI} or {CONFIG}")
        return int(number)

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
