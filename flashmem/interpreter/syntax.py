"""The syntax of OpenCL C kernels: tokens to functions, as trees of expressions and statements (ISO C99 6.5 to 6.9)."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from flashmem.interpreter.errors import UnknownTextError

SCALARS: Final = frozenset(
    [
        "void",
        "bool",
        "char",
        "uchar",
        "short",
        "ushort",
        "int",
        "uint",
        "long",
        "ulong",
        "size_t",
        "float",
        "half",
        "double",
        "image2d_t",
        "sampler_t",
    ]
)
_TYPE = re.compile(r"(char|uchar|short|ushort|int|uint|long|ulong|float|half|double)(2|3|4|8|16)")
_QUALIFIERS = frozenset(
    [
        "const",
        "restrict",
        "volatile",
        "static",
        "inline",
        "__kernel",
        "kernel",
        "__read_only",
        "__write_only",
        "read_only",
        "write_only",
        "__private",
        "private",
    ]
)
_SPACES = {"__global": "global", "__local": "local", "__constant": "constant", "global": "global", "local": "local"}


@dataclass(frozen=True)
class Type:
    """A type: a scalar or vector of `width` elements, or, with `space`, a pointer to such in an address space."""

    name: str
    width: int = 1
    space: str = ""  # of a pointer's target: "global", "local", "constant", "private"

    @property
    def is_pointer(self) -> bool:
        """Whether it is a pointer."""
        return bool(self.space)

    @property
    def target(self) -> Type:
        """The type that a pointer points to."""
        return Type(self.name, self.width)


class SyntaxNode:
    """A node of the tree."""


@dataclass(frozen=True)
class Literal(SyntaxNode):
    """A number with its suffix."""

    text: str


@dataclass(frozen=True)
class Name(SyntaxNode):
    """A variable, or a constant of OpenCL."""

    name: str


@dataclass(frozen=True)
class Unary(SyntaxNode):
    """`sign` before an operand."""

    sign: str
    operand: SyntaxNode


@dataclass(frozen=True)
class Increment(SyntaxNode):
    """++ or -- ("+" or "-") before (`first`) or after a variable or element."""

    sign: str
    target: SyntaxNode
    first: bool


@dataclass(frozen=True)
class Binary(SyntaxNode):
    """Two operands and the operator between them."""

    sign: str
    left: SyntaxNode
    right: SyntaxNode


@dataclass(frozen=True)
class Assign(SyntaxNode):
    """An assignment; `sign` is the operator before "=", or ""."""

    sign: str
    target: SyntaxNode
    value: SyntaxNode


@dataclass(frozen=True)
class Ternary(SyntaxNode):
    """condition ? yes : no."""

    condition: SyntaxNode
    yes: SyntaxNode
    no: SyntaxNode


@dataclass(frozen=True)
class Call(SyntaxNode):
    """A call of a function by its name."""

    name: str
    arguments: tuple[SyntaxNode, ...]


@dataclass(frozen=True)
class Index(SyntaxNode):
    """base[index]."""

    base: SyntaxNode
    index: SyntaxNode


@dataclass(frozen=True)
class Member(SyntaxNode):
    """Components of a vector: base.name."""

    base: SyntaxNode
    name: str


@dataclass(frozen=True)
class Cast(SyntaxNode):
    """A conversion, or a vector of several parts."""

    type: Type
    parts: tuple[SyntaxNode, ...]


@dataclass(frozen=True)
class Comma(SyntaxNode):
    """Expressions in a row; the last one is the value."""

    parts: tuple[SyntaxNode, ...]


@dataclass(frozen=True)
class Declare(SyntaxNode):
    """One declared variable, or an array if it has `sizes`."""

    type: Type
    space: str  # "local", or "private"
    name: str
    sizes: tuple[SyntaxNode, ...]
    value: SyntaxNode | None
    values: tuple[SyntaxNode, ...] = ()


@dataclass(frozen=True)
class Expression(SyntaxNode):
    """A statement that is an expression."""

    value: SyntaxNode


@dataclass(frozen=True)
class If(SyntaxNode):
    """A condition with one or two branches."""

    condition: SyntaxNode
    yes: SyntaxNode
    no: SyntaxNode | None


@dataclass(frozen=True)
class Loop(SyntaxNode):
    """for, while, and (`after`) do-while."""

    begin: SyntaxNode | None
    condition: SyntaxNode | None
    step: SyntaxNode | None
    body: SyntaxNode
    after: bool = False


@dataclass(frozen=True)
class Block(SyntaxNode):
    """Statements in a row; `scope`: names declared in them end with it."""

    statements: tuple[SyntaxNode, ...]
    scope: bool = True


@dataclass(frozen=True)
class Jump(SyntaxNode):
    """break, continue, or return with a value perhaps."""

    kind: str
    value: SyntaxNode | None = None


@dataclass(frozen=True)
class Parameter:
    """A function's parameter; `constant` if the function cannot write what it points to, or its texture."""

    type: Type
    name: str
    constant: bool

    @property
    def is_memory(self) -> bool:
        """Whether it is memory that a caller gives: a pointer or a texture."""
        return self.type.is_pointer or self.type.name == "image2d_t"


