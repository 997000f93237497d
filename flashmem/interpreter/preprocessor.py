"""The C preprocessor, as far as kernels use it (ISO C99 6.10): conditions, macros with and without parameters, and pasting."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flashmem.interpreter.errors import UnknownTextError
from flashmem.interpreter.syntax import constant, parse_expression

_TOKEN = re.compile(
    r"\s*(?:(?P<number>0[xX][0-9a-fA-F]+[uUlL]*|(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?[fFhuUlL]*)"
    r"|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<sign><<=|>>=|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|->|##|[-+*/%&|^~!<>=?:;,.(){}\[\]#])"
    r'|(?P<text>"[^"]*"))'
)
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)


@dataclass(frozen=True)
class _Macro:
    """A macro: its parameters (None for one without brackets) and its tokens."""

    parameters: tuple[str, ...] | None
    body: tuple[str, ...]


def preprocess(text: str, defined: Mapping[str, str] | None = None) -> list[str]:
    """The tokens of `text` after preprocessing. `defined`: object-like macros that exist before.

    Raises:
        UnknownTextError: a directive, a character or a use of a macro is not understood.
    """
    macros = {name: _Macro(None, tuple(tokens(body))) for name, body in (defined or {}).items()}
    done: list[str] = []
    waiting: list[str] = []  # not expanded yet: a macro's arguments may extend over lines
    active = [True]
    taken: list[bool] = []  # whether a branch of each open condition was active already
    for line in _COMMENT.sub(" ", text.replace("\\\n", " ")).splitlines():
        stripped = line.strip()
        if not stripped.startswith("#"):
            if active[-1]:
                waiting += tokens(line)
            continue
        word, _, rest = stripped[1:].strip().partition(" ")
        if word in ("ifdef", "ifndef", "if"):
            holds = active[-1] and _holds(word, rest, macros)
            active.append(holds)
            taken.append(holds)
        elif word in ("elif", "else"):
            if not taken:
                raise UnknownTextError(f"#{word} without a condition")
            holds = active[-2] and not taken[-1] and (word == "else" or _holds("if", rest, macros))
            active[-1] = holds
            taken[-1] = taken[-1] or holds
        elif word == "endif":
            active.pop()
            taken.pop()
        elif active[-1] and word in ("define", "undef"):
            done += _expand(waiting, macros)
            waiting = []
            _define(word, rest, macros)
        elif active[-1] and word != "pragma":
            raise UnknownTextError(f"the directive #{word}")
    return done + _expand(waiting, macros)


def tokens(text: str) -> list[str]:
    """Split `text` into tokens. Raises UnknownTextError."""
    found = []
    at = 0
    end = len(text.rstrip())
    while at < end:
        match = _TOKEN.match(text, at)
        if match is None:
            raise UnknownTextError(f"the characters {text[at : at + 20]!r}")
        found.append(match[0].strip())
        at = match.end()
    return found


def _define(word: str, rest: str, macros: dict[str, _Macro]) -> None:
    match = re.match(r"(\w+)(\(([^)]*)\))?(.*)", rest.strip(), re.DOTALL)
    if match is None:
        raise UnknownTextError(f"#{word} {rest}")
    if word == "undef":
        macros.pop(match[1], None)
        return
    parameters = None if match[2] is None else tuple(each.strip() for each in match[3].split(",") if each.strip())
    macros[match[1]] = _Macro(parameters, tuple(tokens(match[4])))


def _holds(word: str, rest: str, macros: Mapping[str, _Macro]) -> bool:
    if word != "if":
        return (rest.split()[0] in macros) == (word == "ifdef")
    replaced: list[str] = []
    given = iter(tokens(rest))
    for token in given:
        if token == "defined":
            name = next(given)
            if name == "(":
                name = next(given)
                next(given)
            replaced.append(str(int(name in macros)))
        else:
            replaced.append(token)
    words = [token if not re.match(r"[A-Za-z_]", token) else "0" for token in _expand(replaced, macros)]
    return bool(constant(parse_expression(words)))


def _expand(given: Iterable[str], macros: Mapping[str, _Macro], hidden: frozenset[str] = frozenset()) -> list[str]:
    """The tokens with macros replaced, except those in `hidden`, which are being replaced already."""
    source = list(given)
    done = []
    at = 0
    while at < len(source):
        token = source[at]
        macro = macros.get(token) if token not in hidden else None
        if macro is None:
            done.append(token)
            at += 1
            continue
        inner = hidden | {token}
        if macro.parameters is None:
            body = list(macro.body)
            behind = at + 1
        elif at + 1 < len(source) and source[at + 1] == "(":
            arguments, behind = _arguments(source, at + 2)
            body = _substitute(token, macro, arguments, macros, hidden)
        else:
            done.append(token)
            at += 1
            continue
        pasted = _expand(_paste(body), macros, inner)
        # The name of a macro with parameters may come from a replacement, and its arguments from the text behind.
        if pasted and pasted[-1] not in inner and (last := macros.get(pasted[-1])) and last.parameters is not None:
            source[at:behind] = pasted
            done += source[at : at + len(pasted) - 1]
            at += len(pasted) - 1
            continue
        done += pasted
        at = behind
    return done


def _arguments(source: list[str], at: int) -> tuple[list[list[str]], int]:
    """The arguments of a macro from index `at` on, behind the opening bracket, and the index behind the closing one."""
    found: list[list[str]] = [[]]
    depth = 0
    while at < len(source):
        token = source[at]
        at += 1
        if token == ")" and depth == 0:
            return found, at
        if token == "," and depth == 0:
            found.append([])
            continue
        depth += (token in "([{") - (token in ")]}")
        found[-1].append(token)
    raise UnknownTextError("the arguments of a macro do not end")


def _substitute(
    name: str, macro: _Macro, arguments: list[list[str]], macros: Mapping[str, _Macro], hidden: frozenset[str]
) -> list[str]:
    parameters = macro.parameters or ()
    if len(arguments) != len(parameters) and not (arguments == [[]] and not parameters):
        raise UnknownTextError(f"{len(arguments)} arguments for the macro {name}")
    by_name = dict(zip(parameters, arguments, strict=False))
    whole = {parameter: _expand(argument, macros, hidden) for parameter, argument in by_name.items()}
    body: list[str] = []
    for place, token in enumerate(macro.body):
        if token in by_name:
            beside = "##" in macro.body[max(place - 1, 0) : place] or "##" in macro.body[place + 1 : place + 2]
            body += by_name[token] if beside else whole[token]
        else:
            body.append(token)
    return body


def _paste(body: list[str]) -> list[str]:
    done: list[str] = []
    at = 0
    while at < len(body):
        if body[at] == "##" and done and at + 1 < len(body):
            done[-1] += body[at + 1]
            at += 2
        else:
            done.append(body[at])
            at += 1
    return done
