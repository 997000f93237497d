"""Words become a call: every field of a description is an option, with its help, and its words read back."""

from __future__ import annotations

import importlib.util
from typing import Literal

import pytest

from flashmem.base.errors import UserError
from flashmem.cli.calls.models import CompileCommand, GenerateCommand
from flashmem.cli.main import COMMANDS, call
from flashmem.cli.parser import parse, parser_of
from flashmem.request.description import choice, option


class Toy(CompileCommand):
    """Compile a toy."""

    colour: Literal["red", "blue"] = option("The colour of the bundle.", default="red", kind=choice(Literal["red", "blue"]))


def test_one_field_is_an_option_with_help() -> None:
    made = parse("toy", Toy, ["m.onnx", "--colour", "blue", "--budget=1MB"])
    assert (made.model, made.colour, made.budget) == ("m.onnx", "blue", 1_000_000)
    assert parse("toy", Toy, made.arguments()) == made
    said = " ".join(parser_of("toy", Toy).format_help().split())
    assert "--colour red|blue The colour of the bundle. (default: red)" in said
    with pytest.raises(UserError, match="flashmem toy has no option --color; did you mean --colour"):
        parse("toy", Toy, ["m.onnx", "--color=blue"])


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (["m", "--system", "- be brief", "hello"], {"system": "- be brief", "prompt": "hello"}),
        (["--top-k", "3", "m", "--", "--chat"], {"top_k": 3, "prompt": "--chat"}),
        (["m", "--stop", "a", "hello", "--stop=b"], {"stop": ("a", "b"), "prompt": "hello"}),
        (["m", "--no-speculate", "--speculate"], {"speculate": True}),
        (["m", "--budget", "1MB", "--budget", "2MB"], {"budget": 2_000_000}),
        (["m", "100 %"], {"prompt": "100 %"}),
    ],
)
def test_values_options_and_places_in_any_order(words: list[str], given: dict[str, object]) -> None:
    made = dict(parse("generate", GenerateCommand, words).given)
    assert str(made.pop("model")) == "m"
    assert made == given


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_are_whole(name: str) -> None:
    described = COMMANDS[name]
    assert importlib.util.find_spec(described.module) is not None and described.is_here()
    assert parser_of(name, described).format_help()
    flags = [flag for field in described.options.values() for flag in (*field.flags, field.opposite) if flag]
    assert len(flags) == len({*flags})


def test_a_command_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("flashmem.nowhere", "flashmem.nowhere.compile"):
        monkeypatch.setattr(CompileCommand, "module", module)
        with pytest.raises(UserError, match="flashmem compile is not installed here"):
            call(["compile", "m.onnx"])
    with pytest.raises(UserError, match="flashmem has no command compil; did you mean compile"):
        call(["compil"])
