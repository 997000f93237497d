"""Requests and responses of OpenAI's API: completions of a text, and of a conversation."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flashmem.base.errors import UserError
from flashmem.runtime.generation.conversation import Message
from flashmem.runtime.generation.generated_text import GenerationReport
from flashmem.runtime.generation.options import TextOptions, TextRequest

_ROLES = {"developer": "system"}
"""Roles with another name in a chat template."""

_MOST_STOPS = 4
_LONGEST_STOP = 1000
"""The most texts of `stop`, and the characters of each. The API allows 4."""

_LARGEST = 2**63 - 1

_ONLY: Mapping[str, Any] = {
    "n": 1,
    "best_of": 1,
    "echo": False,
    "suffix": None,
    "logprobs": False,
    "top_logprobs": 0,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "tools": [],
    "functions": [],
    "response_format": {"type": "text"},
    "modalities": ["text"],
}
"""Fields that are supported with one value only. A field with this value, or null, changes nothing."""


class UnknownModelError(UserError):
    """A client asks for a model that is not here."""


@dataclass(frozen=True)
class Request:
    """What a client asks for. `prompt`: a text, tokens, or messages of a `chat`. The rest is as for `Generator.generate`."""

    chat: bool
    prompt: str | Sequence[int] | Sequence[Message]
    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int | None
    stop: tuple[str, ...]
    stream: bool
    with_usage: bool
    template_arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def options(self) -> TextOptions:
        """The keywords of `Generator.generate`."""
        return {
            "max_new_tokens": self.max_new_tokens, "temperature": self.temperature, "top_p": self.top_p,
            "seed": self.seed, "stop": self.stop, "template_arguments": self.template_arguments,
        }  # fmt: skip


def read_request(body: Any, *, chat: bool, model: str, recommended: Mapping[str, float] | None = None) -> Request:
    """The request in a JSON body. `recommended`: numbers of sampling that the model recommends, for those that are missing.

    Raises:
        UserError: a field is missing, has another type, is out of range, or is not supported.
        UnknownModelError: the client asks for another model.
    """
    if not isinstance(body, dict):
        raise UserError("the body is no JSON object")
    if body.get("model", model) != model:
        raise UnknownModelError(f"there is no model {reprlib.repr(body['model'])} here; name {model!r}")
    for name, only in _ONLY.items():
        if body.get(name) not in (None, only):
            raise UserError(f"{name} is not supported; leave it out")
    limit = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    usual = 4096 if chat else 16  # the API's own default for texts; a conversation ends at the model's end
    options = _object(body.get("stream_options"), "stream_options")
    usual_numbers = recommended or {}
    request = Request(
        chat,
        _messages(body.get("messages")) if chat else _prompt(body.get("prompt")),
        _number(body, limit, int, usual),
        _number(body, "temperature", float, usual_numbers.get("temperature", 1.0)),
        _number(body, "top_p", float, usual_numbers.get("top_p", 1.0)),
        None if body.get("seed") is None else _number(body, "seed", int, 0),
        _stop(body.get("stop")),
        _flag(body, "stream"),
        _flag(options, "include_usage"),
        _object(body.get("chat_template_kwargs"), "chat_template_kwargs"),
    )
    TextRequest.resolved(**request.options)  # raises for numbers out of range
    return request


def problem(said: str, status: int) -> dict[str, Any]:
    """The JSON of a response with an error `status`."""
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    return {"error": {"message": said, "type": kind, "param": None, "code": None}}


def _number(body: Mapping[str, Any], name: str, kind: type[Any], usual: Any) -> Any:
    value: Any = body.get(name)
    if value is None:
        return usual
    if type(value) not in (int, kind):
        raise UserError(f"{name} {reprlib.repr(value)} is no {'whole ' if kind is int else ''}number")
    if not abs(value) <= _LARGEST:  # nor is it, for one that is not a number
        raise UserError(f"{name} {reprlib.repr(value)} is not possible; give a number from -{_LARGEST} to {_LARGEST}")
    return value


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value not in (None, False, True):
        raise UserError(f"{name} {reprlib.repr(value)} is neither true nor false")
    return bool(value)


def _object(value: Any, name: str) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, dict):
        raise UserError(f"{name} is no object")
    return value or {}


def _stop(value: Any) -> tuple[str, ...]:
    texts = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts):
        raise UserError("stop is neither a text nor a list of texts")
    if len(texts) > _MOST_STOPS or any(len(each) > _LONGEST_STOP for each in texts):
        raise UserError(f"stop has more than {_MOST_STOPS} texts, or one of more than {_LONGEST_STOP} characters")
    return tuple(texts)


def _prompt(value: Any) -> str | list[int]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        [value] = value
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(type(each) is int for each in value):
        raise UserError("prompt is neither a text nor a list of tokens; several prompts are not supported")
    return value


def _messages(value: Any) -> list[Message]:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise UserError("messages is no list of objects, each with a role and a content")
    return [{"role": _ROLES.get(role := str(each.get("role")), role), "content": _text(each.get("content"))} for each in value]


def _text(content: Any) -> str:
    """The text of a message, which may come in parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [None]
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise UserError("the content of a message is no text")
    return "".join(str(text) for text in texts)


class Responses:
    """The JSON of the responses to one request, with the number `identity`, made at `created` (seconds since 1970)."""

    def __init__(self, request: Request, model: str, identity: str, created: int) -> None:
        self._chat = request.chat
        kind = "chat.completion" if request.chat else "text_completion"
        prefix = "chatcmpl" if request.chat else "cmpl"
        self._fields = {"id": f"{prefix}-{identity}", "object": kind, "created": created, "model": model}

    def whole(self, text: str, report: GenerationReport) -> dict[str, Any]:
        """The response at the end."""
        said = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        return {**self._fields, "choices": [self._choice(said, _reason(report))], "usage": _usage(report)}

    def first(self) -> dict[str, Any] | None:
        """The event before the first piece of a streamed response, if there is one."""
        return self._event({"delta": {"role": "assistant", "content": ""}}) if self._chat else None

    def piece(self, text: str) -> dict[str, Any]:
        """The event of a piece."""
        return self._event({"delta": {"content": text}} if self._chat else {"text": text})

    def last(self, report: GenerationReport) -> dict[str, Any]:
        """The event after the last piece."""
        return self._event({"delta": {}} if self._chat else {"text": ""}, _reason(report))

    def usage(self, report: GenerationReport) -> dict[str, Any]:
        """The event about tokens, if the client asked for it."""
        return {**self._of_stream, "choices": [], "usage": _usage(report)}

    def _event(self, said: Mapping[str, Any], reason: str | None = None) -> dict[str, Any]:
        return {**self._of_stream, "choices": [self._choice(said, reason)]}

    @property
    def _of_stream(self) -> dict[str, Any]:
        return {**self._fields, "object": "chat.completion.chunk"} if self._chat else self._fields

    @staticmethod
    def _choice(said: Mapping[str, Any], reason: str | None) -> dict[str, Any]:
        return {"index": 0, **said, "logprobs": None, "finish_reason": reason}


def _reason(report: GenerationReport) -> str:
    return "stop" if report.ended else "length"


def _usage(report: GenerationReport) -> dict[str, int]:
    prompt = report.prompt
    completion = report.tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
