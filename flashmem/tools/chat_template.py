"""Conversations by a chat template in Jinja, as the library transformers renders it. The runtime loads this module by name, for
templates that are no fixed texts around the messages."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from flashmem.base.errors import UserError


def rendered(template: str, marks: Mapping[str, str], messages: Sequence[Mapping[str, str]]) -> str:
    """The text of `messages`, up to where the assistant speaks. `marks`: names that the template uses, such as `bos_token`.

    Raises:
        UserError: the template refuses the messages, or is none.
    """
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(why: str) -> str:
        raise TemplateError(why)

    environment: Any = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals |= {"raise_exception": refuse, "strftime_now": time.strftime}
    try:
        made = environment.from_string(template)
        return str(made.render(messages=[dict(each) for each in messages], add_generation_prompt=True, **marks))
    except Exception as error:  # a template may raise anything
        raise UserError(f"the model's chat template refuses the conversation: {' '.join(str(error).split())}") from error
