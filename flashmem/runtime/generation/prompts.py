"""Prompts as tokens: a text, a conversation through the model's chat template, or tokens."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence

import numpy as np

from flashmem.base.errors import UserError
from flashmem.bundle.language import Language, Template
from flashmem.runtime.generation.conversation import Message
from flashmem.runtime.generation.tokenizer import BREAK, Tokenizer

_RENDERER = "flashmem.tools.chat_template"
"""The module of the desk that renders templates in Jinja. The runtime loads it by name, and only for these."""

Prompt = str | Sequence[Message] | Sequence[int]
"""A text to continue; messages, of which the last is the user's; or tokens."""


def tokens_of(prompt: Prompt, language: Language, tokenizer: Tokenizer) -> list[int]:
    """The tokens of a prompt.

    Raises:
        UserError: it has none, or unknown ones; or the chat template does not take the messages.
    """
    try:
        tokens = _tokens_of(prompt, language, tokenizer)
    except ValueError as error:  # the vocabulary lacks a byte
        raise UserError(str(error)) from error
    if not tokens:
        raise UserError("the prompt is empty; give at least one word")
    return tokens


def _tokens_of(prompt: Prompt, language: Language, tokenizer: Tokenizer) -> list[int]:
    if isinstance(prompt, str):
        begin = [] if language.begin is None else [language.begin]
        return begin + tokenizer.encode(prompt)
    messages = [each for each in prompt if isinstance(each, Mapping)]
    if messages and len(messages) == len(prompt):
        return _conversation(messages, language, tokenizer)
    tokens = [int(each) for each in prompt if isinstance(each, int | np.integer)]
    if len(tokens) != len(prompt) or not all(0 <= each < len(language.tokens) for each in tokens):
        raise UserError(f"the prompt is neither a text, nor messages, nor tokens from 0 to {len(language.tokens) - 1}")
    return tokens


def _conversation(messages: Sequence[Message], language: Language, tokenizer: Tokenizer) -> list[int]:
    """The tokens of a conversation. Control tokens are recognised in the template, not in the messages."""
    chat, template = language.chat, language.template
    if template is not None and (chat is None or _has_jinja()):
        return _begun(_rendered(messages, template, tokenizer), language)
    if chat is None:
        raise UserError("the model has no chat template that flashmem understands; give a text to continue")
    parts: list[tuple[str, bool]] = []
    before = ""
    for message in messages:
        role, content = message.get("role", ""), message.get("content")
        piece = chat.get(f"{before} {role}".strip())
        if piece is None and role == "system" and not before:
            raise UserError("the model's chat template has no message of the system; put it into the user's first one")
        if piece is None or not isinstance(content, str):
            raise UserError(
                "a conversation is an optional message of the system, then messages of user and assistant in turn, each "
                f"with a role and a content; one has the role {role!r} after {before or 'nothing'!r}"
            )
        parts += [(piece, True), (content, False)]
        before = role
    if before != "user":
        raise UserError("the last message of a conversation must be the user's")
    tokens = tokenizer.encode_parts([*parts, (chat["user assistant"], True)])
    return _begun(tokens, language)


def _begun(tokens: list[int], language: Language) -> list[int]:
    begin = language.begin
    return tokens if begin is None or tokens[:1] == [begin] else [begin, *tokens]


def _has_jinja() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("jinja2", _RENDERER.rpartition(".")[0]))


def _rendered(messages: Sequence[Message], template: Template, tokenizer: Tokenizer) -> list[int]:
    """The tokens of a conversation by a template in Jinja. Control tokens are recognised in it, and in what the model said.

    Raises:
        UserError: Jinja is not installed; a message is not one; or the template refuses them.
    """
    if not _has_jinja():
        raise UserError("the model's chat template needs Jinja here: install flashmem[compile], or give a text to continue")
    given: list[Message] = []
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not isinstance(content, str):
            raise UserError("each message of a conversation has a role and a content, both texts")
        said = content.replace(BREAK, "")
        given.append({"role": role, "content": said if role == "assistant" else tokenizer.broken(said)})
    if given[-1]["role"] != "user":
        raise UserError("the last message of a conversation must be the user's")
    text: str = importlib.import_module(_RENDERER).rendered(template.text, template.marks, given)
    return tokenizer.encode_parts([(part, True) for part in text.split(BREAK)])
