"""Kernels rendered from kernels/templates; equal text is one kernel.

Every kernel is rendered twice: plain, and with a stream lane for transfer mode `interleave`. Both have the same name, which is
the template's name and a hash of the plain text, so that the twelve equal layers of a transformer share one kernel.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined

from flashmem.program import Source
from flashmem.resources import read_text

_PLACEHOLDER = "KERNEL_NAME"


@cache
def _environment() -> Environment:
    """One for all programs: a template is compiled once in a process."""
    return Environment(
        loader=FunctionLoader(lambda name: read_text("kernels", f"templates/{name}")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


class KernelLibrary:
    """Renders kernels and keeps each once. `image_lane` is the channel type that lanes write ('float', 'half', or 'buffer')."""

    def __init__(self, lane: str) -> None:
        self._lane = lane
        self._plain: dict[str, str] = {}
        self._laned: dict[str, str] = {}

    def kernel(self, template: str, **context: Any) -> str:
        """The name of the kernel that `template` gives for `context`."""
        plain = self._render(template, "", context)
        name = f"{template}_{hashlib.sha256(plain.encode()).hexdigest()[:10]}"
        if name not in self._plain:
            self._plain[name] = plain.replace(_PLACEHOLDER, name)
            self._laned[name] = self._render(template, self._lane, context).replace(_PLACEHOLDER, name)
        return name

    def source(self) -> Source:
        """OpenCL C of all kernels so far."""
        prelude = _environment().get_template("prelude.cl.j2").render(text="".join(self._plain.values()))
        copies = [
            self._render("lane_copy", kind, {}).replace(_PLACEHOLDER, name)
            for kind, name in (("buffer", "lane_copy_buffer"), (self._lane, "lane_copy_image"))
            if name == "lane_copy_buffer" or kind != "buffer"
        ]
        return Source(
            plain="\n".join([prelude, *self._plain.values()]),
            lane="\n".join([prelude, *self._laned.values(), *copies]),
            kernels=tuple(self._plain),
        )

    def _render(self, template: str, lane: str, context: dict[str, Any]) -> str:
        text: str = _environment().get_template(f"{template}.cl.j2").render(name=_PLACEHOLDER, lane=lane, **context)
        return "\n".join(line.rstrip() for line in text.splitlines() if line.strip()) + "\n"
