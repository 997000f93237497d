"""Imitated miscompilations: changes of a kernel's text as a broken compiler would make them.

Each is one edit at one place. A driver that is imitated by them compiles the changed text, while the check reads the right one.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flashmem.runtime.opencl.context import CompiledProgram, Context


@dataclass(frozen=True)
class Miscompilation:
    """A kind of miscompilation: what matches `pattern` in a kernel's body is replaced."""

    name: str
    pattern: str
    replacement: str | Callable[[re.Match[str]], str]

    def sites(self, text: str) -> list[re.Match[str]]:
        """The places of a text where it can happen: in functions, not in macros or statements of bounds."""
        begin = re.search(r"^__kernel", text, re.MULTILINE)
        start = text.index("{", begin.end()) if begin else 0
        lines = [match for match in re.finditer(self.pattern, text) if match.start() > start]
        return [match for match in lines if not _line(text, match.start()).startswith(("#", "//@"))]

    def at(self, text: str, site: re.Match[str]) -> str:
        """The text with the change at one place."""
        new = self.replacement(site) if callable(self.replacement) else site.expand(self.replacement)
        return text[: site.start()] + new + text[site.end() :]


def _line(text: str, place: int) -> str:
    return text[text.rfind("\n", 0, place) + 1 :].lstrip()


def _other_component(match: re.Match[str]) -> str:
    return f".s{int(match[1], 16) ^ 1:x}"


KINDS: Sequence[Miscompilation] = (
    Miscompilation("a dropped barrier", r"barrier\(CLK_LOCAL_MEM_FENCE\);", ";"),
    Miscompilation("a stale accumulator", r"(c0_0 = (?:fma|mad)\([^;]*), c0_0\)", r"\1, c1_0)"),
    Miscompilation("a sum that begins elsewhere", r"(c0_0) = \((float\d*)\)\(0\)", r"\1 = (\2)(1)"),
    Miscompilation("a step left out", r"(for \(int \w+ = \w+); (\w+) < ([^;]+); (\+\+\w+|\w+ \+= \d+)", r"\1; \2 < \3 - 1; \4"),
    Miscompilation("swapped components", r"\.s([0-9a-f])\b", _other_component),
    Miscompilation("a tail's mask", r"\bmin\(([^(),]+), (\w+) - 1\)", r"min(\1, \2 - 2)"),
    Miscompilation("a row off", r"\brow0 \+ (\w+)\b", r"row0 + \1 + 1"),
    Miscompilation("a write past the end", r"if \((?:row|\(int\)get_global_id\(1\)|query|row0 \+ \d+) < (\w+)", r"if (-1 < \1"),
    Miscompilation("a wrong rounding", r"_rte\(", "_rtz("),
    Miscompilation("a sign", r"([\w\])]) - (\w)", r"\1 + \2"),
    Miscompilation("a comparison", r"(\w) < (\w+)\)", r"\1 <= \2)"),
    Miscompilation("a shift", r">> 4", ">> 3"),
    Miscompilation("a constant", r"\b(\d\.\d+e[+-]\d+f)", r"(\1 * 2.0f)"),
    Miscompilation("a stride", r"\* (stride\d|depth|columns|width|inner)\b", r"* (\1 + 1)"),
    Miscompilation("a lane's place", r"get_local_id\(0\)", "(get_local_id(0) ^ 1)"),
    Miscompilation("the larger for the smaller", r"\b(fm_max|fmax|max)\(([^(),]+), ", r"min(\2, "),
)


def changes(text: str, seed: int = 0) -> Iterator[tuple[str, str]]:
    """One change of each kind that a text allows, at a drawn place: its name, and the changed text."""
    generator = random.Random(seed)
    for kind in KINDS:
        sites = kind.sites(text)
        if sites:
            yield kind.name, kind.at(text, generator.choice(sites))


class MiscompilingContext(Context):
    """A context whose driver compiles another text for one kernel, optimised or not."""

    def __init__(self, device: Any, change: Callable[[str], str]) -> None:
        super().__init__(device)
        self._change = change

    def build(self, source: str, options: Sequence[str]) -> CompiledProgram:
        """Compile the changed text."""
        return super().build(self._change(source), options)
