"""The settings in a folder as the library transformers writes them, and the language that its tokenizer has.

Files: `config.json`, `generation_config.json`, `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from json import loads
from pathlib import Path
from typing import Any

from flashmem.base.errors import MissingFileError
from flashmem.bundle.language import CONTROL, RECOMMENDED
from flashmem.compiler.frontend.language.chat import chat_fields
from flashmem.compiler.frontend.language.model import END_TOKENS
from flashmem.compiler.frontend.language.tokenizer_file import begins_with, tokenizer_fields

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"


class FolderSettings:
    """The settings in a folder. Methods raise any error for a damaged file.

    `files`: those that were read. `config`: of the model of text, and `has_parts`, whether there are others.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: list[Path] = []
        whole = self.json(CONFIG)
        self.has_parts = "text_config" in whole
        self.config: Mapping[str, Any] = whole.get("text_config", whole)

    def language(self, words: int, ends: Sequence[int] = ()) -> dict[str, Any]:
        """The tokenizer of `words` tokens, those that begin and end a text (also `ends`), and the chat template in pieces.

        Raises:
            MissingFileError: there is no tokenizer.
            UserError: it is of an unknown kind.
        """
        path = self.path / TOKENIZER
        given = self.json(TOKENIZER)
        if not given:
            raise MissingFileError(
                f"{self.path} has no {TOKENIZER}; save the tokenizer there with transformers (save_pretrained)"
            )
        fields = tokenizer_fields(given, path, words)
        tokens = fields["tokens"]
        types = fields["types"]
        settings = self.json("tokenizer_config.json")
        generation = self.json("generation_config.json")
        first, last = (_text_of(settings.get(name)) for name in ("bos_token", "eos_token"))
        last_ones = [*ends, *numbers_of(generation, "eos_token_id"), *numbers_of(self.config, "eos_token_id")]
        last_ones += [tokens.index(last)] if last in tokens else []
        last_ones += [number for number, token in enumerate(tokens) if types[number] == CONTROL and token in END_TOKENS]
        begin = begins_with(given)
        if begin is None and settings.get("add_bos_token"):
            begin = first
        template = self._template(settings)
        marks = {"bos_token": first or "", "eos_token": last or ""}
        return {
            **fields,
            "begin": None if begin is None else tokens.index(begin),
            "ends": list(dict.fromkeys(last_ones)),
            "sampling": _sampling(generation),
            **chat_fields(template, marks),
        }

    def _template(self, settings: Mapping[str, Any]) -> str:
        file = self.path / "chat_template.jinja"
        if file.is_file():
            self.files.append(file)
            return file.read_text(encoding="utf-8")
        given = settings.get("chat_template") or ""
        if isinstance(given, str):
            return given
        return next((str(each["template"]) for each in given if each["name"] == "default"), "")

    def json(self, name: str) -> dict[str, Any]:
        """The content of a file, empty if it is not there."""
        file = self.path / name
        if not file.is_file():
            return {}
        self.files.append(file)
        content: dict[str, Any] = loads(file.read_text(encoding="utf-8"))
        return content


def numbers_of(settings: Mapping[str, Any], name: str) -> list[int]:
    """A setting that is a number, or a list of them; none if it is not given."""
    given = settings.get(name)
    return [] if given is None else [int(each) for each in (given if isinstance(given, list) else [given])]


def _sampling(generation: Mapping[str, Any]) -> dict[str, float]:
    """How the model's makers recommend to choose tokens, if not the likeliest ones."""
    given = {name: generation.get(name) for name in RECOMMENDED if generation.get("do_sample")}
    return {name: value for name, value in given.items() if isinstance(value, int | float)}


def _text_of(given: Any) -> str | None:
    """The text of a token: itself, or a field of a description of it."""
    text: str | None = given["content"] if isinstance(given, Mapping) else given
    return text
