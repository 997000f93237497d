"""Registers of a kernel, estimated from its text, and the work-group size that it declares.

A driver reports CL_KERNEL_WORK_GROUP_SIZE after it has allocated registers: the more a work-item has, the fewer items a group
may have. The estimate is the largest number of 32-bit values whose names are visible at one place, as if each had a register of
its own for as long as its block lasts.
"""

from __future__ import annotations

import re

_KINDS = ("char", "uchar", "short", "ushort", "half", "int", "uint", "float", "bool", "size_t", "long", "ulong", "double")
_WIDE = _KINDS[-3:]  # two registers each
_TYPE = rf"(?:unsigned\s+)?(?P<kind>{'|'.join(_KINDS)})(?P<lanes>2|3|4|8|16)?"
_TOKEN = re.compile(
    rf"(?P<open>{{)|(?P<close>}})|(?:(?<=[;{{}}(])|^)\s*(?:const\s+)?{_TYPE}\s+(?P<names>[A-Za-z_]\w*[^;{{}}]*)",
    re.MULTILINE,
)
_CALLS = re.compile(r"\([^()]*\)")
_NAME = re.compile(r"^\s*\w+\s*(?:\[\s*(\d+)\s*\])?(?:\[\s*(\d+)\s*\])?")
_REQUIRED = r"reqd_work_group_size\s*\(\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*\)"


def private_values(text: str, kernel: str) -> int:
    """The estimate for a kernel of `text`, which has no comments."""
    found = re.search(rf"\b{kernel}\s*\(", text)
    assert found is not None, f"no kernel {kernel}"
    held, most = [0], 0
    for token in _TOKEN.finditer(text, text.index("{", found.end())):
        if token["open"]:
            held.append(held[-1])
        elif token["close"]:
            held.pop()
            if len(held) == 1:
                break
        else:
            width = (1 + (token["kind"] in _WIDE)) * int(token["lanes"] or 1)
            names = token["names"]
            while (plain := _CALLS.sub("", names)) != names:
                names = plain
            held[-1] += width * sum(map(_elements, names.split(",")))
            most = max(most, held[-1])
    return most


def _elements(declarator: str) -> int:
    found = _NAME.match(declarator)
    if found is None:  # part of an initial value that has a comma
        return 0
    return int(found[1] or 1) * int(found[2] or 1)


def required_group(text: str, kernel: str) -> tuple[int, int, int] | None:
    """The work-group size that a kernel's attribute requires."""
    found = re.search(rf"{_REQUIRED}[\s)]*(?:void\s+)?(?:__)?(?:kernel\s+)?(?:void\s+)?{kernel}\s*\(", text)
    return None if found is None else (int(found[1]), int(found[2]), int(found[3]))