@dataclass(frozen=True)
class Function:
    """A function with its body."""

    name: str
    result: Type
    parameters: tuple[Parameter, ...]
    body: Block


@dataclass
class TranslationUnit:
    """A text: its functions by name, and its constants."""

    functions: dict[str, Function] = field(default_factory=dict)
    constants: list[Declare] = field(default_factory=list)


_LEVELS: Final = (
    ("||",), ("&&",), ("|",), ("^",), ("&",), ("==", "!="), ("<", ">", "<=", ">="), ("<<", ">>"), ("+", "-"), ("*", "/", "%"),
)  # fmt: skip
_ASSIGNMENTS: Final = {"=": "", **{f"{sign}=": sign for sign in ("+", "-", "*", "/", "%", "&", "|", "^", "<<", ">>")}}


def parse(tokens: Sequence[str]) -> TranslationUnit:
    """Parse the tokens of a text. Raises UnknownTextError."""
    return _Parser(tokens).unit()


def parse_expression(tokens: Sequence[str]) -> SyntaxNode:
    """Parse the tokens of one expression. Raises UnknownTextError."""
    return _Parser(tokens).whole_expression()


def constant(node: SyntaxNode) -> int:
    """The value of an expression of whole numbers without names. Raises UnknownTextError."""
    if isinstance(node, Literal):
        return int(node.text.rstrip("uUlL"), 0)
    if isinstance(node, Unary) and node.sign in _CONSTANT_UNARY:
        return _CONSTANT_UNARY[node.sign](constant(node.operand))
    if isinstance(node, Binary) and node.sign in _CONSTANT:
        return _CONSTANT[node.sign](constant(node.left), constant(node.right))
    raise UnknownTextError("an expression that is no constant")


def _quotient(a: int, b: int) -> int:
    if b == 0:
        raise UnknownTextError("a division by zero")
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


_CONSTANT_UNARY: Final[dict[str, Callable[[int], int]]] = {"-": lambda a: -a, "+": lambda a: a, "!": lambda a: int(not a)}
_CONSTANT: Final[dict[str, Callable[[int, int], int]]] = {
    "||": lambda a, b: int(bool(a or b)), "&&": lambda a, b: int(bool(a and b)),
    "==": lambda a, b: int(a == b), "!=": lambda a, b: int(a != b), "<": lambda a, b: int(a < b), ">": lambda a, b: int(a > b),
    "<=": lambda a, b: int(a <= b), ">=": lambda a, b: int(a >= b),
    "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "/": _quotient,
    "%": lambda a, b: a - b * _quotient(a, b),
}  # fmt: skip


