"""`flashmem generate --chat` goes on after Ctrl-C, after a full cache, and after a message that is refused."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashmem.base.errors import UserError
from flashmem.cli.commands import generate
from flashmem.runtime.generation.generated_text import GenerationReport
from flashmem.runtime.generation.prompts import PromptTooLongError
from tests.support.command_line import command_line


class Talker:
    """A generator that interrupts its answer to "wait", refuses "bad", and of whose cache each letter takes a token."""

    def __init__(self) -> None:
        self.language = SimpleNamespace(max_length=40, chats=True)
        self.saved: list[Any] = []
        self.last: GenerationReport | None = None

    def tokens_of(self, prompt: Any, template_arguments: Any = None) -> list[int]:
        count = sum(len(each["content"]) for each in prompt)
        if count > self.language.max_length:
            raise PromptTooLongError(f"the prompt has {count} tokens")
        return [0] * count

    def generate(self, prompt: Any, **_: Any) -> Iterator[str]:
        self.tokens_of(prompt)
        asked = prompt[-1]["content"]
        if asked == "bad":
            raise UserError("refused")
        self.last = GenerationReport(1, 0, 2, 0.1, 0.1, 0, 0, 0, 1, True)
        yield "yes"
        if asked == "wait":
            os.kill(os.getpid(), signal.SIGINT)
        yield f" {len(prompt)}"

    def save(self, path: Path, messages: Any) -> None:
        self.saved.append([each["content"] for each in messages])


def test_a_chat_goes_on(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    talker = Talker()
    monkeypatch.setattr(generate, "open_generator", lambda *_: nullcontext(talker))
    lines = ["one", "wait", "bad", "x" * 41, "four and more of it", "five"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    outcome = command_line(monkeypatch, capfd)(
        "generate", tmp_path / "m.gguf", "--chat", "--system", "s", "--conversation", tmp_path / "c.npz"
    )
    assert outcome.code == 0
    assert outcome.out.splitlines() == ["yes 2", "yes 4", "yes 2", "yes 4"]
    assert talker.saved == [
        ["s", "one", "yes 2"],
        ["s", "one", "yes 2", "wait", "yes 4"],
        ["s", "four and more of it", "yes 2"],
        ["s", "four and more of it", "yes 2", "five", "yes 4"],
    ]
    assert "refused" in outcome.err and "the prompt has " in outcome.err
    assert outcome.err.count("the cache is full: the oldest 4 messages are forgotten") == 1


def test_arguments_of_the_template(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    given: list[Any] = []

    class Asked(Talker):
        def generate(self, prompt: Any, **options: Any) -> Iterator[str]:
            given.append(options)
            return super().generate(prompt)

    monkeypatch.setattr(generate, "open_generator", lambda *_: nullcontext(Asked()))
    words = ["--template-argument", "enable_thinking=false", "--template-argument", "tone=kind", "--top-k", "3"]
    command = command_line(monkeypatch, capfd)
    assert command("generate", tmp_path / "m.gguf", "one", *words).code == 0
    [options] = given
    assert options["template_arguments"] == {"enable_thinking": False, "tone": "kind"}
    assert options["top_k"] == 3 and "temperature" not in options
    refused = command("generate", tmp_path / "m.gguf", "one", "--template-argument", "thinking")
    assert refused.code == 2 and "'thinking' is no NAME=VALUE; write one, for instance" in refused.err
