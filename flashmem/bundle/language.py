"""The language part of a bundle, `language.json`: a tokenizer, the tokens that begin and end a text, a chat template.

Keys: `pattern` (of `PATTERNS`, for byte pairs; null for SentencePiece), `tokens`, `types` (of each token, as in GGUF), `merges`
(byte pairs: "a b", the most frequent first), `scores` (SentencePiece: of each token), `space_prefix` (of `SPACE_PREFIXES`),
`nfc` (whether a text is first brought to Unicode's normal form C), `begin` (a token or null), `ends` (tokens), `template` (the
chat template and the names that it uses: `Template`; null if there is none), `chat`, `chat_trims` and `chat_thoughts` (the same
in pieces, which a phone joins: `ChatPieces`; `chat` is null if it has none), `sampling` (how the model's makers recommend to
choose tokens), `max_length` (tokens that the cache holds).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flashmem.base.errors import BundleError
from flashmem.base.foreign_models import ADAPTER

SETTINGS = ("genai_config.json", "config.json", ADAPTER)
"""A folder with one of these files has a language model, or an adapter of one; it is no bundle."""

IDS = "input_ids"
TOTAL = "total_sequence_length"
TEMPERATURE = "temperature"
"""The inputs of a language model: the tokens to read [1, tokens]; the number of all tokens up to the last of them; and the
temperature of the sums in its candidates, float32 above 0. For a batch of requests, tokens are [batch, tokens], and numbers and
temperatures [batch].
"""

LOGITS = "logits"
CANDIDATES = "candidates"
"""Its outputs: logits in float32 [batch, rows, vocabulary], and candidates in int32 [batch, rows, 2 k + 1] with k = `KEPT`, or
the vocabulary if that is less (`compiler.kernels.candidates.operators`): tokens of the largest logits, the largest first and of
equal ones the first; these logits, as the bits of floats; and as such bits the sum of exp((logit - the largest) / temperature)
over all logits. A choice of a token rarely needs more, so that logits stay on the device.
"""

WEIGHTS_KEY = "weights_key"
"""The key in a bundle's metadata for a hash of the model's weights: the same for every budget and length of a cache."""

KEPT = 64
"""The tokens of the largest logits that a run returns."""

SUM_ERROR = 1e-4
"""The most that the sum in candidates is off, relatively. At most 1,100 additions in float32 are off by 7e-5, and an exponent
above -100, which three roundings make, by 2e-5.
"""

PROMPT_TOKENS = 32
CHECKED_TOKENS = 8
"""Tokens that a run reads: of a prompt; to check drafted ones, with logits after each (`runtime.generation.speculation`). Other
runs read one.
"""

LONG_RUNS = (64, 128)
"""Tokens of a prompt that a further run reads where that is worth it (`compiler.adaptive.prompt_runs`): one of these."""

BATCH_TOKENS = 8
"""Tokens of a prompt that a run reads in each row of a batch (`runtime.generation.batch`). The cache has room for as many more
than `max_length`.
"""

MOST_ROWS = 64
"""The most rows of a batch."""

NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
BYTE = 6
"""Types of tokens: pieces of texts; for what is not in the vocabulary; those that only a template writes; those that are found
in a text before it is cut; no text has it; a byte, which SentencePiece writes as "<0x0A>"."""

SPACE_PREFIXES = ("never", "first", "always")
"""Where SentencePiece puts a space: nowhere; before a text that begins with no control token and no space; before each part
of a text between control tokens."""


@dataclass(frozen=True)
class Pattern:
    """How a text is cut into pieces before bytes are paired.

    `contractions` match in the text. `kinds` matches in a text of one letter for each character: L letter, N number, R line
    feed or carriage return, space, S other white space, O other. `digits`: each number is a piece of its own first. `whole`: a
    piece that is a token is not paired again.
    """

    contractions: re.Pattern[str]
    kinds: re.Pattern[str]
    digits: bool = False
    whole: bool = False


_GPT2 = re.compile(r"'s|'t|'re|'ve|'m|'ll|'d"), re.compile(r" ?L+| ?N+| ?O+|[ SR]+(?![^ SR])|[ SR]+")
_LLAMA3 = r"[^RLN]?L+|N{1,%d}| ?O+R*|[ SR]*R+|[ SR]+(?![^ SR])|[ SR]+"
_ANY_CASE = re.compile(_GPT2[0].pattern, re.IGNORECASE)

PATTERNS: Mapping[str, Pattern] = MappingProxyType(
    {
        "gpt-2": Pattern(*_GPT2),
        "smollm": Pattern(*_GPT2, digits=True),
        "llama-bpe": Pattern(_ANY_CASE, re.compile(_LLAMA3 % 3), whole=True),
        "qwen2": Pattern(_ANY_CASE, re.compile(_LLAMA3 % 1)),
    }
)
"""By the name in GGUF files (`tokenizer.ggml.pre`): the regular expressions of GPT-2, SmolLM, Llama 3 and Qwen 2."""


@dataclass(frozen=True)
class Template:
    """A chat template in Jinja. `marks`: names that it uses, such as `bos_token`."""

    text: str
    marks: Mapping[str, str]


DATE = "\ufdd1"
"""A character that no text has, around the format of a date in a piece."""

THOUGHT_END = "</think>"
"""What ends the thoughts in an answer."""


@dataclass(frozen=True)
class ChatPieces:
    """The text of a chat template around the messages of a conversation, which ends with a message of the user.

    Attributes:
        texts: before the first message, by its role; between two messages, by both roles ("user assistant"). That after the
            last message is the one between the user's and the assistant's.
        trims: of some roles, which space around a content is left out: "left", "right" or "both".
        thoughts: in answers they are "kept", or "dropped" as most templates do that; "" for another rule.
    """

    texts: Mapping[str, str]
    trims: Mapping[str, str] = field(default_factory=dict)
    thoughts: str = "kept"

    def joins(self, roles: Sequence[str]) -> bool:
        """Whether it has the pieces for a conversation of these roles."""
        return {*roles[:1], *(" ".join(pair) for pair in pairwise(roles))} <= self.texts.keys() and roles[-1] == "user"

    def parts(self, roles: Sequence[str], contents: Sequence[str]) -> list[tuple[str, bool]]:
        """The conversation's text in parts: pieces of the template (True), and contents (False)."""
        found = []
        for before, role, content in zip(["", *roles], roles, contents, strict=False):
            if role == "assistant" and self.thoughts == "dropped" and THOUGHT_END in content:
                content = content.rpartition(THOUGHT_END)[2].lstrip("\n")
            trim = {"left": str.lstrip, "right": str.rstrip, "both": str.strip}.get(self.trims.get(role, ""), str)
            found += [(self.texts[f"{before} {role}".strip()], True), (trim(content), False)]
        return [*found, (self.texts["user assistant"], True)]

    @staticmethod
    def dated(piece: str) -> str:
        """A piece with the date of today where the template asks for it."""
        return re.sub(f"{DATE}([^{DATE}]*){DATE}", lambda found: time.strftime(found[1]), piece)


