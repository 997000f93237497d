"""Prompts as tokens: a text, a conversation through the model's chat template, or tokens."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flashmem.base.errors import UserError
from flashmem.bundle.chat_templates import can_render, rendered
from flashmem.bundle.language import THOUGHT_END, ChatPieces, Language, Template
from flashmem.runtime.generation.conversation import Message
from flashmem.runtime.generation.tokenizer import SPELLED, Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")
"""The roles of messages that a template in Jinja gets."""

Prompt = str | Sequence[Message] | Sequence[int]
"""A text to continue; messages, of which the last is the user's; or tokens."""


def tokens_of(
    prompt: Prompt, language: Language, tokenizer: Tokenizer, arguments: Mapping[str, Any] | None = None
) -> list[int]:
    """The tokens of a prompt. `arguments`: names for the chat template of messages, such as `enable_thinking`.

    Raises:
        UserError: it has none, or unknown ones, or more than the cache holds; or the chat template does not take the messages.
    """
    try:
        tokens = _tokens_of(prompt, language, tokenizer, arguments or {})
    except UserError:
        raise
    except ValueError as error:  # the vocabulary lacks a byte
        raise UserError(str(error)) from error
    if not tokens:
        raise UserError("the prompt is empty; give at least one word")
    if len(tokens) > language.max_length:
        raise _too_long(f"{len(tokens)} tokens", language)
    return tokens


class PromptTooLongError(UserError):
    """A prompt has more tokens than the cache holds."""


def _too_long(has: str, language: Language) -> PromptTooLongError:
    return PromptTooLongError(
        f"the prompt has {has}, and the cache holds {language.max_length}; shorten the prompt, or compile the model with a "
        "larger --max-length"
    )


def _check_characters(count: int, language: Language, tokenizer: Tokenizer) -> None:
    """Refuse a text that is too long for the cache before the work of finding its tokens."""
    if count > tokenizer.most_characters:
        raise _too_long(f"{count} characters, which are more than {language.max_length} tokens", language)


def _tokens_of(prompt: Prompt, language: Language, tokenizer: Tokenizer, arguments: Mapping[str, Any]) -> list[int]:
    if isinstance(prompt, str):
        _check_characters(len(prompt), language, tokenizer)
        begin = [] if language.begin is None else [language.begin]
        return begin + tokenizer.encode(prompt)
    messages = [each for each in prompt if isinstance(each, Mapping)]
    if messages and len(messages) == len(prompt):
        return _conversation(messages, language, tokenizer, arguments)
    tokens = [int(each) for each in prompt if isinstance(each, int | np.integer)]
    if len(tokens) != len(prompt) or not all(0 <= each < len(language.tokens) for each in tokens):
        raise UserError(f"the prompt is neither a text, nor messages, nor tokens from 0 to {len(language.tokens) - 1}")
    return tokens


def _conversation(
    messages: Sequence[Message], language: Language, tokenizer: Tokenizer, arguments: Mapping[str, Any]
) -> list[int]:
    """The tokens of a conversation. Control tokens are recognised in the template, not in the messages."""
    pieces = language.pieces
    template = language.template
    if template is not None and (pieces is None or can_render()):
        return _begun(_rendered(messages, template, language, tokenizer, arguments), language)
    if pieces is None:
        raise UserError("the model has no chat template that flashmem understands; give a text to continue")
    if arguments:
        raise UserError(
            f"the chat template gets no {', '.join(arguments)} here, because it is joined from pieces without Jinja; install "
            "flashmem[compile], or leave that out"
        )
    roles, contents = _turns(messages, pieces)
    _check_characters(sum(map(len, contents)), language, tokenizer)
    parts = pieces.parts(roles, contents)
    tokens = tokenizer.encode_parts([(pieces.dated(text) if control else text, control) for text, control in parts])
    return _begun(tokens, language)


def _turns(messages: Sequence[Message], pieces: ChatPieces) -> tuple[list[str], list[str]]:
    """Roles and contents of messages, as a template in pieces takes them. Raises UserError."""
    roles = list[str]()
    contents = list[str]()
    for message in messages:
        role = message.get("role", "")
        content = message.get("content")
        before = roles[-1] if roles else ""
        if role not in ROLES or f"{before} {role}".strip() not in pieces.texts or not isinstance(content, str):
            if role == "system" and not before:
                raise UserError("the model's chat template has no message of the system; put it into the user's first one")
            raise UserError(
                "a conversation is an optional message of the system, then messages of user and assistant in turn, each "
                f"with a role and a content; one has the role {reprlib.repr(role)} after {before or 'nothing'!r}"
            )
        if role == "assistant" and not pieces.thoughts and THOUGHT_END in content:
            raise UserError(
                f"an answer has thoughts (up to {THOUGHT_END}), which the model's chat template changes in a way that needs "
                "Jinja: install flashmem[compile], or leave them out"
            )
        roles.append(role)
        contents.append(content)
    if roles[-1] != "user":
        raise UserError("the last message of a conversation must be the user's")
    return roles, contents


def _begun(tokens: list[int], language: Language) -> list[int]:
    begin = language.begin
    return tokens if begin is None or tokens[:1] == [begin] else [begin, *tokens]


def _rendered(
    messages: Sequence[Message], template: Template, language: Language, tokenizer: Tokenizer, arguments: Mapping[str, Any]
) -> list[int]:
    """The tokens of a conversation by a template in Jinja.

    Control tokens are recognised in the template, and those in an answer that it looks for there, such as "<think>".

    Raises:
        UserError: Jinja is not installed; a message is not one; or the template refuses them.
    """
    if not can_render():
        raise UserError("the model's chat template needs Jinja here: install flashmem[compile], or give a text to continue")
    given: list[Message] = []
    sought = _sought_in_messages(template.text)
    for message in messages:
        role = message.get("role")
        content = message.get("content")
        if not isinstance(role, str) or not isinstance(content, str):
            raise UserError("each message of a conversation has a role and a content, both texts")
        if role not in ROLES:  # a template writes the role between marks, as "<|" and "|>"
            raise UserError(f"a message has the role {reprlib.repr(role)}; known are {', '.join(ROLES)}")
        given.append({"role": role, "content": tokenizer.spelled(content, sought if role == "assistant" else ())})
    if given[-1]["role"] != "user":
        raise UserError("the last message of a conversation must be the user's")
    _check_characters(sum(len(each["content"]) for each in messages) // 2, language, tokenizer)  # some may be left out
    [text] = rendered(template, [given], most_characters=2 * tokenizer.most_characters, arguments=arguments)
    if isinstance(text, UserError):
        raise text
    _check_characters(len(text.replace(SPELLED, "")), language, tokenizer)
    return tokenizer.encode_template(text)


_SOUGHT = re.compile(
    r"""(?:split|partition|replace|startswith|endswith|find|index)\(\s*(?:"([^"]+)"|'([^']+)')"""
    r"""|(?:"([^"]+)"|'([^']+)')\s+(?:not\s+)?in\b"""
)


def _sought_in_messages(template: str) -> list[str]:
    """The texts that a template looks for, as in `content.split('</think>')` and `'</think>' in content`."""
    return [text for found in _SOUGHT.findall(template) for text in found if text]
