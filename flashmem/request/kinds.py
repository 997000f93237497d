"""Kinds of options: how a value is read from the words of a command line, checked, and written as words again."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, get_args

from flashmem.base.errors import UserError
from flashmem.base.units import parse_size


@dataclass(frozen=True)
class Kind:
    """Text, unless a subclass says otherwise. `metavar`: the form of a word in help.

    `what` names the option in an error message.
    """

    metavar: str = "TEXT"
    repeats: ClassVar[bool] = False
    """Whether a value is made of the words of several uses of the option, instead of the last one."""

    def read(self, word: Any, what: str) -> Any:
        """The value of a word; with `repeats`, of a list of words. Raises UserError."""
        return self.check(word, what)

    def check(self, value: Any, what: str) -> Any:
        """The value that is kept of one given in Python. Raises UserError."""
        return value

    def write(self, value: Any) -> list[str]:
        """The words of a value, one for each use of the option."""
        return [str(value)]


@dataclass(frozen=True)
class OneOf(Kind):
    """One of the words of a Literal, of several, or of the keys of a mapping."""

    of: Any = None

    @property
    def words(self) -> tuple[str, ...]:
        """The words to choose from; `auto` is the first one, where it is one."""
        return tuple(sorted(_literals(self.of), key=lambda word: word != "auto"))

    def check(self, value: Any, what: str) -> Any:
        """The value, if it is one of the words."""
        if value not in self.words:
            are = "are" if what.endswith("s") else "is"
            raise UserError(f"{what} {value!r} {are} unknown; name one of: {', '.join(self.words)}")
        return value


@dataclass(frozen=True)
class Numeric(Kind):
    """An `int` or a `float`, from `least` to `most`. `hint`: how to choose one, for the error message."""

    of: type[int] | type[float] = int
    least: float = -math.inf
    most: float = math.inf
    hint: str = ""

    def read(self, word: Any, what: str) -> Any:
        """The number in a word."""
        try:
            number = self.of(word)
        except ValueError:
            kind = "a whole number" if self.of is int else "a number"
            raise UserError(f"{what} {word!r} is not {kind}; write one, for instance {self._instance}") from None
        return self.check(number, what)

    def check(self, value: Any, what: str) -> Any:
        """The number, if it is in its range."""
        if self.least <= value <= self.most:
            return value
        if math.isinf(self.most):
            wanted = f"a number of {self.least} or more"
        else:
            wanted = f"between {self.least} and {self.most}" if math.isfinite(self.least) else f"at most {self.most}"
        raise UserError(f"{what} {value} is not {wanted}; {self.hint or f'give one, for instance {self._instance}'}")

    @property
    def _instance(self) -> str:
        return str(self.least if math.isfinite(self.least) else 1)


@dataclass(frozen=True)
class Size(Kind):
    """Bytes, as `parse_size` reads them. `auto`: the value of the word auto, if that may be given."""

    metavar: str = "SIZE"
    auto: Any = ...

    def check(self, value: Any, what: str) -> Any:
        """The number of bytes."""
        return self.auto if value == "auto" and self.auto is not ... else parse_size(value, what=what)


@dataclass(frozen=True)
class File(Kind):
    """A path."""

    metavar: str = "PATH"

    def check(self, value: Any, what: str) -> Any:
        """The path."""
        return Path(value)


@dataclass(frozen=True)
class Flag(Kind):
    """Yes or no, by the option itself, or by another one for `no` (`--no-...` if it is empty)."""

    no: str | None = None


@dataclass(frozen=True)
class Several(Kind):
    """A tuple of values of kind `of`, one for each use of the option."""

    of: Kind = Kind()
    repeats: ClassVar[bool] = True

    def read(self, word: Any, what: str) -> Any:
        """The values of all words."""
        return tuple(self.of.read(each, what) for each in word)

    def check(self, value: Any, what: str) -> Any:
        """The values; a text alone is one."""
        return tuple(self.of.check(each, what) for each in ([value] if isinstance(value, str) else value))

    def write(self, value: Any) -> list[str]:
        """The words of all values."""
        return [word for each in value for word in self.of.write(each)]


@dataclass(frozen=True)
class Parsed(Kind):
    """What the functions make of all words (`reads`), of a value in Python (`checks`), and of the value again (`writes`)."""

    reads: Callable[[Sequence[str]], Any] = tuple
    checks: Callable[[Any], Any] = lambda value: value
    writes: Callable[[Any], list[str]] = list
    repeats: ClassVar[bool] = True

    def read(self, word: Any, what: str) -> Any:
        """The value of all words."""
        return self.reads(word)

    def check(self, value: Any, what: str) -> Any:
        """The value that is kept."""
        return self.checks(value)

    def write(self, value: Any) -> list[str]:
        """The words of the value."""
        return self.writes(value)


def _literals(of: Any) -> list[str]:
    """The words in a Literal, in a union of Literals, in a tuple of them, or the keys of a mapping as it is now."""
    if isinstance(of, str | Mapping):
        return [of] if isinstance(of, str) else [*of]
    return [word for each in (of if isinstance(of, tuple) else get_args(of)) for word in _literals(each)]
