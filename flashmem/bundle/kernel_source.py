"""Security checks of a bundle's kernel source: it must be complete OpenCL C that makes the compiler read no other file.

A bundle can have an untrusted origin, and a compiler with the user's rights reads its source. `#include` and inline assembly
(`.incbin`) would make it read other files and put them into an answer. So only the directives, pragmas and build options of
flashmem's own kernels are allowed. Text that a compiler could take for the beginning of another construct is refused too:
quotes, trigraphs, digraphs, and names joined by `##`.

What a kernel does when it runs is checked elsewhere (docs/reference/security.md).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from flashmem.base.errors import BundleError
from flashmem.program.kernel_text import KERNEL_MARK, code_of, last_word

_ANYWHERE = re.compile(r"[\0\r]|\\(?!\n)|\?\?[=/'()!<>-]")
_MARKS = ('"', "'", "`", "%:", "/*")
_NAMES = re.compile(
    r"\b(?:asm|__asm|__asm__|_Pragma|__pragma|__has_\w+|__FILE__|__FILE_NAME__|__BASE_FILE__|__DATE__|__TIME__|__TIMESTAMP__|"
    r"__INCLUDE_LEVEL__)\b"
)
_IN_NAMES = ("asm", "_Pragma", "__pragma", "__has_", "_FILE_", "__DATE__", "__TIME", "__INCLUDE")
_DIRECTIVE = re.compile(r"[ \t\v\f]*#[ \t\v\f]*(\w*)(.*)")
_DIRECTIVES = frozenset({"define", "undef", "if", "ifdef", "ifndef", "elif", "else", "endif", "pragma"})
_PRAGMA = re.compile(r"OPENCL EXTENSION \w+ ?: ?(?:enable|disable)|OPENCL FP_CONTRACT (?:ON|OFF|DEFAULT)|unroll(?: ?\d+)?")
_NEXT_WORD = re.compile(r"\s*(\w*)")
_OWN_BEGINNING = re.compile(r"as_|lane_")
_PARAMETERS = re.compile(r"[ \t\v\f]*\w+\(([^)]*)\)")
_OPTION = re.compile(r"-cl-[a-z-]+(?:=CL[0-9.]+)?")


def check_source(text: str) -> None:
    """Raise BundleError if a kernel in `text` could make the compiler read another file, or has a construct that no flashmem
    kernel uses.
    """
    for part in f"\n{text}".split(f"\n{KERNEL_MARK}"):  # each kernel is compiled alone: a comment ends with its section
        _check_part(part)


def _check_part(text: str) -> None:
    if any(each in text for each in ("\0", "\r", "\\", "??")) and (found := _ANYWHERE.search(text)):
        raise _refusal(found[0])
    code = code_of(text)
    if "#" in code:
        for line in code.split("\n"):
            if "#" in line:
                _check_line(line)
    for mark in _MARKS:
        if mark in code:
            raise _refusal(mark)
    if any(each in code for each in _IN_NAMES) and (found := _NAMES.search(code)):
        raise _refusal(found[0])


def _check_line(line: str) -> None:
    """Check a line with a directive or with names joined by `##`."""
    directive = _DIRECTIVE.match(line)
    if directive is not None:
        name = directive[1]
        rest = " ".join(directive[2].split())
        if name not in _DIRECTIVES or (name == "pragma" and not _PRAGMA.fullmatch(rest)):
            raise _refusal(f"#{name} {rest}")
        parameters = _PARAMETERS.match(directive[2]) if name == "define" else None
        if parameters is not None and _OWN_BEGINNING.search(parameters[1]):
            raise _refusal(f"#{name} {rest}")
    before, *following = line.split("##")
    for behind in following:
        first = last_word(before.rstrip())
        second = _NEXT_WORD.match(behind)
        assert second is not None  # it may be empty
        # A name that starts with a digit, or with one of these prefixes and no parameter, is none of the names above.
        if not second[1].isdecimal() and not _OWN_BEGINNING.match(first):
            raise _refusal(f"{first}##{second[1]}")
        before = behind[second.end() :]


def check_options(options: Sequence[str]) -> None:
    """Raise BundleError unless all compiler `options` are OpenCL's own."""
    wrong = next((option for option in options if not _OPTION.fullmatch(option)), None)
    if wrong is not None:
        raise BundleError(f"the bundle compiles its kernels with {wrong!r}, which flashmem never does; compile the model again")


def _refusal(what: str) -> BundleError:
    return BundleError(f"the bundle's kernels hold {what[:60]!r}, which flashmem never writes; compile the model again")
