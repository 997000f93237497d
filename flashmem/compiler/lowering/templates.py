"""Kernel rendering: OpenCL C from kernels/templates. Kernels with equal text are one; each begins with the prelude it uses.

Every kernel is rendered twice: plain, and with an interleaved copy stream for transfer mode `interleave`. Both have the same
name, the file name of the template and a hash of the plain text. So the twelve equal layers of a transformer share one kernel.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import PurePosixPath
from typing import Any, Final

from jinja2 import Environment, FunctionLoader, StrictUndefined

from flashmem.base.resources import read_text
from flashmem.base.types import Channel
from flashmem.compiler.lowering.template_cache import TemplateCache
from flashmem.program.kernel_text import Source, kernel_source
from flashmem.program.lanes import LaneKind, lane_places
from flashmem.target.descriptor import CodeStyle

_PLACEHOLDER = "KERNEL_NAME"

DEFAULT_STYLE = CodeStyle()
"""The code style of CPUs and of GPUs that no descriptor says more about."""

_INNER = ("contraction/matmul", "convolution/conv")
"""Kernels that can copy in their innermost loop, where it reads vectors of the depth."""

_LANE_UNITS = 3
_INNER_UNITS = 1
_TALL_UNITS = 2
_STAGED_UNITS = 1
_COPY_UNITS = 4
_SMALL_COPY_UNITS = 8
"""Units of the copy stream that a work-item copies in a step: in a kernel that computes; in an innermost loop; in a contraction
of more than four rows a work-item, where a third one takes registers of two waves of a phone; in a staged contraction, whose
sums and next stage fill the registers; in a kernel that only copies, so that many reads are in flight; in one that copies
texels of 4 or 8 bytes, whose places cost a phone more instructions than the texels.
"""


_SYNTAX: Final[dict[str, Any]] = {
    "trim_blocks": True,
    "lstrip_blocks": True,
    "keep_trailing_newline": True,
    "autoescape": False,
}
"""The options of an environment that change what a template compiles to."""


@cache
def _environment(style: CodeStyle) -> Environment:
    """The template environment for one code style, which templates see as `style`: it loads each template once."""
    environment = Environment(
        loader=FunctionLoader(lambda name: read_text("kernels", f"templates/{name}")),
        undefined=StrictUndefined,
        bytecode_cache=TemplateCache(_SYNTAX),
        **_SYNTAX,
    )
    environment.globals["style"] = style
    return environment


@dataclass(frozen=True)
class Lane:
    """The interleaved copy stream of a kernel, for common/lane.cl.j2: a work-item copies `units` units in a step.

    `alone`: the kernel does nothing else. `inner`: steps are those of the innermost loop.
    """

    kind: LaneKind
    units: int
    alone: bool = False
    inner: bool = False

    @property
    def places(self) -> tuple[LaneKind, ...]:
        """The kind of memory that each of its moves writes."""
        return lane_places(self.kind)


class _TemplateValues:
    """Variables of a template. Equal variables, with values of the same types, render to equal text."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self._key = _typed(values)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _TemplateValues) and self._key == other._key


def _typed(value: Any) -> tuple[object, ...]:
    """`value` with its type, because 1, 1.0 and True are equal and render differently."""
    if isinstance(value, dict):
        return (dict, *((key, _typed(each)) for key, each in sorted(value.items())))
    if isinstance(value, list | tuple):
        return (type(value), *map(_typed, value))
    return type(value), value


_KEPT = 1024
"""Texts that are kept: equal layers have equal kernels, and a model is generated several times before its plan is final."""


@lru_cache(maxsize=_KEPT)
def _rendered(template: str, lane: Lane | None, given: _TemplateValues, style: CodeStyle) -> str:
    text: str = _environment(style).get_template(f"{template}.cl.j2").render(name=_PLACEHOLDER, lane=lane, **given.values)
    if lane:
        module: Any = _environment(style).get_template("common/lane.cl.j2").module
        text = module.definitions(lane) + text
    if style.multiply_add != "expression":  # the prelude defines FM_MAD as an expression
        text = text.replace("FM_MAD(", f"{style.multiply_add}(")
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip()) + "\n"


