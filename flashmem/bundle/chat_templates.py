"""Chat templates in Jinja are programs of whoever made the model. A child process renders them, with little time and memory."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from flashmem.base.child_processes import module_environment, python_module
from flashmem.base.errors import RunError, UserError
from flashmem.bundle.language import Template

_RENDERER = "flashmem.tools.chat_template"
"""The module of the desk that the child runs. Jinja is not on a phone."""

_SECONDS = 10
_BYTES = 512 << 20
"""The processor time of the child, and the memory that it can have."""

_REFUSES = "the model's chat template refuses the conversation"


def can_render() -> bool:
    """Whether templates can be rendered here."""
    try:
        return all(importlib.util.find_spec(name) is not None for name in (_RENDERER, "jinja2"))
    except ModuleNotFoundError:  # the package of the renderer
        return False


def rendered(
    template: Template,
    conversations: Sequence[Sequence[Mapping[str, str]]],
    *,
    most_characters: int,
    clock: bool | str = True,
    arguments: Mapping[str, Any] | None = None,
) -> list[str | UserError]:
    """The text of each conversation, up to where the assistant speaks; an error for one that the template refuses.

    `most_characters`: of a text. `clock`: whether the template can ask for the time; a text for the format that it asks for,
    between two of that text. `arguments`: further names that the template can use.

    Raises:
        UserError: it takes too much time or memory, or is no template.
        RunError: the child process failed.
    """
    asked = {
        "seconds": _SECONDS, "bytes": _BYTES, "template": template.text, "marks": dict(template.marks), "clock": clock,
        "most_characters": most_characters, "arguments": dict(arguments or {}),
        "conversations": [[dict(each) for each in messages] for messages in conversations],
    }  # fmt: skip
    limits = f"the model's chat template takes more than {_SECONDS} s or {_BYTES >> 20} MB; give a text to continue"
    try:
        done = subprocess.run(
            python_module(_RENDERER, str(os.getpid())),
            input=json.dumps(asked).encode(),
            capture_output=True,
            env=module_environment(),
            timeout=10 * _SECONDS,  # where others have the processor
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(limits) from error
    except OSError as error:
        raise RunError(f"the chat template cannot be rendered: no child process ({error.strerror or error})") from error
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        raise UserError(limits)
    try:
        found = json.loads(done.stdout)
        return [UserError(f"{_REFUSES}: {each['refused']}") if "refused" in each else str(each["text"]) for each in found]
    except (ValueError, KeyError, TypeError) as error:
        said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        if "MemoryError" in said:
            raise UserError(limits) from error
        raise RunError(f"the chat template was not rendered: its process ended with {done.returncode} ({said})") from error
