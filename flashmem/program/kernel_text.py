"""The OpenCL C source of a program, with one marked section for each kernel."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
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


@dataclass(frozen=True)
class KernelHead:
    """The beginning of a kernel in a text: from `__kernel` at `start` to the end of its parameters; `end` is behind it."""

    name: str
    parameters: str
    start: int
    end: int


def kernel_heads(code: str) -> Iterator[KernelHead]:
    """The beginnings of the kernels in a text, in one pass over it. Comments are not looked for (see `code_of`)."""
    at = 0
    while (begun := _KERNEL.search(code, at)) is not None:
        behind = _BODY.search(code, begun.end())
        at = len(code) if behind is None else behind.start()
        name = _NAMED.search(code, begun.end(), at)
        closed = -1 if name is None else code.find(")", name.end(), at)
        if name is not None and closed >= 0:
            yield KernelHead(name[1], code[name.end() : closed], begun.start(), closed + 1)


def last_word(text: str) -> str:
    """The word at the end of a text, or "". A search for one would take the square of a long word's length."""
    found = _WORD.match(text[::-1])
    assert found is not None  # it may be empty
    return found[0][::-1]


def code_of(text: str) -> str:
    """The text as a compiler reads it, before its macros: lines joined, and a blank in place of each comment.

    It ends with "/*" if a comment does not end. A text with a zero byte is none.
    """
    code = _COMMENT.sub(" ", text.replace("\\\n", "") + _END)  # which ends any comment, so that each is searched once
    closed = code.endswith(_END_OF_CODE)
    return code.removesuffix(_END_OF_CODE) if closed else f"{code}/*"


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


_COMMENT = re.compile(r"/(?:/[^\n]*|\*.*?\*/)", re.DOTALL)
_END = "\n\0/**/"
_END_OF_CODE = "\n\0 "
_KERNEL = re.compile(r"__kernel\b")
_WORD = re.compile(r"\w*")
_BODY = re.compile(r"[;{]")
_NAMED = re.compile(r"\bvoid\s+(\w+)\s*\(")
_HELPER = re.compile(r"^(?:static inline \w+|__constant sampler_t) (\w+)", re.MULTILINE)
_MACRO = re.compile(r"^#define (\w+)", re.MULTILINE)