@lru_cache(maxsize=_KEPT)
def _named(template: str, given: _TemplateValues, style: CodeStyle) -> tuple[str, str]:
    """The name of a plain kernel, with a hash of its text, and the text with that name."""
    text = _rendered(template, None, given, style)
    name = f"{PurePosixPath(template).name}_{hashlib.sha256(text.encode()).hexdigest()[:10]}"
    return name, text.replace(_PLACEHOLDER, name)


class KernelLibrary:
    """Library of rendered kernels: stores each once. `style`: as in the device's descriptor."""

    def __init__(self, style: CodeStyle = DEFAULT_STYLE) -> None:
        self._style = style
        self._plain: dict[str, str] = {}
        self._given: dict[str, tuple[str, _TemplateValues]] = {}

    def kernel(self, template: str, **values: Any) -> str:
        """Render the template `template` (a path in kernels/templates without .cl.j2) for `values`; returns its name."""
        given = _TemplateValues(values)
        name, text = _named(template, given, self._style)
        if name not in self._plain:
            self._plain[name] = text
            self._given[name] = (template, given)
        return name

    def source(self, lane: LaneKind, channels: Collection[Channel]) -> Source:
        """OpenCL C of all kernels so far. `lane` is the memory that their copy streams write (`program.lane_kind`).

        Kernels that only copy are added, for buffers and for textures of `channels`.
        """
        laned = {
            name: self._with_lane(lane, template, given).replace(_PLACEHOLDER, name)
            for name, (template, given) in self._given.items()
        }
        kinds: list[LaneKind] = ["buffer", *sorted({*channels, lane} - {"buffer"})]
        for kind in kinds:
            small = kind not in ("float", "buffer") and self._style.vector_loads
            lane_copy = Lane(kind, _SMALL_COPY_UNITS if small else _COPY_UNITS, alone=True)
            text = _rendered("common/lane_copy", lane_copy, _TemplateValues({}), self._style)
            laned[f"lane_copy_{kind}"] = text.replace(_PLACEHOLDER, f"lane_copy_{kind}")
        return Source(
            plain=kernel_source({name: _prelude(text) + text for name, text in self._plain.items()}),
            lane=kernel_source({name: _prelude(text) + text for name, text in laned.items()}),
            kernels=tuple(self._plain),
        )

    def _with_lane(self, kind: LaneKind, template: str, given: _TemplateValues) -> str:
        return _rendered(template, _lane(kind, template, given.values, self._style), given, self._style)


def _lane(kind: LaneKind, template: str, given: dict[str, Any], style: CodeStyle) -> Lane:
    """The copy stream of a kernel that computes."""
    tile = given.get("t")
    if tile is None:
        return Lane(kind, _LANE_UNITS)
    if style.copies_between_steps and template in _INNER and tile.loop.depth_vector > 1 and not given.get("gathered"):
        return Lane(kind, _INNER_UNITS, inner=True)
    return Lane(kind, _STAGED_UNITS if tile.k_block else _TALL_UNITS if tile.rows > 4 else _LANE_UNITS)


@lru_cache(maxsize=_KEPT)
def _prelude(text: str) -> str:
    """The part of the prelude that `text` uses, without comments, because a driver reads it for each kernel."""
    lines: list[str] = _environment(DEFAULT_STYLE).get_template("common/prelude.cl.j2").render(text=text).splitlines()
    defined = {match[1]: line for line in lines if (match := _DEFINES.match(line))}
    used = set[str]()
    new = set(_WORD.findall(text)) & defined.keys()
    while new:
        used |= new
        new = {word for name in new for word in _WORD.findall(defined[name])} & defined.keys() - used
    kept = [line for line in lines if line.strip() and not line.lstrip().startswith("//") and _name_of(line) in {None, *used}]
    return "\n".join(kept) + "\n"


def _name_of(line: str) -> str | None:
    """The name that a line of the prelude defines; None if every kernel needs the line, or it is rendered only on use."""
    match = _DEFINES.match(line)
    return match[1] if match else None


_WORD = re.compile(r"\w+")
_DEFINES = re.compile(r"(?:#define|__constant sampler_t) (\w+)")
