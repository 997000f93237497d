"""Descriptions: frozen objects whose fields are options, each of which is declared once.

    class BundleRequest(OptionSet):
        budget: Size = option("Limit on all memory.", default=None, kind=Size())

From a field follow the keyword in Python (`keywords_of`), the option of a command (`flashmem.cli.parser`), the words for a
child process (`arguments`) and a part of the key in a cache (`values`).
"""

from __future__ import annotations

import difflib
import functools
import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Concatenate, Generic, Literal, ParamSpec, Self, TypeVar, dataclass_transform, overload

from flashmem.base.errors import UserError
from flashmem.request.kinds import File, Flag, Kind, Numeric, OneOf

Given = TypeVar("Given")
Value = TypeVar("Value")
P = ParamSpec("P")
Owner = TypeVar("Owner")
Result = TypeVar("Result")

Scope = Literal["compile", "session", "both"]
"""What an option is about: the bundle, a session, or both, so that a session of a bundle may choose it again."""

_REQUIRED: Any = inspect.Parameter.empty


class Converted(Generic[Given, Value]):
    """The type of a field that is given as one type and kept as another, for instance a size."""

    @overload
    def __get__(self, instance: None, owner: Any) -> Given: ...
    @overload
    def __get__(self, instance: object, owner: Any) -> Value: ...
    def __get__(self, instance: Any, owner: Any) -> Any:
        """Types only: an `Option` is what stands there."""

    def __set__(self, instance: Any, value: Given) -> None:
        """Types only: a description is frozen."""


@dataclass(eq=False)
class Option:
    """A field of a description.

    `help` is the text of a command's option, and None for one that only Python has; `doc` that of a keyword, if it says more.
    `shown`: the default in words, where it is no value. `flags`: the option's names, if they do not follow from the field's.
    `what`: its name in error messages. `group`: the heading in help.
    """

    default: Any
    help: str | None
    kind: Kind
    doc: str = ""
    shown: str = ""
    flags: tuple[str, ...] = ()
    what: str = ""
    scope: Scope = "compile"
    group: str = ""
    positional: bool = False
    hidden: bool = False
    name: str = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        self.what = self.what or name.rstrip("_").replace("_", " ")
        if not (self.flags or self.positional):
            self.flags = (f"--{name.rstrip('_').replace('_', '-')}",)

    def __get__(self, instance: OptionSet | None, owner: type) -> Any:
        return self if instance is None else instance.given.get(self.name, self.default)

    @property
    def required(self) -> bool:
        """Whether it has no default."""
        return self.default is _REQUIRED

    @property
    def is_word(self) -> bool:
        """Whether a command line has it by its place; with `flags`, only Python has."""
        return self.positional and not self.flags

    @property
    def form(self) -> str:
        """The form of its words, for help."""
        return "|".join(self.kind.words) if isinstance(self.kind, OneOf) else self.kind.metavar

    def read(self, words: Any) -> Any:
        """The value of a word, of several, or of a flag. Raises UserError."""
        return words if isinstance(self.kind, Flag) else self.kind.read(words, self.what)

    def checked(self, value: Any) -> Any:
        """The value that is kept of a given one; None means the default. Raises UserError."""
        if value is None:
            return None if self.required else self.default
        return self.kind.check(value, self.what)

    def arguments(self, value: Any) -> list[str]:
        """A value as the words of a command line."""
        if value is None:
            return []
        if isinstance(self.kind, Flag):
            return [self.flags[0] if value else self.opposite]
        prefix = "" if self.is_word else f"{self.flags[0]}="
        return [f"{prefix}{word}" for word in self.kind.write(value)]

    @property
    def opposite(self) -> str:
        """The name of a flag for no; empty if there is none."""
        no = self.kind.no if isinstance(self.kind, Flag) else None
        return "" if no is None else no or f"--no-{self.flags[0].removeprefix('--')}"


def option(help: str | None, *, default: Any = _REQUIRED, kind: Kind | type | None = None, **more: Any) -> Any:
    """A field; see `Option`. `kind` may be a type, and is that of the default if it is left out."""
    return Option(default, help, _kind(type(default) if kind is None else kind), **more)


def argument(help: str, *, kw_only: Literal[False], default: Any = _REQUIRED, kind: Kind | type, **more: Any) -> Any:
    """A field that is given by its place, and on a command line without a flag. `kw_only` tells type checkers so."""
    return Option(default, help, _kind(kind), positional=True, **more)


