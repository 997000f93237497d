"""Words of a command line become a call, by argparse: its options are the fields of the call's description."""

from __future__ import annotations

import argparse
import difflib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, TypeVar

from flashmem.base.errors import UserError
from flashmem.request.description import Option, OptionSet
from flashmem.request.kinds import Flag

Asked = TypeVar("Asked", bound=OptionSet)


class Parser(argparse.ArgumentParser):
    """A parser whose refusals are a UserError of one sentence."""

    def error(self, message: str) -> NoReturn:
        """Raise UserError."""
        raise UserError(f"{self.prog}: {message}; see {self.prog} --help")


def parse(name: str, description: type[Asked], words: Sequence[str]) -> Asked:
    """The call of command `name` that `words` describe. Prints help, and raises SystemExit, if they ask for it.

    Raises:
        UserError: an unknown option, a missing one, or a value that an option refuses.
    """
    parser = parser_of(name, description)
    given, rest = parser.parse_known_intermixed_args([*_join_options(description, words)])
    if rest:
        raise UserError(_surplus(name, description, rest[0]))
    values = vars(given).items()
    return description(**{field: description.options[field].read(value) for field, value in values})


def parser_of(name: str, description: type[OptionSet]) -> Parser:
    """The parser of a command."""
    text = inspect.cleandoc(description.__doc__ or "")
    parser = Parser(f"flashmem {name}", description=text, allow_abbrev=False, formatter_class=_Help)
    parser.usage = " ".join(
        [parser.prog, "[OPTIONS]", *(_place(each) for each in description.options.values() if each.is_word)]
    )
    groups: dict[str, Any] = {"": parser}
    for field in description.options.values():
        if field.is_word or field.help is not None:
            if field.group not in groups:
                groups[field.group] = parser.add_argument_group(field.group)
            _add(groups[field.group], field)
    return parser


def _add(group: Any, field: Option) -> None:
    """Add an option. A value is a word until the option reads it, and absent if it is not given."""
    rest: dict[str, Any] = {
        "default": argparse.SUPPRESS,
        "help": argparse.SUPPRESS if field.hidden else text_of(field).replace("%", "%%"),
    }
    if field.is_word:
        nargs = "+" if field.kind.repeats else None if field.required else "?"
        group.add_argument(field.name, metavar=field.form, nargs=nargs, **rest)
    elif isinstance(field.kind, Flag):
        opposite = [field.opposite] if field.opposite else []
        group.add_argument(*field.flags, *opposite, dest=field.name, action=_Switch, off=field.opposite, **rest)
    else:
        action = "append" if field.kind.repeats else "store"
        group.add_argument(*field.flags, dest=field.name, metavar=field.form, action=action, required=field.required, **rest)


class _Switch(argparse.Action):
    """Yes, or no by the option `off`."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, off: str, default: Any, help: str) -> None:
        super().__init__(option_strings, dest, nargs=0, default=default, help=help)
        self.off = off

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, option_string != self.off)


class _Help(argparse.HelpFormatter):
    """Help with a column for the names of options, and paragraphs as they are written."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.split("\n\n")
        return "\n\n".join(super(_Help, self)._fill_text(each, width, indent) for each in paragraphs)


def _place(field: Option) -> str:
    several = f"{field.form}..." if field.kind.repeats else field.form
    return several if field.required else f"[{several}]"


def text_of(field: Option) -> str:
    """The text of an option in help, with its default."""
    shown = field.shown
    if isinstance(field.kind, Flag):
        shown = "" if not field.opposite else field.flags[0] if field.default else field.opposite
    elif not shown and not field.required and field.default not in (None, (), ""):
        shown = str(field.default)
    return f"{field.help} (default: {shown})" if shown else str(field.help)


def _join_options(description: type[OptionSet], words: Sequence[str]) -> Iterator[str]:
    """`words` with each option and its value in one, so that a value may begin with a dash."""
    takes = {flag for field in description.options.values() if not isinstance(field.kind, Flag) for flag in field.flags}
    left = iter(words)
    for word in left:
        if word == "--":
            yield word
            yield from left
        elif word in takes and (value := next(left, None)) is not None:
            yield f"{word}={value}"
        else:
            yield word


def _surplus(name: str, description: type[OptionSet], word: str) -> str:
    """Why a word is not understood."""
    if not word.startswith("-"):
        return f"flashmem {name} takes no further argument {word!r}; see flashmem {name} --help"
    known = [
        flag for field in description.options.values() for flag in (*field.flags, field.opposite) if flag and not field.hidden
    ]
    flag = word.partition("=")[0]
    near = difflib.get_close_matches(flag, known, 1)
    return f"flashmem {name} has no option {flag}; {f'did you mean {near[0]}?' if near else f'see flashmem {name} --help'}"