class _Parser:
    def __init__(self, tokens: Sequence[str]) -> None:
        self._tokens = [*tokens, "", "", ""]
        self._at = 0

    # -- tokens

    def _see(self, *wanted: str) -> bool:
        return self._tokens[self._at] in wanted

    def _next(self) -> str:
        token = self._tokens[self._at]
        self._at += 1
        return token

    def _take(self, wanted: str) -> bool:
        if self._see(wanted):
            self._at += 1
            return True
        return False

    def _expect(self, wanted: str) -> None:
        if not self._take(wanted):
            raise UnknownTextError(f"{' '.join(self._tokens[self._at : self._at + 6])!r} where {wanted!r} was expected")

    def whole_expression(self) -> SyntaxNode:
        found = self._expression()
        self._expect("")
        return found

    # -- declarations

    def unit(self) -> TranslationUnit:
        found = TranslationUnit()
        while not self._see(""):
            if self._take(";"):
                continue
            base, space, constant = self._specifiers()
            pointed = self._read_pointers(base, space)
            name = self._next()
            if self._see("("):
                function = self._function(pointed, name)
                if function is not None:
                    found.functions[name] = function
            else:
                found.constants += self._read_declarations(base, "constant", pointed, name)
                self._expect(";")
            del constant
        return found

    def _function(self, result: Type, name: str) -> Function | None:
        self._expect("(")
        parameters: list[Parameter] = []
        while not self._take(")"):
            base, space, constant = self._specifiers()
            kind = self._read_pointers(base, space)
            if not (base.name == "void" and self._see(")")):
                parameters.append(Parameter(kind, self._next(), constant))
            self._take(",")
        if self._take(";"):
            return None  # declared only
        return Function(name, result, tuple(parameters), self._block())

    def _is_type(self, token: str) -> bool:
        return token in SCALARS or _TYPE.fullmatch(token) is not None

    def _begins_declaration(self) -> bool:
        token = self._tokens[self._at]
        return token in _QUALIFIERS or token in _SPACES or self._is_type(token)

    def _specifiers(self) -> tuple[Type, str, bool]:
        """A type without stars, its address space, and whether it is const."""
        kind = ""
        space = ""
        constant = False
        while True:
            token = self._tokens[self._at]
            if token == "__attribute__":
                self._next()
                self._skip_brackets()
            elif token in _QUALIFIERS:
                constant |= token in ("const", "__read_only", "read_only")
                self._next()
            elif token in _SPACES:
                space = _SPACES[token]
                self._next()
            elif not kind and self._is_type(token):
                kind = self._next()
            else:
                break
        if not kind:
            raise UnknownTextError(f"the type {' '.join(self._tokens[self._at : self._at + 4])!r}")
        match = _TYPE.fullmatch(kind)
        return (Type(match[1], int(match[2])) if match else Type(kind)), space, constant or space == "constant"

    def _read_pointers(self, base: Type, space: str) -> Type:
        """`base`, or a pointer to it, with what follows a star."""
        if not self._take("*"):
            return base
        while self._see(*_QUALIFIERS):
            self._next()
        if self._see("*"):
            raise UnknownTextError("a pointer to a pointer")
        return Type(base.name, base.width, space or "private")

    def _skip_brackets(self) -> None:
        depth = 0
        while True:
            token = self._next()
            depth += (token == "(") - (token == ")")
            if depth == 0:
                return
            if not token:
                raise UnknownTextError("brackets that do not end")

    def _read_declarations(self, base: Type, space: str, kind: Type, name: str) -> list[Declare]:
        """Declared names from `name`, which was read, to the last one."""
        found: list[Declare] = []
        while True:
            sizes: list[SyntaxNode] = []
            while self._take("["):
                sizes.append(Literal("0") if self._see("]") else self._expression())
                self._expect("]")
            value: SyntaxNode | None = None
            values: tuple[SyntaxNode, ...] = ()
            if self._take("="):
                if self._see("{"):
                    values = self._read_list()
                else:
                    value = self._assignment()
            found.append(Declare(kind, space, name, tuple(sizes), value, values))
            if not self._take(","):
                return found
            kind = self._read_pointers(base, space if space != "constant" else "")
            name = self._next()

    def _read_list(self) -> tuple[SyntaxNode, ...]:
        self._expect("{")
        values: list[SyntaxNode] = []
        while not self._take("}"):
            values += self._read_list() if self._see("{") else (self._assignment(),)
            self._take(",")
        return tuple(values)

    # -- statements

    def _block(self) -> Block:
        self._expect("{")
        statements: list[SyntaxNode] = []
        while not self._take("}"):
            if self._see(""):
                raise UnknownTextError("a block that does not end")
            statements.append(self._statement())
        return Block(tuple(statements))

    def _statement(self) -> SyntaxNode:
        if self._see("{"):
            return self._block()
        if self._take(";"):
            return Block(())
        if self._take("if"):
            self._expect("(")
            condition = self._expression()
            self._expect(")")
            yes = self._statement()
            return If(condition, yes, self._statement() if self._take("else") else None)
        if self._take("for"):
            return self._for()
        if self._take("while"):
            self._expect("(")
            condition = self._expression()
            self._expect(")")
            return Loop(None, condition, None, self._statement())
        if self._take("do"):
            body = self._statement()
            self._expect("while")
            self._expect("(")
            condition = self._expression()
            self._expect(")")
            self._expect(";")
            return Loop(None, condition, None, body, after=True)
        if self._see("break", "continue", "return"):
            kind = self._next()
            value = None if self._see(";") else self._expression()
            self._expect(";")
            return Jump(kind, value)
        return self._simple()

    def _simple(self) -> SyntaxNode:
        """A declaration or an expression, with its semicolon."""
        if self._begins_declaration():
            base, space, _ = self._specifiers()
            kind = self._read_pointers(base, space)
            where = "private" if kind.is_pointer else space or "private"
            declared = self._read_declarations(base, where, kind, self._next())
            self._expect(";")
            return Block(tuple(declared), scope=False)
        value = self._expression()
        self._expect(";")
        return Expression(value)

    def _for(self) -> SyntaxNode:
        self._expect("(")
        begin = None if self._take(";") else self._simple()
        condition = None if self._see(";") else self._expression()
        self._expect(";")
        step = None if self._see(")") else self._expression()
        self._expect(")")
        return Loop(begin, condition, step, self._statement())

    # -- expressions

    def _expression(self) -> SyntaxNode:
        parts = [self._assignment()]
        while self._take(","):
            parts.append(self._assignment())
        return parts[0] if len(parts) == 1 else Comma(tuple(parts))

    def _assignment(self) -> SyntaxNode:
        left = self._ternary()
        if self._tokens[self._at] in _ASSIGNMENTS:
            sign = _ASSIGNMENTS[self._next()]
            return Assign(sign, left, self._assignment())
        return left

    def _ternary(self) -> SyntaxNode:
        condition = self._binary(0)
        if not self._take("?"):
            return condition
        yes = self._expression()
        self._expect(":")
        return Ternary(condition, yes, self._assignment())

    def _binary(self, level: int) -> SyntaxNode:
        if level == len(_LEVELS):
            return self._unary()
        left = self._binary(level + 1)
        while self._see(*_LEVELS[level]):
            sign = self._next()
            left = Binary(sign, left, self._binary(level + 1))
        return left

    def _unary(self) -> SyntaxNode:
        for sign in ("++", "--"):
            if self._take(sign):
                return Increment(sign[0], self._unary(), first=True)
        if self._see("-", "+", "!", "~", "*", "&"):
            return Unary(self._next(), self._unary())
        if self._see("(") and (self._is_type(self._tokens[self._at + 1]) or self._tokens[self._at + 1] in (*_SPACES, "const")):
            self._expect("(")
            base, space, _ = self._specifiers()
            kind = self._read_pointers(base, space)
            self._expect(")")
            if self._see("(") and kind.width > 1 and not kind.is_pointer:
                self._expect("(")
                parts = [self._assignment()]
                while self._take(","):
                    parts.append(self._assignment())
                self._expect(")")
                return self._postfix(Cast(kind, tuple(parts)))
            return Cast(kind, (self._unary(),))
        return self._postfix(self._primary())

    def _primary(self) -> SyntaxNode:
        token = self._next()
        if token == "(":
            inner = self._expression()
            self._expect(")")
            return inner
        if token[:1].isdigit() or (token[:1] == "." and len(token) > 1):
            return Literal(token)
        if not re.match(r"[A-Za-z_]", token):
            raise UnknownTextError(f"{token!r} in an expression")
        if self._take("("):
            arguments: list[SyntaxNode] = []
            while not self._take(")"):
                arguments.append(self._assignment())
                self._take(",")
            return Call(token, tuple(arguments))
        return Name(token)

    def _postfix(self, base: SyntaxNode) -> SyntaxNode:
        while True:
            if self._take("["):
                base = Index(base, self._expression())
                self._expect("]")
            elif self._take("."):
                base = Member(base, self._next())
            elif self._see("++", "--"):
                base = Increment(self._next()[0], base, first=False)
            else:
                return base
