"""Chat templates in pieces give the text of the template, or refuse."""

from __future__ import annotations

import time
from itertools import product
from typing import Any

import pytest

from flashmem.base.errors import UserError
from flashmem.bundle.chat_templates import rendered
from flashmem.bundle.language import DATE, ChatPieces, Template
from flashmem.compiler.frontend.language.chat import chat_fields, chat_pieces
from tests.support.gguf_models import TEMPLATE

LLAMA = (
    "{{- bos_token }}{%- if not date_string is defined %}{%- if strftime_now is defined %}"
    "{%- set date_string = strftime_now('%d %b %Y') %}{%- else %}{%- set date_string = '26 Jul 2024' %}{%- endif %}{%- endif %}"
    "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content']|trim %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}"
    "{{- '<|start|>system<|end|>\\n\\n' }}{{- 'Today Date: ' + date_string + '\\n\\n' }}{{- system }}{{- '<|eot|>' }}"
    "{%- for message in messages %}{{- '<|start|>' + message['role'] + '<|end|>\\n\\n'"
    "+ message['content'] | trim + '<|eot|>' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>\\n\\n' }}{%- endif %}"
)
"""Of the form of Llama 3.2's: the date of today, contents without space around them, the system's message first."""

THINKING = (
    "{%- for m in messages %}{%- set content = m.content %}"
    "{%- if m.role == 'assistant' %}{%- if '</think>' in content %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}{%- endif %}"
    "{{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}"
    "{%- endif %}{%- endif %}"
)
"""Of the form of Qwen 3's: thoughts of earlier answers are left out."""

TURNS = "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}"

GEMMA = (
    "{{ bos_token }}{% for m in messages %}" + TURNS + "{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<start_of_turn>' + role + '\\n' + m['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)

MISTRAL = (
    "{{ bos_token }}{% for m in messages %}" + TURNS + "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ m['content'] + eos_token }}{% endif %}{% endfor %}"
)

MARKS = {"bos_token": "<s>", "eos_token": "</s>"}


def joined(pieces: ChatPieces, conversation: list[dict[str, str]]) -> str | None:
    """The text by pieces; None if they have none for it."""
    roles = [each["role"] for each in conversation]
    if not pieces.joins(roles):
        return None
    return "".join(text for text, _ in pieces.parts(roles, [each["content"] for each in conversation]))


@pytest.mark.parametrize(
    ("template", "taken"), [(TEMPLATE, 12), (LLAMA, 12), (THINKING, 12), (GEMMA, 2), (MISTRAL, 2)],
    ids=["smollm", "llama", "thinking", "gemma", "mistral"],
)  # fmt: skip
def test_pieces_give_the_text_of_the_template(template: str, taken: int) -> None:
    """Of all conversations of up to four messages: the same text, and none where the template refuses it."""
    pieces = chat_pieces(template, MARKS)
    assert pieces is not None
    contents = ("  Hello\n", "<think>\nWhy?\n</think>\n\nTwo\n\nlines", "x", " \t{{ y }}")
    conversations = [
        [{"role": role, "content": content} for role, content in zip((*before, "user"), contents, strict=False)]
        for count in range(4)
        for before in product(("system", "user", "assistant"), repeat=count)
    ]
    wanted = rendered(Template(template, MARKS), conversations, most_characters=1000, clock=DATE)
    right = [None if isinstance(text, UserError) else text for text in wanted]
    found = [joined(pieces, each) for each in conversations]
    assert all(text in (None, given) for text, given in zip(found, right, strict=True))
    assert sum(text is not None for text in found) >= taken


def test_conversations_that_pieces_have() -> None:
    for template in (TEMPLATE, LLAMA, THINKING):
        pieces = chat_pieces(template, MARKS)
        assert pieces is not None
        for roles in (
            ["system", "user"],
            ["user", "user"],
            ["user", "assistant", "system", "user"],
            ["system", "user", "user"],
        ):
            assert pieces.joins(roles), roles
    for template in (GEMMA, MISTRAL):
        pieces = chat_pieces(template, MARKS)
        assert pieces is not None and pieces.joins(["user", "assistant", "user"])
        assert not pieces.joins(["system", "user"]) and not pieces.joins(["user", "user"])


def test_trims_thoughts_and_the_date() -> None:
    fields = chat_fields(LLAMA, MARKS)
    assert fields["chat_trims"] == {"system": "both", "user": "both", "assistant": "both"}
    assert fields["chat_thoughts"] == "kept" and fields["template"] == {"text": LLAMA, "marks": MARKS}
    assert f"Today Date: {time.strftime('%d %b %Y')}" in ChatPieces.dated(fields["chat"]["user"])
    assert chat_fields(THINKING, MARKS)["chat_thoughts"] == "dropped"
    other = THINKING.replace(".lstrip('\\n')", "")
    assert chat_fields(other, MARKS)["chat_thoughts"] == ""
    assert chat_fields("", MARKS) == {"chat": None, "template": None}


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}",
        "{% for m in messages %}{{ loop.index }}{{ m['content'] }}{% endfor %}",
        "{% for m in messages %}<{{ m['content'] | replace('\\n\\n', '\\n') }}>{% endfor %}",
        "{{ messages[0]['content'] }}",
        "{% for",
    ],
)
def test_templates_that_are_no_pieces(template: str) -> None:
    assert chat_pieces(template, {}) is None


def test_arguments_of_a_template() -> None:
    asked: list[Any] = [[{"role": "user", "content": "x"}]]
    without, said = (
        rendered(Template(THINKING, {}), asked, most_characters=1000, arguments=given)
        for given in ({}, {"enable_thinking": False})
    )
    assert said == [f"{without[0]}<think>\n\n</think>\n\n"]
