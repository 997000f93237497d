"""The OpenCL C of a program: one text, with a marked part for each kernel."""

from __future__ import annotations

from dataclasses import dataclass, field

KERNEL_MARK = "//# "
"""Begins the line that names a kernel in a source: what follows, up to the next such line, is all that the kernel needs."""


@dataclass(frozen=True)
class Source:
    """OpenCL C of a program: `plain` for map, alias and dma; `lane` is the same kernels, each with a stream lane.

    A text is one part for each kernel (`kernel_texts`), and each part a program of its own.
    """

    plain: str
    lane: str
    kernels: tuple[str, ...] = field(default=())


def kernel_texts(text: str) -> dict[str, str]:
    """The parts of a source by kernel. What stands before the first mark belongs to all of them."""
    shared, *parts = f"\n{text}".split(f"\n{KERNEL_MARK}")
    return {name.strip(): f"{shared}\n{rest}".lstrip("\n") for name, _, rest in (part.partition("\n") for part in parts)}


def kernel_source(parts: dict[str, str]) -> str:
    """The source that has these parts."""
    return "".join(f"{KERNEL_MARK}{name}\n{part}\n" for name, part in parts.items())
