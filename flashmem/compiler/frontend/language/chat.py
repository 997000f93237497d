"""A chat template (Jinja, as transformers and GGUF files have it) in pieces of text, which a phone joins without Jinja."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_THOUGHT = "<think>\nFirst.\n</think>\n\nSecond."

_TEXTS = ("First text.", "Second text.", "Third text.", "Fourth text.")


def chat_fields(template: str, marks: Mapping[str, str]) -> dict[str, Any]:
    """What `language.json` has of a chat template, "" for none: pieces if it has them, and the template itself if it has none
    or leaves out what the assistant thought.
    """
    pieces = chat_pieces(template, marks) if template else None
    needs = bool(template) and (pieces is None or _leaves_out(_THOUGHT, template, marks))
    return {"chat": pieces, "template": {"text": template, "marks": dict(marks)} if needs else None}


def _leaves_out(text: str, template: str, marks: Mapping[str, str]) -> bool:
    """Whether a template that has pieces does not render `text` as it is where the assistant said it."""
    messages = [{"role": role, "content": text} for role in ("user", "assistant", "user")]
    try:
        return _render(template, messages, marks).count(text) < len(messages)
    except Exception:  # a template may raise anything
        return True


def chat_pieces(template: str, marks: Mapping[str, str]) -> dict[str, str] | None:
    """The text before and between the messages of a conversation; None if the template cannot be cut into such pieces.

    `marks`: names that the template uses, such as `bos_token`. Keys of the result: "user" and "system", what comes before a
    first message of that role; "system user", between these; "user assistant" and "assistant user", between turns. Those of the
    system are missing if the template refuses it. Messages end with one of the user, after which the assistant speaks.
    """

    def rendered(*roles: str) -> list[str]:
        """The pieces around the texts of a conversation of these roles. Raises what the template raises."""
        messages = [{"role": role, "content": text} for role, text in zip(roles, _TEXTS, strict=False)]
        whole, pieces = _render(template, messages, marks), []
        for text in _TEXTS[: len(roles)]:
            before, found, whole = whole.partition(text)
            if not found:
                raise ValueError
            pieces.append(before)
        return [*pieces, whole]

    try:
        user, answers = rendered("user")
        first, between, again, last = rendered("user", "assistant", "user")
    except Exception:  # a template may raise anything
        return None
    pieces = {"user": user, "user assistant": between, "assistant user": again}
    if (first, last) != (user, answers) or answers != between:
        return None
    try:
        system, asks, *rest = rendered("system", "user", "assistant", "user")
    except Exception:
        return pieces
    return pieces | {"system": system, "system user": asks} if rest == [between, again, answers] else None


def _render(template: str, messages: Sequence[Mapping[str, str]], marks: Mapping[str, str]) -> str:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment: Any = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    return str(environment.from_string(template).render(messages=messages, add_generation_prompt=True, **marks))
