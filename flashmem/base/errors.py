"""The errors flashmem raises.

Two kinds, because two people read them. `UserError` is for whoever can change something (a file, a flag, an input, a
budget): one sentence that says what is wrong, where, and what to do; the command line prints it and exits with 2.
`RunError` is for a run that failed although nothing was asked wrongly; the command line exits with 1.
"""

from __future__ import annotations

from functools import partial
from typing import Any


class UserError(ValueError):
    """Something the user has to change: exit code 2, one sentence, no traceback."""


class MissingFileError(UserError, FileNotFoundError):
    """A file that was named does not exist."""

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle and copy: libraries that pickle tracebacks too would make one of two bases by the other's `__new__`."""
        return type(self), self.args, self.__dict__


class BudgetError(UserError):
    """No plan fits the budget.

    `smallest_bytes` is the smallest budget (same meaning as the one that was refused) that works, `without_patches` the
    smallest without chains of operators in patches; `binding` names what binds it, for instance the layer whose weights must be
    resident together.
    """

    def __init__(self, message: str, *, smallest_bytes: int, binding: str, without_patches: int | None = None) -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes
        self.without_patches = smallest_bytes if without_patches is None else without_patches
        self.binding = binding

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle and copy, which would call the class with the message alone: an error crosses processes."""
        named: dict[str, Any] = {name: vars(self)[name] for name in ("smallest_bytes", "binding", "without_patches")}
        return partial(type(self), **named), self.args, self.__dict__


class UnsupportedModelError(UserError):
    """The model needs operators that flashmem lacks; `nodes` lists every one of them as (node name, reason)."""

    def __init__(self, message: str, nodes: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(message)
        self.nodes = nodes


class BundleError(UserError):
    """A bundle that is truncated, tampered with, or of another format version."""


class NoDeviceError(UserError):
    """No OpenCL device is here, or not the one that was named."""


class FlashmemWarning(UserWarning):
    """Something that costs time and no result; the command line says it as one line."""


class RunError(RuntimeError):
    """A run failed: short read, lost device, refused allocation. The session says whether it is still usable."""
