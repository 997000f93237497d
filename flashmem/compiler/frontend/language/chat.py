"""A chat template (Jinja, as transformers and GGUF files have it) in pieces of text, which a phone joins without Jinja."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from flashmem.base.errors import UserError
from flashmem.bundle.chat_templates import rendered
from flashmem.bundle.language import Template

_THOUGHT = "<think>\nFirst.\n</think>\n\nSecond."

_TEXTS = ("First text.", "Second text.", "Third text.", "Fourth text.")

_ROLES = (("user",), ("user", "assistant", "user"), ("system", "user", "assistant", "user"))

_MOST_CHARACTERS = 1 << 20


def chat_fields(template: str, marks: Mapping[str, str]) -> dict[str, Any]:
    """What `language.json` has of a chat template, "" for none: pieces if it has them, and the template itself if it has none
    or leaves out what the assistant thought.

    Raises:
        UserError: the template takes too much time or memory.
    """
    pieces = chat_pieces(template, marks) if template else None
    needs = bool(template) and (pieces is None or _leaves_out_thoughts(template, marks))
    return {"chat": pieces, "template": {"text": template, "marks": dict(marks)} if needs else None}


def _leaves_out_thoughts(template: str, marks: Mapping[str, str]) -> bool:
    """Whether a template that has pieces does not render thoughts where the assistant said them."""
    *_, text = _texts(template, tuple(marks.items()))
    return isinstance(text, UserError) or text.count(_THOUGHT) < 3


def chat_pieces(template: str, marks: Mapping[str, str]) -> dict[str, str] | None:
    """The text before and between the messages of a conversation; None if the template cannot be cut into such pieces.

    `marks`: names that the template uses, such as `bos_token`. Keys of the result: "user" and "system", what comes before a
    first message of that role; "system user", between these; "user assistant" and "assistant user", between turns. Those of the
    system are missing if the template refuses it. Messages end with one of the user, after which the assistant speaks.
    """
    *texts, _ = _texts(template, tuple(marks.items()))
    alone, turns, introduced = (_cut(text, roles) for text, roles in zip(texts, _ROLES, strict=True))
    if alone is None or turns is None:
        return None
    (user, answers), (first, between, again, last) = alone, turns
    pieces = {"user": user, "user assistant": between, "assistant user": again}
    if (first, last) != (user, answers) or answers != between:
        return None
    if introduced is None:
        return pieces
    system, asks, *rest = introduced
    return pieces | {"system": system, "system user": asks} if rest == [between, again, answers] else None


def _cut(whole: str | UserError, roles: Sequence[str]) -> list[str] | None:
    """The pieces around the texts of a conversation of these roles; None if the template refuses or changes them."""
    pieces = []
    for text in _TEXTS[: len(roles)]:
        before, found, whole = ("", "", "") if isinstance(whole, UserError) else whole.partition(text)
        if not found:
            return None
        pieces.append(before)
    return [*pieces, str(whole)]


@lru_cache(8)
def _texts(template: str, marks: tuple[tuple[str, str], ...]) -> list[str | UserError]:
    """What the template makes of a conversation of each of `_ROLES`, and of one in which all think. It cannot ask for the time,
    because a piece would keep it.
    """
    conversations = [[{"role": role, "content": text} for role, text in zip(roles, _TEXTS, strict=False)] for roles in _ROLES]
    conversations.append([{"role": role, "content": _THOUGHT} for role in _ROLES[1]])
    return rendered(Template(template, dict(marks)), conversations, most_characters=_MOST_CHARACTERS, clock=False)
