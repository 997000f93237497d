"""Functions of a text as Python closures that execute them on a `LaunchState`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from flashmem.interpreter import functions
from flashmem.interpreter.errors import UnknownTextError
from flashmem.interpreter.machine import LaunchState, PointerArray, Reference, Value, choose_pointer
from flashmem.interpreter.memory import Image, KernelMemory, Pointer, PointerChoice
from flashmem.interpreter.syntax import (
    Assign,
    Binary,
    Block,
    Call,
    Cast,
    Comma,
    Declare,
    Expression,
    Function,
    If,
    Increment,
    Index,
    Jump,
    Literal,
    Loop,
    Member,
    Name,
    SyntaxNode,
    Ternary,
    TranslationUnit,
    Type,
    Unary,
    constant,
)
from flashmem.interpreter.values import (
    DTYPES,
    Array,
    Number,
    arithmetic,
    bitwise,
    chosen,
    common,
    compare,
    convert,
    is_float,
    known,
    number,
    of_width,
    promote,
    reinterpret,
    truth,
)

Evaluate = Callable[[LaunchState], Value]
Execute = Callable[[LaunchState], None]
Put = Callable[[LaunchState, Value], None]

_CONSTANTS: Final[dict[str, Number]] = {
    "INFINITY": number(math.inf, "float"), "NAN": number(math.nan, "float"),
    "FLT_MAX": number(float(np.finfo(np.float32).max), "float"),
    "MAXFLOAT": number(float(np.finfo(np.float32).max), "float"), "FLT_MIN": number(float(np.finfo(np.float32).tiny), "float"),
    "FLT_EPSILON": number(2.0**-23, "float"), "M_PI_F": number(math.pi, "float"),
    "INT_MAX": number(2**31 - 1, "int"), "INT_MIN": number(-(2**31), "int"), "UINT_MAX": number(2**32 - 1, "uint"),
    "CHAR_MAX": number(127, "int"), "CHAR_MIN": number(-128, "int"), "UCHAR_MAX": number(255, "int"),
    "LONG_MAX": Number(np.array([2**63 - 1], np.int64)), "LONG_MIN": Number(np.array([-(2**63)], np.int64)),
    "ULONG_MAX": Number(np.array([2**64 - 1], np.uint64)), "true": number(1, "int"), "false": number(0, "int"),
    "CLK_LOCAL_MEM_FENCE": number(1, "int"), "CLK_GLOBAL_MEM_FENCE": number(2, "int"),
}  # fmt: skip
_IDENTITIES: Final = frozenset(
    ("get_global_id", "get_local_id", "get_group_id", "get_global_size", "get_local_size", "get_num_groups")
)
_FENCES: Final = frozenset(
    ("barrier", "work_group_barrier", "mem_fence", "read_mem_fence", "write_mem_fence", "sub_group_barrier")
)
_VECTOR_ACCESS: Final = re.compile(r"v(load|store)(_half)?(\d*)(_rte|_rtz|_rtn|_rtp)?")
_IMAGE_ACCESS: Final = re.compile(r"(read|write)_image(f|h|i|ui)")
_IMAGE_TYPES: Final = {"f": "float", "h": "half", "i": "int", "ui": "uint"}
_NUMERIC: Final = frozenset("+-*/%")
_COMPARISONS: Final = frozenset(("==", "!=", "<", ">", "<=", ">="))


@dataclass
class _Called:
    """A function, compiled once: the slots of its parameters and of its result, and its body."""

    parameters: list[tuple[int, Type]]
    result: int
    body: Execute


class TextCompiler:
    """Compiles the functions of a text. Each variable of the text has a slot in `LaunchState.variables`."""

    def __init__(self, unit: TranslationUnit) -> None:
        self._unit = unit
        self._called: dict[str, _Called] = {}
        self._scopes: list[dict[str, tuple[int, Type]]] = [{}]
        self._active: list[str] = []  # functions that are being compiled
        self._returned: list[int] = []  # of each of these the slot of its result, and of who has returned
        self._loops: list[tuple[int, int]] = []  # slots of who has left each open loop, and its body
        self.slots = 0
        self.begin: list[Execute] = [self._declaration(each) for each in unit.constants if each.type.name != "sampler_t"]

    def kernel(self, name: str) -> _Called:
        """The kernel of this name. Raises UnknownTextError."""
        return self._function(self._unit.functions[name])

    def _new_slot(self) -> int:
        self.slots += 1
        return self.slots - 1

    def _name(self, name: str, type_: Type) -> int:
        slot = self._new_slot()
        self._scopes[-1][name] = slot, type_
        return slot

    def _found(self, name: str) -> tuple[int, Type] | None:
        return next((scope[name] for scope in reversed(self._scopes) if name in scope), None)

    def _function(self, function: Function) -> _Called:
        if function.name in self._called:
            return self._called[function.name]
        if function.name in self._active:
            raise UnknownTextError("a function that calls itself")
        self._active.append(function.name)
        scopes = self._scopes
        self._scopes = [self._scopes[0], {}]
        loops = self._loops
        self._loops = []
        parameters = [(self._name(each.name, each.type), each.type) for each in function.parameters]
        result = self._new_slot()
        gone = self._new_slot()
        self._returned += [result, gone]
        body = self._statement(function.body)
        del self._returned[-2:]
        self._scopes = scopes
        self._loops = loops
        self._active.pop()

        def run(m: LaunchState) -> None:
            m.variables[result] = m.variables[gone] = None
            body(m)

        self._called[function.name] = _Called(parameters, result, run)
        return self._called[function.name]

    # -- statements

    def _statement(self, node: SyntaxNode) -> Execute:
        if isinstance(node, Block):
            return self._block(node)
        if isinstance(node, Declare):
            return self._declaration(node)
        if isinstance(node, Expression):
            value = self._expression(node.value)

            def evaluate(m: LaunchState) -> None:
                value(m)

            return evaluate
        if isinstance(node, If):
            return self._if(node)
        if isinstance(node, Loop):
            return self._loop(node)
        if isinstance(node, Jump):
            return self._jump(node)
        raise UnknownTextError(f"a {type(node).__name__}")

    def _block(self, node: Block) -> Execute:
        if node.scope:
            self._scopes.append({})
        statements = [self._statement(each) for each in node.statements]
        if node.scope:
            self._scopes.pop()

        def run(m: LaunchState) -> None:
            for statement in statements:
                statement(m)
                if m.mask is not None and not m.mask.any():
                    return

        return run

    def _declaration(self, node: Declare) -> Execute:
        if node.sizes:
            return self._array(node)
        if node.space == "local":
            raise UnknownTextError("a local variable that is no array")
        value = None if node.value is None else self._expression(node.value)
        slot = self._name(node.name, node.type)
        type_ = node.type

        if value is None:
            zero = None if type_.is_pointer else of_width(number(0, "int"), type_)

            def begin(m: LaunchState) -> None:
                m.variables[slot] = zero

            return begin

        def declare(m: LaunchState) -> None:
            m.variables[slot] = _as_declared(value(m), type_)

        return declare

    def _array(self, node: Declare) -> Execute:
        sizes = [constant(size) for size in node.sizes]
        count = math.prod(sizes) or len(node.values)
        if node.type.is_pointer:
            return self._pointer_array(node, count)
        slot = self._name(node.name, Type(node.type.name, node.type.width, node.space))
        type_ = node.type
        rows = tuple(math.prod(sizes[place + 1 :]) for place in range(len(sizes) - 1))
        itemsize = DTYPES[type_.name].itemsize * type_.width
        nbytes = -(-count * itemsize // 16) * 16
        values = [self._expression(each) for each in node.values]

        def declare(m: LaunchState) -> None:
            if slot not in m.arrays:
                shared = {"local": (m.teams, m.team), "constant": (1, np.zeros(1, np.int64))}.get(node.space, (m.items, m.item))
                data = np.zeros(shared[0] * nbytes, np.uint8)
                m.arrays[slot] = KernelMemory(
                    node.name, data, count * itemsize, shared[1] * nbytes, DTYPES[type_.name].itemsize
                )
            pointer = Pointer(m.arrays[slot], np.zeros(1, np.int64), type_, rows=rows)
            m.variables[slot] = pointer
            for place, each in enumerate(values):
                m.store(replace(pointer, rows=()).moved(number(place, "int")), of_width(each(m), type_))

        return declare

    def _pointer_array(self, node: Declare, count: int) -> Execute:
        if len(node.sizes) > 1 or node.values:
            raise UnknownTextError("an array of pointers that is written with its values, or has rows")
        slot = self._name(node.name, node.type)
        _ = [self._new_slot() for _ in range(count)]
        pointers = PointerArray(node.name, slot + 1, count, node.type)

        def declare(m: LaunchState) -> None:
            m.variables[slot] = pointers

        return declare

    def _if(self, node: If) -> Execute:
        condition = self._expression(node.condition)
        yes = self._in_scope(node.yes)
        no = None if node.no is None else self._in_scope(node.no)

        def run(m: LaunchState) -> None:
            found: Number = condition(m)
            m.doubt(found)
            if found.is_uniform:
                if found.v[0]:
                    yes(m)
                elif no is not None:
                    no(m)
                return
            whole = m.mask
            holds = m.holds(found.v)
            others = ~holds if whole is None else whole & ~holds
            left = [holds, others]
            for place, branch in enumerate((yes, no)):
                if branch is not None and left[place].any():
                    m.mask = left[place]
                    branch(m)
                    left[place] = np.ones(m.items, bool) if m.mask is None else m.mask
            after = left[0] | left[1]
            m.mask = None if after.all() else after

        return run

    def _in_scope(self, node: SyntaxNode) -> Execute:
        self._scopes.append({})
        made = self._statement(node)
        self._scopes.pop()
        return made

    def _loop(self, node: Loop) -> Execute:
        self._scopes.append({})
        begin = None if node.begin is None else self._statement(node.begin)
        condition = None if node.condition is None else self._expression(node.condition)
        step = None if node.step is None else self._expression(node.step)
        left = self._new_slot()
        skipped = self._new_slot()
        self._loops.append((left, skipped))
        body = self._in_scope(node.body)
        self._loops.pop()
        self._scopes.pop()
        first = not node.after
        gone = self._returned[-1] if self._returned else -1

        def run(m: LaunchState) -> None:
            if begin is not None:
                begin(m)
            before = m.mask
            m.variables[left] = None
            check = first
            while True:
                if condition is not None and check:
                    found: Number = condition(m)
                    m.doubt(found)
                    if found.is_uniform:
                        if not found.v[0]:
                            break
                    else:
                        holds = m.holds(found.v)
                        if not holds.any():
                            break
                        m.mask = None if holds.all() else holds
                check = True
                m.variables[skipped] = None
                body(m)
                if m.variables[skipped] is not None:
                    m.mask = m.variables[skipped] if m.mask is None else m.mask | m.variables[skipped]
                if m.nobody:
                    break
                if step is not None:
                    step(m)
            # Those that left it go on, and those that had begun, but for who has returned.
            returned = m.variables[gone] if gone >= 0 else None
            m.mask = before if returned is None else (~returned if before is None else before & ~returned)

        return run

    def _jump(self, node: Jump) -> Execute:
        if node.kind == "return":
            result, gone = self._returned[-2:]
            value = None if node.value is None else self._expression(node.value)

            def leave(m: LaunchState) -> None:
                if value is not None:
                    m.assign(result, value(m))
                _go(m, gone)

            return leave
        if not self._loops:
            raise UnknownTextError(f"{node.kind} outside of a loop")
        slot = self._loops[-1][0 if node.kind == "break" else 1]

        def jump(m: LaunchState) -> None:
            _go(m, slot)

        return jump

    # -- expressions

    def _expression(self, node: SyntaxNode) -> Evaluate:
        made = self._EXPRESSIONS.get(type(node))
        if made is None:
            raise UnknownTextError(f"a {type(node).__name__}")
        evaluate: Evaluate = made(self, node)
        return evaluate

    def _literal(self, node: Literal) -> Evaluate:
        made = _literal(node.text)
        return lambda m: made

    def _variable(self, node: Name) -> Evaluate:
        found = self._found(node.name)
        if found is not None:
            slot = found[0]
            return lambda m: m.variables[slot]
        if node.name in _CONSTANTS:
            made = _CONSTANTS[node.name]
            return lambda m: made
        if any(each.name == node.name for each in self._unit.constants):  # a sampler: all of them are alike
            return lambda m: number(0, "int")
        raise UnknownTextError(f"the name {node.name}")

    def _unary(self, node: Unary) -> Evaluate:
        if node.sign == "&":
            if isinstance(node.operand, Name) and (found := self._found(node.operand.name)) and not found[1].is_pointer:
                reference = Reference(found[0], found[1])
                return lambda m: reference
            return self._pointer_to(node.operand)
        operand = self._expression(node.operand)
        if node.sign == "*":
            return lambda m: _load(m, operand(m))
        if node.sign == "-":
            return lambda m: _negative(operand(m))
        if node.sign == "+":
            return operand
        if node.sign == "!":
            return lambda m: compare("==", operand(m), number(0, "int"))
        return lambda m: _invert(operand(m))

    def _pointer_to(self, node: SyntaxNode) -> Evaluate:
        """The address of an element."""
        if isinstance(node, Unary) and node.sign == "*":
            return self._expression(node.operand)
        if isinstance(node, Index):
            base = self._expression(node.base)
            index = self._expression(node.index)

            def element(m: LaunchState) -> Any:
                of, at = base(m), index(m)
                return of.moved(m.agreed(at) if isinstance(of, PointerArray) else at)

            return element
        raise UnknownTextError("the address of something that is no element")

    def _step(self, node: Increment) -> Evaluate:
        get, put = self._place(node.target)

        def step(m: LaunchState) -> Value:
            old = get(m)
            new = _move(node.sign, old, number(1, "int"))
            put(m, new)
            return new if node.first else old

        return step

    def _binary(self, node: Binary) -> Evaluate:
        if node.sign in ("&&", "||"):
            return self._logical(node)
        left = self._expression(node.left)
        right = self._expression(node.right)
        sign = node.sign
        if sign in _COMPARISONS:
            return lambda m: compare(sign, left(m), right(m))
        if sign not in _NUMERIC:
            return lambda m: bitwise(sign, left(m), right(m))
        if sign in "+-":
            products = _is_product(node.left), _is_product(node.right)
            literal = _is_literal(node.left) or _is_literal(node.right)
            return lambda m: _sum(sign, left(m), right(m), products, literal)
        return lambda m: arithmetic(sign, left(m), right(m))

    def _logical(self, node: Binary) -> Evaluate:
        left = self._expression(node.left)
        right = self._expression(node.right)
        both = node.sign == "&&"

        def evaluate(m: LaunchState) -> Value:
            first = truth(left(m))
            if first.is_uniform and first.e is None and bool(first.v[0]) != both:
                return first
            whole = m.mask
            asked = m.holds(first.v if both else first.v == 0)
            if first.e is not None:
                asked |= m.holds(first.e > 0)
            if not asked.any():
                return first
            m.mask = None if asked.all() else asked
            second = truth(right(m))
            m.mask = whole
            return bitwise("&" if both else "|", first, second)

        return evaluate

    def _assign(self, node: Assign) -> Evaluate:
        get, put = self._place(node.target)
        value = self._expression(node.value)
        sign = node.sign
        product = _is_product(node.value)
        literal = _is_literal(node.value)

        def assign(m: LaunchState) -> Value:
            new = value(m)
            if sign:
                old = get(m)
                if isinstance(old, Pointer | PointerChoice):
                    new = _move(sign, old, new)
                elif sign in "+-":
                    new = _sum(sign, old, new, (False, product), literal)
                else:
                    new = (arithmetic if sign in _NUMERIC else bitwise)(sign, old, new)
            put(m, new)
            return new

        return assign

    def _place(self, node: SyntaxNode) -> tuple[Evaluate, Put]:
        """How a variable, an element or components of a vector are read and written."""
        if isinstance(node, Name) and (found := self._found(node.name)) is not None:
            slot, type_ = found
            return lambda m: m.variables[slot], lambda m, x: m.assign(slot, _as_declared(x, type_))
        if isinstance(node, Member):
            get, put = self._place(node.base)
            name = node.name

            def replace(m: LaunchState, x: Value) -> None:
                put(m, _with_components(get(m), name, x))

            return lambda m: _components(get(m), name), replace
        pointer = self._pointer_to(node)

        def store(m: LaunchState, x: Value) -> None:
            place = pointer(m)
            if isinstance(x, Number):
                m.store(place, of_width(x, place.type))
            else:  # an element of an array of pointers
                m.assign(place.slot, _as_declared(x, place.type))

        return lambda m: _load(m, pointer(m)), store

    def _ternary(self, node: Ternary) -> Evaluate:
        condition, yes, no = map(self._expression, (node.condition, node.yes, node.no))

        def evaluate(m: LaunchState) -> Value:
            found: Number = condition(m)
            if found.v.ndim == 2:
                return functions.function("select")(no(m), yes(m), found)  # type: ignore[misc]
            if found.is_uniform and found.e is None:
                return yes(m) if found.v[0] else no(m)
            whole = m.mask
            holds = m.holds(found.v)
            others = m.holds(found.v == 0)
            if found.e is not None:  # both are computed where either may be meant
                doubtful = m.holds(found.e > 0)
                holds = holds | doubtful
                others = others | doubtful
            if not others.any():
                return yes(m)
            if not holds.any():
                return no(m)
            m.mask = holds
            first = yes(m)
            m.mask = others
            second = no(m)
            m.mask = whole
            if isinstance(first, Number):
                first, second = common(first, second)
                return chosen(found, first, second)
            return choose_pointer(found, first, second)

        return evaluate

    def _call(self, node: Call) -> Evaluate:
        name = node.name
        if name in _FENCES:
            return lambda m: number(0, "int")
        if name in self._unit.functions:
            return self._own_call(self._unit.functions[name], node)
        arguments = [self._expression(each) for each in node.arguments]
        if name in _IDENTITIES:
            return lambda m: m.identity(name, int(arguments[0](m).v[0]))
        if (match := _VECTOR_ACCESS.fullmatch(name)) is not None:
            return _vector_access(match, arguments)
        if (match := _IMAGE_ACCESS.fullmatch(name)) is not None:
            return _image_access(match, arguments)
        found = functions.function(name)
        if found is None:
            raise UnknownTextError(f"the function {name}")
        return lambda m: found(*[argument(m) for argument in arguments])

    def _own_call(self, function: Function, node: Call) -> Evaluate:
        arguments = [self._expression(each) for each in node.arguments]
        called = self._function(function)
        result_type = function.result

        def call(m: LaunchState) -> Value:
            given = [
                _as_declared(argument(m), type_) for argument, (_, type_) in zip(arguments, called.parameters, strict=True)
            ]
            for (slot, _), value in zip(called.parameters, given, strict=True):
                m.variables[slot] = value
            whole = m.mask
            called.body(m)
            m.mask = whole
            made = m.variables[called.result]
            return made if made is None else _as_declared(made, result_type)

        return call

    def _index(self, node: Index) -> Evaluate:
        pointer = self._pointer_to(node)
        return lambda m: _load(m, pointer(m))

    def _member(self, node: Member) -> Evaluate:
        base = self._expression(node.base)
        name = node.name
        return lambda m: _components(base(m), name)

    def _cast(self, node: Cast) -> Evaluate:
        parts = [self._expression(each) for each in node.parts]
        type_ = node.type
        if len(parts) == 1:
            return lambda m: _as_declared(parts[0](m), type_)
        scalar = Type(type_.name)

        def vector(m: LaunchState) -> Value:
            found = [part(m) for part in parts]
            columns = [of_width(x, scalar if x.v.ndim == 1 else Type(type_.name, x.width)) for x in found]
            return _join(columns, type_.width)

        return vector

    def _comma(self, node: Comma) -> Evaluate:
        parts = [self._expression(each) for each in node.parts]

        def evaluate(m: LaunchState) -> Value:
            for part in parts[:-1]:
                part(m)
            return parts[-1](m)

        return evaluate

    _EXPRESSIONS: Final[dict[type[SyntaxNode], Any]] = {
        Literal: _literal, Name: _variable, Unary: _unary, Increment: _step, Binary: _binary, Assign: _assign,
        Ternary: _ternary, Call: _call, Index: _index, Member: _member, Cast: _cast, Comma: _comma,
    }  # fmt: skip


def _go(m: LaunchState, slot: int) -> None:
    """Those that take part leave a loop, its body or a function, in which they are noted."""
    leaving = np.ones(m.items, bool) if m.mask is None else m.mask
    before = m.variables[slot]
    m.variables[slot] = leaving if before is None else before | leaving
    m.mask = np.zeros(m.items, bool)


def _literal(text: str) -> Number:
    lower = text.lower()
    if lower.startswith("0x") or not re.search(r"[.e]|f$|h$", lower):
        digits = lower.rstrip("ul")
        suffix = lower[len(digits) :]
        value = int(digits, 16 if digits.startswith("0x") else 10)
        kind = "uint" if "u" in suffix or (digits.startswith("0x") and value >= 2**31) else "int"
        if "l" in suffix or value >= 2**32 or (kind == "int" and value >= 2**31):
            kind = "ulong" if "u" in suffix else "long"
        return Number(np.array([value], DTYPES[kind]))
    if lower.endswith("h"):
        return number(float(lower[:-1]), "half")
    return number(float(lower.rstrip("f")), "float" if lower.endswith("f") else "double")


def _is_product(node: SyntaxNode) -> bool:
    if isinstance(node, Unary) and node.sign in "+-":
        return _is_product(node.operand)
    return isinstance(node, Binary) and node.sign == "*"


def _is_literal(node: SyntaxNode) -> bool:
    if isinstance(node, Cast):
        return len(node.parts) == 1 and _is_literal(node.parts[0])
    if isinstance(node, Unary):
        return node.sign in "+-" and _is_literal(node.operand)
    return isinstance(node, Literal)


def _sum(sign: str, left: Value, right: Value, products: tuple[bool, bool], literal: bool) -> Value:
    if not isinstance(left, Number):
        return _move(sign, left, right)
    if not isinstance(right, Number):
        return _move(sign, right, left)
    fused: Array | None = None
    for x, is_product in zip((left, right), products, strict=True):
        if is_product and is_float(x.v):
            size = np.abs(x.v).astype(np.float64)
            fused = size if fused is None else fused + size
    return arithmetic(sign, left, right, fused, literal)


def _move(sign: str, old: Value, by: Number) -> Value:
    if isinstance(old, Number):
        return arithmetic(sign, old, by)
    if isinstance(old, Reference):
        raise UnknownTextError("a computed address of a variable")
    return old.moved(by if sign == "+" else _negative(convert(by, DTYPES["long"])))


def _negative(x: Number) -> Number:
    x = promote(x)
    return Number(-x.v, x.e)


def _invert(x: Number) -> Number:
    x = promote(x)
    return Number(~x.v, None if x.e is None else known(np.where(x.e > 0, np.inf, 0.0)))


def _load(m: LaunchState, pointer: Any, width: int = 0) -> Any:
    if isinstance(pointer, Pointer) and pointer.in_row:  # a row of an array of arrays
        return pointer
    if isinstance(pointer, Reference):
        found = m.variables[pointer.slot]
        if not isinstance(found, Number):
            return found
        wanted = width or pointer.type.width
        dtype = DTYPES[pointer.type.name]
        return found if found.v.dtype == dtype and found.width == wanted else reinterpret(found, dtype, wanted)
    return pointer.load(m.mask, m.items, width)


def _as_declared(x: Value, type_: Type) -> Value:
    if isinstance(x, Number):
        return of_width(x, type_)
    if isinstance(x, Pointer | PointerChoice | Reference) and type_.is_pointer:
        return x if x.type == type_.target else x.as_type(type_)
    return x


def _join(columns: list[Number], width: int) -> Number:
    """A vector of scalars and vectors."""
    rows = max(x.v.shape[0] for x in columns)
    wide = [x.v[:, None] if x.v.ndim == 1 else x.v for x in columns]
    v = np.concatenate([np.broadcast_to(each, (rows, each.shape[1])) for each in wide], axis=1)
    if v.shape[1] != width:
        raise UnknownTextError(f"a vector of {v.shape[1]} elements for {width}")
    if all(x.e is None for x in columns):
        return Number(v)
    e = [
        np.zeros((rows, each.shape[1])) if x.e is None
        else np.broadcast_to(x.e[:, None] if x.e.ndim == 1 else x.e, (rows, each.shape[1]))
        for x, each in zip(columns, wide, strict=True)
    ]  # fmt: skip
    return Number(v, np.concatenate(e, axis=1))


def _places(name: str, width: int) -> list[int]:
    """The indices of components: x, y, z, w; s0 to sf; lo, hi, even, odd."""
    halves = {"lo": range(width // 2), "hi": range(width // 2, width), "even": range(0, width, 2), "odd": range(1, width, 2)}
    if name in halves:
        return list(halves[name])
    if name[0] in "sS" and len(name) > 1:
        return [int(letter, 16) for letter in name[1:]]
    if not set(name) <= set("xyzw"):
        raise UnknownTextError(f"the components {name}")
    return ["xyzw".index(letter) for letter in name]


def _components(x: Number, name: str) -> Number:
    places = _places(name, x.width)
    if len(places) == 1:
        return Number(x.v[:, places[0]], None if x.e is None else x.e[:, min(places[0], x.e.shape[1] - 1)])
    return Number(x.v[:, places], None if x.e is None else np.broadcast_to(x.e, (x.e.shape[0], x.width))[:, places])


def _with_components(old: Number, name: str, x: Number) -> Number:
    places = _places(name, old.width)
    x = convert(x, old.v.dtype)
    rows = max(old.v.shape[0], x.v.shape[0])
    v = np.array(np.broadcast_to(old.v, (rows, old.width)))
    v[:, places] = x.v if x.v.ndim == 2 else x.v[:, None]
    if old.e is None and x.e is None:
        return Number(v)
    e = np.zeros((rows, old.width)) if old.e is None else np.array(np.broadcast_to(old.e, (rows, old.width)))
    e[:, places] = 0.0 if x.e is None else x.e if x.e.ndim == 2 else x.e[:, None]
    return Number(v, known(e))


def _vector_access(match: re.Match[str], arguments: list[Evaluate]) -> Evaluate:
    """vloadN, vstoreN, and those of halves."""
    width = int(match[3] or 1)
    half = bool(match[2])

    def place(m: LaunchState, offset: Evaluate, pointer: Evaluate) -> Any:
        at = offset(m)
        base = pointer(m)
        if isinstance(base, Reference):
            return base
        return base.moved(arithmetic("*", promote(at), number(width, "int")))

    if match[1] == "load":

        def load(m: LaunchState) -> Value:
            found = _load(m, place(m, *arguments), width)
            return convert(found, DTYPES["float"]) if half else found

        return load

    def store(m: LaunchState) -> Value:
        x: Number = arguments[0](m)
        pointer = place(m, *arguments[1:])
        m.store(pointer, of_width(x, Type("half" if half else pointer.type.name, width)))
        return x

    return store


def _image_access(match: re.Match[str], arguments: list[Evaluate]) -> Evaluate:
    """read_image and write_image with whole coordinates."""
    kind = DTYPES[_IMAGE_TYPES[match[2]]]

    def coordinates(at: Number) -> tuple[Number, Number]:
        if is_float(at.v):
            raise UnknownTextError("a texture read at a fraction")
        return _components(at, "x"), _components(at, "y")

    if match[1] == "read":

        def read(m: LaunchState) -> Value:
            image: Image = arguments[0](m)
            at: Number = arguments[-1](m)
            x, y = coordinates(at)
            found = convert(image.load(x, y), kind)
            return (
                found
                if at.e is None
                else Number(found.v, known(np.where(at.e.any(1, keepdims=True), np.inf, np.zeros((1, 4)))))
            )

        return read

    def write(m: LaunchState) -> Value:
        image: Image = arguments[0](m)
        x, y = coordinates(arguments[1](m))
        texel: Number = arguments[2](m)
        image.store(x, y, convert(texel, image.texels.dtype), m.mask, m.items)
        return texel

    return write
