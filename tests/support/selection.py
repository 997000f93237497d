"""Which tests a plain run selects: the others need `--thorough`."""

from __future__ import annotations

import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable

RUNTIMES = ("intel-cpu", "pocl")
"""The OpenCL runtimes of the tests, as parameters name them."""

SHARE = 8
"""A plain run selects one of so many cases of a test with parameters."""

_RUNTIME = re.compile(rf"(?<![\w.])({'|'.join(RUNTIMES)})(?![\w.])")


def sample(names: Iterable[str]) -> frozenset[str]:
    """A share of the cases of each test in `names`, at least one, each on one OpenCL runtime.

    Checksums of names choose, so every run selects the same cases, and the tests of a file are on both runtimes.
    """
    cases = _alike(names, _without_runtime).values()
    tests = _alike((min(case, key=_checksum) for case in cases), lambda name: name.split("[")[0]).values()
    return frozenset(name for test in tests for name in sorted(test, key=_checksum)[: -(-len(test) // SHARE)])


def is_on(name: str, driver: str) -> bool:
    """Whether a test has the descriptor of `driver` among its parameters."""
    return re.search(rf"\[.*(?<![\w.]){re.escape(driver)}(?![\w.]).*\]", name) is not None


def one_of_each_file(names: Iterable[str]) -> frozenset[str]:
    """One test of each file, chosen by checksums: always the same one."""
    return frozenset(min(each, key=_checksum) for each in _alike(names, lambda name: name.split("::")[0]).values())


def _without_runtime(name: str) -> str:
    """`name` without its OpenCL runtime, if it has one only."""
    return _RUNTIME.sub("*", name) if len(set(_RUNTIME.findall(name))) == 1 else name


def _alike(names: Iterable[str], of: Callable[[str], str]) -> dict[str, list[str]]:
    alike: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        alike[of(name)].append(name)
    return alike


def _checksum(name: str) -> int:
    return zlib.crc32(name.encode())
