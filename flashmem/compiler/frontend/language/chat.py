"""A chat template (Jinja, as transformers and GGUF files have it) in pieces of text, which a phone joins without Jinja.

Pieces stand for the template only where they give the same text. This is tried: a conversation of roles or contents for which
they do not is refused where there is no Jinja.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

from flashmem.base.errors import UserError
from flashmem.bundle.chat_templates import rendered
from flashmem.bundle.language import DATE, ChatPieces, Template

_THOUGHT = "<think>\nFirst.\n</think>\n\nSecond."

_TEXTS = ("First text.", "Second text.", "Third text.", "Fourth text.", "Fifth text.", "Sixth text.")

_PADDED = " \n First: {{ text }} <b>\n\n1. two  \n"
"""A content with space around it, which many templates remove."""

_BASE = (("user",), ("user", "assistant", "user"), ("system", "user", "assistant", "user"))

_FURTHER = (
    ("user", "user"),
    ("user", "assistant", "system", "user"),
    ("user", "assistant", "assistant", "user"),
    ("system", "system", "user"),
    ("user", "system", "user"),
)
"""Conversations of pairs of roles that some templates refuse."""

_TRIED = (
    ("user", "assistant", "user", "assistant", "user"),
    ("system", "user", "user", "assistant", "user"),
    ("system", "user", "assistant", "system", "user", "user"),
    ("user", "assistant", "user", "user"),
    ("user", "system", "user", "assistant", "user"),
    ("system", "system", "user", "assistant", "user"),
    ("system", "user", "assistant", "assistant", "user"),
)
"""Conversations that pieces must give as the template does."""

_MOST_CHARACTERS = 1 << 20


def chat_fields(template: str, marks: Mapping[str, str]) -> dict[str, Any]:
    """What `language.json` has of a chat template, "" for none: the template itself, and its pieces if it has them.

    Raises:
        UserError: the template takes too much time or memory.
    """
    if not template:
        return {"chat": None, "template": None}
    pieces = chat_pieces(template, marks)
    found = {"chat": None} if pieces is None else {
        "chat": pieces.texts, "chat_trims": pieces.trims, "chat_thoughts": pieces.thoughts
    }  # fmt: skip
    return {**found, "template": {"text": template, "marks": dict(marks)}}


def chat_pieces(template: str, marks: Mapping[str, str]) -> ChatPieces | None:
    """The text before and between the messages of a conversation; None if the template cannot be cut into such pieces.

    `marks`: names that the template uses, such as `bos_token`.
    """
    tried = _Tried.of(template, tuple(marks.items()))
    base = [_cut(text, roles) for text, roles in zip(tried.texts[: len(_BASE)], _BASE, strict=True)]
    alone, turns, introduced = base
    if alone is None or turns is None:
        return None
    (user, answers), (first, between, again, last) = alone, turns
    if (first, last) != (user, answers) or answers != between:
        return None
    texts = {"user": user, "user assistant": between, "assistant user": again}
    if introduced is not None:
        system, asks, *rest = introduced
        if rest != [between, again, answers]:
            return None
        texts |= {"system": system, "system user": asks}
    pieces = ChatPieces(texts, tried.trims())
    if not tried.agrees(pieces):
        return None
    rules = (replace(pieces, thoughts=each) for each in ("kept", "dropped"))
    pieces = next((each for each in rules if tried.agrees_in_thoughts(each)), replace(pieces, thoughts=""))
    for text, roles in zip(tried.texts[len(_BASE) :], _FURTHER, strict=False):
        found = _cut(text, roles)
        pairs = [f"{before} {role}" for before, role in pairwise(roles)]
        if found is None or found[0] != texts.get(roles[0]) or found[-1] != between:
            continue
        more = replace(pieces, texts={**dict(zip(pairs, found[1:-1], strict=True)), **pieces.texts})
        if tried.agrees(more):
            pieces = more
    return pieces


def _cut(whole: str | UserError, roles: Sequence[str]) -> list[str] | None:
    """The pieces around the texts of a conversation of these roles; None if the template refuses or changes them."""
    pieces = []
    for text in _TEXTS[: len(roles)]:
        before, found, whole = ("", "", "") if isinstance(whole, UserError) else whole.partition(text)
        if not found:
            return None
        pieces.append(before)
    return [*pieces, str(whole)]


@dataclass(frozen=True)
class _Tried:
    """What a template makes of conversations: `texts` of those of `_BASE`, `_FURTHER` and `_TRIED`, then `padded` ones of the
    same with other contents, and one in which all think.
    """

    texts: tuple[str | UserError, ...]
    padded: tuple[str | UserError, ...]
    thinking: str | UserError

    @staticmethod
    @lru_cache(8)
    def of(template: str, marks: tuple[tuple[str, str], ...]) -> _Tried:
        """Render all conversations. The date is where the template asks for it, because a piece would keep that of today."""
        roles = (*_BASE, *_FURTHER, *_TRIED)
        plain = [[{"role": role, "content": text} for role, text in zip(each, _TEXTS, strict=False)] for each in roles]
        padded = [[{"role": role, "content": _PADDED} for role in each] for each in roles]
        thinking = [{"role": role, "content": _THOUGHT} for role in _BASE[1]]
        found = rendered(
            Template(template, dict(marks)), [*plain, *padded, thinking], most_characters=_MOST_CHARACTERS, clock=DATE
        )
        return _Tried(tuple(found[: len(roles)]), tuple(found[len(roles) : -1]), found[-1])

    def trims(self) -> dict[str, str]:
        """Of each role, which space around a content the template removes: "left", "right" or "both"."""
        for text, roles in zip(self.padded[1 : len(_BASE)][::-1], _BASE[1:][::-1], strict=True):
            if isinstance(text, str):
                return _trimmed(text, roles)
        return {}

    def agrees(self, pieces: ChatPieces) -> bool:
        """Whether `pieces` give the template's text of every conversation that they have pieces for."""
        return all(
            _joined(pieces, roles, contents) == text
            for roles, plain, padded in zip((*_BASE, *_FURTHER, *_TRIED), self.texts, self.padded, strict=True)
            if pieces.joins(roles)
            for text, contents in ((plain, _TEXTS), (padded, [_PADDED] * len(roles)))
        )

    def agrees_in_thoughts(self, pieces: ChatPieces) -> bool:
        """Whether `pieces` give the template's text of a conversation in which all think."""
        return _joined(pieces, _BASE[1], [_THOUGHT] * len(_BASE[1])) == self.thinking


def _trimmed(text: str, roles: Sequence[str]) -> dict[str, str]:
    """See `_Tried.trims`; `text` is a conversation of `roles` whose contents are all `_PADDED`."""
    core = _PADDED.strip()
    left, right = _PADDED.split(core)
    found: dict[str, str] = {}
    for role in roles:
        before, _, text = text.partition(core)
        if not (before.endswith(left) and text.startswith(right)):
            found[role] = "right" if before.endswith(left) else "left" if text.startswith(right) else "both"
    return found


def _joined(pieces: ChatPieces, roles: Sequence[str], contents: Sequence[str]) -> str:
    return "".join(text for text, _ in pieces.parts(roles, contents))
