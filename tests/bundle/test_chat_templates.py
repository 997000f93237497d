"""Chat templates are rendered in a child process, within limits."""

from __future__ import annotations

import time

import pytest

from flashmem.base.errors import RunError, UserError
from flashmem.bundle import chat_templates
from flashmem.bundle.chat_templates import rendered
from flashmem.bundle.language import Template

ASKED = [{"role": "user", "content": "naïve\ufdd0"}]


def of(text: str, clock: bool = True, **marks: str) -> str:
    [found] = rendered(Template(text, marks), [ASKED], most_characters=100, clock=clock)
    if isinstance(found, UserError):
        raise found
    return found


def test_a_text_and_a_refusal() -> None:
    template = Template(
        "{{ bos_token }}{% if messages[1] %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}",
        {"bos_token": "<s>"},
    )
    text, refused = rendered(template, [ASKED, [*ASKED, *ASKED]], most_characters=100)
    assert text == "<s>naïve\ufdd0" and isinstance(refused, UserError)
    assert str(refused) == "the model's chat template refuses the conversation: no"


def test_the_time_of_day() -> None:
    assert of("{{ strftime_now('%Y') }}") == time.strftime("%Y")
    with pytest.raises(UserError, match="refuses the conversation: 'strftime_now' is undefined"):
        of("{{ strftime_now('%Y') }}", clock=False)


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ ('x' * 3000000000) | length }}",
        "{% set ns = namespace(t='x' * 99) %}{% for a in range(99) %}{% set ns.t = ns.t ~ ns.t %}{% endfor %}",
    ],
)
def test_templates_without_end(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_templates, "_SECONDS", 1)
    with pytest.raises(UserError, match="takes more than 1 s or 512 MB; give a text to continue"):
        of(template)


def test_a_template_that_takes_little_time_and_much_memory() -> None:
    with pytest.raises(UserError, match="or 512 MB; give a text to continue"):
        of("{{ ('x' * 600000000) | length }}")


def test_too_many_characters() -> None:
    with pytest.raises(UserError, match="refuses the conversation: it makes 101 characters of it, and 100 are possible"):
        of("{{ 'x' * 101 }}")


def test_a_template_does_not_reach_the_process() -> None:
    """Also not by `format` of a text, which Jinja before 3.1.6 forgets to check."""
    asked = "{{ raise_exception.%s }}{{ ('[{0.%s}]' | attr('format'))(raise_exception) }}"
    assert of("{{ ('[{0}]' | attr('format'))('x') }}") == "[x]"
    [found] = rendered(Template(asked % ("__globals__", "__globals__"), {}), [ASKED], most_characters=1 << 20)
    assert isinstance(found, UserError) or "builtins" not in found


def test_a_child_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_templates, "_RENDERER", "flashmem.tools.nowhere")
    with pytest.raises(
        RunError, match=r"was not rendered: its process ended with 1 \(.*No module named flashmem.tools.nowhere\)$"
    ):
        of("x")
