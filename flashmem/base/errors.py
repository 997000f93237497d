"""The exceptions of flashmem.

There are two kinds, and defects. A `UserError` is a mistake that the user can correct: a file, a flag, an input, a budget. Its
message is one sentence: what is wrong, where, and what to do. The command line prints it and exits with code 2. A `RunError` is
the failure of a run whose request was correct; the command line exits with code 1.
"""

from __future__ import annotations

from functools import partial
from pathlib import PurePath
from textwrap import shorten
from typing import Any

from flashmem.base.version import __version__


class UserError(ValueError):
    """An error that the user can correct: exit code 2, one sentence, no traceback."""


class MissingFileError(UserError, FileNotFoundError):
    """A file that the user named does not exist."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy through `type(self)`: the default would call `__new__` of only one of the two base classes."""
        return type(self), self.args, self.__dict__


class BudgetError(UserError):
    """No plan fits the budget.

    `smallest_bytes` is the smallest budget that works, in the same unit of account as the refused one. `without_patches` is the
    smallest without patch-based tiling (chains of operators in patches). `binding` names the limiting part, for instance the
    layer whose weights must be resident together.
    """

    def __init__(self, message: str, *, smallest_bytes: int, binding: str, without_patches: int | None = None) -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes
        self.without_patches = smallest_bytes if without_patches is None else without_patches
        self.binding = binding

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with the keyword arguments, because the error is passed between processes."""
        named: dict[str, Any] = {name: vars(self)[name] for name in ("smallest_bytes", "binding", "without_patches")}
        return partial(type(self), **named), self.args, self.__dict__


class UnsupportedModelError(UserError):
    """The model needs operators that flashmem lacks. `nodes` lists all of them as (node name, reason)."""

    def __init__(self, message: str, nodes: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(message)
        self.nodes = nodes


class BundleError(UserError):
    """A bundle that is truncated, tampered with, or of another format version."""


class NoDeviceError(UserError):
    """No OpenCL device is available, or not the one that was named."""


class FlashmemWarning(UserWarning):
    """A condition that costs time but changes no result. The command line prints it as one line."""


class RunError(RuntimeError):
    """A run failed: a short read, a lost device, a refused allocation. The session knows whether it can still be used."""


class DefectError(RunError):
    """flashmem itself is at fault, not the request. The message asks for a report; the original exception is the cause."""


def defect(what: str, error: BaseException) -> DefectError:
    """The error for an unexpected `error` while flashmem did `what`; raise it from `error`."""
    return DefectError(
        f"{what} failed by a defect of flashmem, not of yours: please report it, with this line and the model "
        f"(flashmem {__version__}, {_describe(error)})"
    )


def _describe(error: BaseException) -> str:
    """The innermost cause of `error` in one line: its type, where it was raised, and its message."""
    while error.__cause__ is not None:
        error = error.__cause__
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    place = "" if last is None else f" in {PurePath(last.tb_frame.f_code.co_filename).name}:{last.tb_lineno}"
    text = shorten(str(error), 300, placeholder=" ...")
    text = text if text.isprintable() else repr(text)
    return f"{type(error).__name__}{place}{': ' if text else ''}{text}"