def _kind(kind: Kind | type) -> Kind:
    if isinstance(kind, Kind):
        return kind
    if kind is bool:
        return Flag()
    if kind in (int, float):
        return Numeric("N", kind)
    return File() if kind is Path else Kind()


@dataclass_transform(kw_only_default=True, field_specifiers=(option, argument))
class OptionSet:
    """What a user asks for. `given` has the checked values of those fields that were given; others have their defaults.

    Raises:
        UserError: an unknown field, or a value that its option refuses.
        TypeError: a field is missing.
    """

    options: ClassVar[Mapping[str, Option]] = {}
    asker: ClassVar[str] = "a request"
    """Who is asked, in error messages."""

    given: Mapping[str, Any]

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        cls.options = {
            name: field for base in reversed(cls.__mro__) for name, field in vars(base).items() if isinstance(field, Option)
        }
        places = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
        parameters = [
            inspect.Parameter(field.name, places[not field.positional], default=field.default)
            for field in sorted(cls.options.values(), key=lambda field: not field.positional)
        ]
        cls.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]

    def __init__(self, *values: Any, **given: Any) -> None:
        for name in given.keys() - self.options.keys():
            raise UserError(self._unknown(name))
        bound = inspect.signature(type(self)).bind(*values, **given).arguments
        self.__dict__["given"] = {name: self.options[name].checked(value) for name, value in bound.items()}
        self.check()

    def check(self) -> None:
        """Check fields against each other. Raises UserError."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen; make another one with `replace`")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.values() == other.values()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.given.items())})"

    def replace(self, **changes: Any) -> Self:
        """The same with other values of some fields."""
        return type(self)(**{**self.given, **changes})

    def values(self, of: type[OptionSet] | None = None) -> dict[str, Any]:
        """All fields, or those that `of` has, and their values."""
        return {name: getattr(self, name) for name in (of or type(self)).options}

    def given_as(self, of: type[Result]) -> Result:
        """A description `of` another class, with the fields that it has too."""
        known: Mapping[str, Option] = of.options  # type: ignore[attr-defined]
        return of(**{name: value for name, value in self.given.items() if name in known})

    def arguments(self) -> list[str]:
        """The given fields as the words of a command line."""
        return [word for name, value in self.given.items() for word in self.options[name].arguments(value)]

    def _unknown(self, name: str) -> str:
        """Why there is no field `name`."""
        known = [*self.options]
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has: {', '.join(known)}"
        return f"{self.asker} has no option {name!r}; {hint}"


def keywords_of(description: Callable[P, Value]) -> Callable[[Callable[[Value], Result]], Callable[P, Result]]:
    """A function of a description, to be called with its fields; their texts are added to its docstring."""

    def decorate(function: Callable[[Value], Result]) -> Callable[P, Result]:
        @functools.wraps(function)
        def called(*values: P.args, **given: P.kwargs) -> Result:
            return function(description(*values, **given))

        return _document(called, description)

    return decorate


def initialised_by(
    description: Callable[P, Value],
) -> Callable[[Callable[[Owner, Value], None]], Callable[Concatenate[Owner, P], None]]:
    """An `__init__` with a description, to be called with its fields, as by `keywords_of`."""

    def decorate(function: Callable[[Owner, Value], None]) -> Callable[Concatenate[Owner, P], None]:
        @functools.wraps(function)
        def called(self: Owner, /, *values: P.args, **given: P.kwargs) -> None:
            function(self, description(*values, **given))

        return _document(called, description)

    return decorate


def _document(function: Callable[P, Result], description: Any) -> Callable[P, Result]:
    """`function` with the signature of a description, and the texts of its fields as `Args:` of the docstring."""
    own = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)] if function.__name__ == "__init__" else []
    signature = inspect.signature(description)
    function.__signature__ = signature.replace(parameters=[*own, *signature.parameters.values()])  # type: ignore[attr-defined]
    lines = ["Args:"]
    for name in signature.parameters:
        field = description.options[name]
        lines.append(textwrap.indent(f"{name}: {field.doc or field.help}", "    "))
    before, raises, after = inspect.cleandoc(function.__doc__ or "").partition("\nRaises:")
    function.__doc__ = f"{before}\n" + "\n".join(lines) + f"\n{raises}{after}"
    return function


def choice(of: Any) -> OneOf:
    """The kind of an option whose value is one of the words of a Literal."""
    return OneOf(of=of)
