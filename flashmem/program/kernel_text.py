"""The OpenCL C source of a program, with one marked section for each kernel."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

KERNEL_MARK = "//# "
"""Marker at the start of a line that names a kernel. The kernel's complete text extends to the next marker."""


@dataclass(frozen=True)
class Source:
    """OpenCL C of a program: `plain` for modes map, alias and dma; `lane` has the same kernels, each with a stream lane.

    Each text has one section for each kernel (`kernel_texts`). A section can be compiled as a program, alone or with others
    (`joined_texts`).
    """

    plain: str
    lane: str
    kernels: tuple[str, ...] = field(default=())


def kernel_texts(text: str) -> dict[str, str]:
    """The section of each kernel. The text before the first marker belongs to all of them."""
    shared, *parts = f"\n{text}".split(f"\n{KERNEL_MARK}")
    return {name.strip(): f"{shared}\n{rest}".lstrip("\n") for name, _, rest in (part.partition("\n") for part in parts)}


def kernel_source(parts: dict[str, str]) -> str:
    """The text composed of these sections; the inverse of `kernel_texts`."""
    return "".join(f"{KERNEL_MARK}{name}\n{part}\n" for name, part in parts.items())


def shuffles(text: str) -> bool:
    """Whether work-items of a subgroup exchange registers in `text`, for which drivers need a newer OpenCL C."""
    return "FM_SHUFFLE" in text


def uses_tensor_cores(text: str) -> bool:
    """Whether kernels of `text` multiply matrices of halves by a warp, where a device has the instructions."""
    return "FM_TENSOR_CORES" in text


def uses_dot_products(text: str) -> bool:
    """Whether kernels of `text` multiply words of four bytes, where a device has instructions for them."""
    return "FM_HAS_DOT" in text


def joined_texts(texts: Iterable[str]) -> str:
    """The text of one program with the kernels of several sections.

    The sections of a kernel have the same helpers, and macros of the same name. So each helper gets a name of its own, and a
    macro ends with its section.
    """
    lines: list[str] = []
    for number, text in enumerate(texts):
        helpers = dict.fromkeys(_HELPER.findall(text))
        lines += [f"#define {name} {name}_{number}" for name in helpers]
        lines += [text, *(f"#undef {name}" for name in dict.fromkeys([*helpers, *_MACRO.findall(text)]))]
    return "\n".join(lines) + "\n"


_HELPER = re.compile(r"^(?:static inline \w+|__constant sampler_t) (\w+)", re.MULTILINE)
_MACRO = re.compile(r"^#define (\w+)", re.MULTILINE)