@dataclass(frozen=True)
class Language:
    """What the module's documentation lists; `pattern` is None for a tokenizer of SentencePiece, which has `scores` instead."""

    pattern: Pattern | None
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[str, ...]
    begin: int | None
    ends: frozenset[int]
    chat: Mapping[str, str] | None
    max_length: int
    scores: tuple[float, ...] = ()
    space_prefix: str = "never"
    nfc: bool = False
    template: Template | None = None
    chat_trims: Mapping[str, str] = field(default_factory=dict)
    chat_thoughts: str = "kept"
    sampling: Mapping[str, float] = field(default_factory=dict)

    @property
    def chats(self) -> bool:
        """Whether it has a chat template of either kind."""
        return self.chat is not None or self.template is not None

    @property
    def pieces(self) -> ChatPieces | None:
        """The chat template in pieces."""
        return None if self.chat is None else ChatPieces(self.chat, self.chat_trims, self.chat_thoughts)

    @classmethod
    def from_json(cls, text: bytes) -> Language:
        """Raises BundleError if `text` is not the JSON of a language."""
        try:
            given = json.loads(text)
            tokens, types, merges, scores = (tuple(given[name]) for name in ("tokens", "types", "merges", "scores"))
            pattern = None if given["pattern"] is None else PATTERNS[given["pattern"]]
            begin = given["begin"]
            ends = frozenset(given["ends"])
            chat = given["chat"]
            length = given["max_length"]
            template = None if given.get("template") is None else Template(**given["template"])
            made = cls(
                pattern, tokens, types, merges, begin, ends, chat, length, scores, given["space_prefix"], given["nfc"],
                template, given.get("chat_trims", {}), given.get("chat_thoughts", "kept"), given.get("sampling", {}),
            )  # fmt: skip
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise _damage_error() from error
        made._check()
        return made

    def _check(self) -> None:
        count = len(self.tokens)
        numbers: list[Any] = [*self.ends, *([] if self.begin is None else [self.begin])]
        chat: Mapping[Any, Any] = self.chat if isinstance(self.chat, dict) else {}
        template = self.template or Template("", {})
        marks = dict[Any, Any]()
        if isinstance(template.marks, dict):
            marks = template.marks
        right = (
            all(type(each) is str for each in (*self.tokens, *self.merges, *chat, *chat.values(), template.text))
            and isinstance(template.marks, dict)
            and all(type(each) is str for each in (*marks, *marks.values()))
            and all(isinstance(each, dict) for each in (self.chat_trims, self.sampling))
            and all(type(each) is str for each in (*self.chat_trims, *self.chat_trims.values(), self.chat_thoughts))
            and {*self.sampling} <= RECOMMENDED.keys()
            and all(type(each) in (int, float) for each in self.sampling.values())
            and all(type(each) is int for each in (*self.types, *numbers, self.max_length))
            and all(isinstance(each, int | float) for each in self.scores)
            and len(self.types) == count > 0
            and (self.pattern is not None or len(self.scores) == count)
            and self.space_prefix in SPACE_PREFIXES
            and isinstance(self.nfc, bool)
            and all(0 <= each < count for each in numbers)
            and self.max_length > 0
            and (self.chat is None or chat.keys() >= CHAT)
        )
        if not right:
            raise _damage_error()


RECOMMENDED: Mapping[str, str] = MappingProxyType(
    {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "repetition_penalty": "penalty_repeat"}
)
"""What a model may recommend of how tokens are chosen, and its name in GGUF files after `general.sampling.`."""


def is_language_folder(path: Path) -> bool:
    """Whether `path` is a folder with a language model, in ONNX or safetensors."""
    return any((path / name).is_file() for name in SETTINGS)


def is_bundle(path: Path) -> bool:
    """Whether `path` is a folder of a bundle, or of nothing that is known."""
    return path.is_dir() and not is_language_folder(path)


CHAT = frozenset({"user", "user assistant", "assistant user"})
"""The pieces that every chat template in pieces has; others are missing if it refuses such messages or has none for them."""


def _damage_error() -> BundleError:
    return BundleError("the bundle's language.json is damaged; compile the model again")
