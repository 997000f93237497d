"""A process that renders a chat template in Jinja, as the library transformers does, for `flashmem.bundle.chat_templates`.

It reads JSON from stdin, limits its own time and memory, and writes for each conversation a text or why there is none.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flashmem.base.child_processes import end_with


def main() -> None:
    """Answer the request on stdin; the argument is the id of the parent's process."""
    if not end_with(int(sys.argv[1])):
        return
    asked = json.loads(sys.stdin.buffer.read())
    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_CPU: asked["seconds"], resource.RLIMIT_AS: asked["bytes"]}
    for kind, most in limits.items():
        hard = resource.getrlimit(kind)[1]
        least = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (least, least))
    render = _renderer(asked["template"], {**asked["marks"], **asked["arguments"]}, clock=asked["clock"])
    answers = [_answer(render, messages, asked["most_characters"]) for messages in asked["conversations"]]
    json.dump(answers, sys.stdout)


_Render = Callable[[Sequence[Mapping[str, str]]], str]


def _renderer(template: str, names: Mapping[str, Any], *, clock: bool | str) -> _Render:
    """A function that renders the template; it raises any error. `names`: those that it uses, such as `bos_token`."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(why: str) -> str:
        raise TemplateError(why)

    environment: Any = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def mark(form: str) -> str:
        return f"{clock}{form}{clock}"

    environment.globals |= {"raise_exception": refuse}
    if clock:
        environment.globals["strftime_now"] = mark if isinstance(clock, str) else time.strftime

    def render(messages: Sequence[Mapping[str, str]]) -> str:
        given = {**names, "messages": messages, "add_generation_prompt": True}
        return str(environment.from_string(template).render(given))

    return render


def _answer(render: _Render, messages: Sequence[Mapping[str, str]], most_characters: int) -> dict[str, str]:
    try:
        text = render(messages)
    except MemoryError:
        raise
    except Exception as error:  # a template may raise anything
        return {"refused": " ".join(str(error).split())[:500]}
    if len(text) > most_characters:
        return {"refused": f"it makes {len(text)} characters of it, and {most_characters} are possible"}
    return {"text": text}


if __name__ == "__main__":
    main()
