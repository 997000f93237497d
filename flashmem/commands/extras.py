"""The offline half is an extra: what is said where it is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flashmem.errors import UserError


@contextmanager
def offline_half(what: str) -> Iterator[None]:
    """Around imports of the offline half; `what` needs it.

    Raises:
        UserError: a module that comes with an extra is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("flashmem"):
            raise
        raise UserError(f"{what} needs {error.name}; install flashmem with its `compile` or `desktop` extra") from error
