"""A field of a description is an option everywhere: in Python, on a command line, for a child process and in a key."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, Literal

import pytest

from flashmem.base.errors import UserError
from flashmem.compilation import Compilation
from flashmem.options import resolve
from flashmem.request.description import argument, choice, keywords_of, option
from flashmem.request.kinds import Numeric, Several, Size
from flashmem.request.opening import SessionCall, SessionRequest
from flashmem.request.request import BundleRequest, CompileCall


class Toy(BundleRequest):
    """A request with one more option, which is declared here and nowhere else."""

    colour: Literal["red", "blue"] = option("The colour of the bundle.", default="red", kind=choice(Literal["red", "blue"]))


@keywords_of(Toy)
def painted(request: Toy) -> str:
    """Say the colour."""
    return request.colour


def test_one_field_is_a_keyword() -> None:
    assert (painted(), painted(colour="blue")) == ("red", "blue")
    assert inspect.signature(painted).parameters["colour"].default == "red"
    assert painted.__doc__ is not None and "colour: The colour of the bundle." in painted.__doc__
    with pytest.raises(UserError, match="colour 'green' is unknown; name one of: red, blue"):
        painted(colour="green")  # type: ignore[arg-type]


def test_one_field_is_in_the_name_of_a_bundle() -> None:
    red, blue = (resolve(Toy(device="nvidia", **given)) for given in ({}, {"colour": "blue"}))
    again = resolve(Toy(device="nvidia", colour="red"))
    names = [Compilation(Path("m.onnx"), (each,), b"m").name for each in (red, blue, again)]
    assert names[0] == names[2] != names[1]


def test_one_field_travels_to_a_child_process() -> None:
    assert Toy(colour="blue", budget="1MB").arguments() == ["--budget=1000000", "--colour=blue"]


def test_what_is_given_and_what_is_not() -> None:
    request = BundleRequest(budget=None, precision="fp32", unfusion=False)
    assert (request.budget, request.precision, request.mode) == (None, "fp32", "auto")
    assert request.arguments() == ["--no-unfusion", "--precision=fp32"]
    assert request == BundleRequest(unfusion=False) != BundleRequest()
    assert request.replace(budget="64MB").budget == 64_000_000
    with pytest.raises(AttributeError, match="frozen"):
        request.budget = 3


def test_places_and_missing_fields() -> None:
    call = CompileCall("m.onnx", "m.flashmem", chunk="auto")
    assert (call.model, str(call.output), call.chunk) == ("m.onnx", "m.flashmem", None)
    with pytest.raises(TypeError, match="missing a required argument: 'model'"):
        CompileCall()  # type: ignore[call-arg]
    with pytest.raises(UserError, match=r"flashmem\.compile has no option 'buget'; did you mean 'budget'"):
        CompileCall("m.onnx", buget="1MB")  # type: ignore[call-arg]


def test_a_session_asks_for_a_model_what_a_plan_can_have() -> None:
    asked = SessionRequest(strategy="preload", host_budget="auto", budget="1MB", precision="fp16", process_memory="1GB")
    assert asked.of_bundle == BundleRequest(budget="1MB", precision="fp16")
    assert SessionRequest(strategy="on-demand", host_budget="1MB").of_bundle == BundleRequest(
        strategy="on-demand", host_budget="1MB"
    )
    assert asked.fixed == ("precision",)
    assert asked.of_session.keys() == {"strategy", "host_budget", "budget", "process_memory"}


@pytest.mark.parametrize(
    ("kind", "word", "value", "words"),
    [
        (Size(), "1MB", 1_000_000, ["1000000"]),
        (Size(auto="auto"), "auto", "auto", ["auto"]),
        (Numeric("N", float, 0, 1), "0.5", 0.5, ["0.5"]),
        (Several(), ["a", "b"], ("a", "b"), ["a", "b"]),
        (BundleRequest.options["shapes"].kind, ["x=1x2", "x=2x2"], ({"x": (1, 2)}, {"x": (2, 2)}), ["x=1x2", "x=2x2"]),
        (BundleRequest.options["states"].kind, ["h=g", "c=d"], {"h": "g", "c": "d"}, ["h=g", "c=d"]),
        (BundleRequest.options["constants"].kind, ["k=1,2.5"], {"k": [1, 2.5]}, ["k=1,2.5"]),
    ],
)
def test_words_and_values(kind: Any, word: Any, value: Any, words: list[str]) -> None:
    assert kind.read(word, "it") == value
    assert kind.write(value) == words and kind.check(value, "it") == value


@pytest.mark.parametrize(
    ("kind", "word", "sentence"),
    [
        (Numeric("N", least=1), "0", "it 0 is not a number of 1 or more; give one, for instance 1"),
        (Numeric("N"), "many", "it 'many' is not a whole number; write one, for instance 1"),
        (Numeric("N", float, most=1), "2", "it 2.0 is not at most 1; give one, for instance 1"),
        (Numeric("N", float, 0), "nan", "it nan is not a number of 0 or more; give one, for instance 0"),
    ],
)
def test_a_word_that_is_no_value(kind: Any, word: str, sentence: str) -> None:
    with pytest.raises(UserError) as refusal:
        kind.read(word, "it")
    assert str(refusal.value) == sentence


def test_a_flag_has_an_opposite_if_it_says_so() -> None:
    assert BundleRequest.options["unfusion"].opposite == "--no-unfusion"
    assert SessionCall.options["check_kernels"].opposite == ""
    assert argument("A model.", kw_only=False, kind=str).required
