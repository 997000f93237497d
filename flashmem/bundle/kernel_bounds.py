"""Bounds checking of kernel launches: a kernel states which memory it accesses, and that must be inside its arguments.

Comments that start with `//@` precede a kernel:

    //@ items (rows + 3) / 4, panels      work-items in each direction; a launch rounds them up to whole work-groups
    //@ zero first_panel, x0              numbers that may be 0; all others are at least 1
    //@ any pad_top, pad_left             numbers that may be negative too
    //@ row < rows                        a variable with a range from 0 to the bound, exclusive
    //@ a[row * depth + depth - 1]        the accessed elements of a pointer
    //@ w(panels * 4 - 1, depth - 1)      the accessed texels of a texture
    //@ require kernel_h * kernel_w <= 1048576
    //@ over e0                           a pointer that may alias the written memory: only the work-item that writes an
                                          element reads it, and before it writes

Expressions are C's on integers, with + - * / % and min, evaluated by interval arithmetic. `global_0` is the launch's own size,
and `layers` the number of layers. Reads of the operands e0, e1 ... at `row` and `col` are found in the kernel's functions
`NAME_prologue` and `NAME_epilogue`.

A write must end at the tensor's last element; a read may extend into the slack behind it. A written tensor may share no element
with another tensor of the launch, except with one that the kernel states in `over`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import cast

from flashmem.base.errors import BundleError
from flashmem.base.types import ITEMSIZE
from flashmem.bundle.kernel_expressions import MOST_LETTERS, Expression, Range, arguments, parse_expression
from flashmem.program.kernel_text import kernel_heads, last_word
from flashmem.program.launches import Launch
from flashmem.program.program import Program
from flashmem.program.tensors import Tensor

_ITEMSIZE = {"char": 1, "uchar": 1, "half": 2, "short": 2, "ushort": 2, "int": 4, "uint": 4, "float": 4, "long": 8, "ulong": 8}
_VECTOR = re.compile(r"([a-z]+?)(\d*)")
_LOAD = re.compile(r"vload(?:_half)?(\d*)\(0, (e\d+) \+ ")
_SUBSCRIPT = re.compile(r"\b(e\d+)\[")
_FUNCTION = re.compile(r"logue\(")  # of NAME_prologue and NAME_epilogue: text with a fixed beginning is found fast
_LONGEST_NAME = 200
_BRACKET = re.compile(r"[()\[\]]")

_MOST_PARAMETERS = 512  # 4 KB of pointers; flashmem's kernels have up to 56
_MOST_STATED = 1000
"""The most statements of a kernel, and the most reads that are found in it. flashmem's have up to 36."""


@dataclass(frozen=True)
class _Parameter:
    """A kernel's parameter. `itemsize` is 0 for numbers and textures; `written` marks a pointer that is not const."""

    name: str
    kind: str  # "pointer", "texture", "int", "float"
    itemsize: int = 0
    written: bool = False


@dataclass
class Kernel:
    """A kernel's parameters and its `//@` statements."""

    name: str
    parameters: list[_Parameter]
    items: list[Expression] = field(default_factory=list)
    least: dict[str, int] = field(default_factory=dict)
    ranges: list[tuple[str, Expression]] = field(default_factory=list)
    touched: list[tuple[str, tuple[Expression, ...], int]] = field(default_factory=list)  # (pointer, places, width)
    requirements: list[tuple[Expression, Expression, str]] = field(default_factory=list)
    stated: list[str] = field(default_factory=list)  # the text of the statements
    over: set[str] = field(default_factory=set)

    def touches(self, numbers: Mapping[str, int], wanted: Collection[str], prefix: str) -> dict[str, tuple[int, ...]]:
        """The largest accesses to the parameters `wanted` with these numbers, in the form of `_Bounds.touched`.

        Only statements about variables that begin with `prefix` are evaluated.

        Raises:
            BundleError: the statements cannot be evaluated, or access an element before the first.
        """
        known = {number: Range(value, value) for number, value in numbers.items()}
        try:
            for variable, end in self.ranges:
                if variable.startswith(prefix):
                    known[variable] = Range(0, max(end(known).high - 1, 0))
            found: dict[str, tuple[int, ...]] = {}
            for name, places, width in self.touched:
                if name in wanted:
                    at = [place(known) for place in places]
                    _require(all(place.low >= 0 for place in at), f"kernel {self.name} leaves the memory of {name!r}")
                    ends = (at[0].high + width,) if len(at) == 1 else tuple(place.high for place in at)
                    found[name] = tuple(map(max, ends, found.get(name, ends)))
        except (KeyError, ArithmeticError) as error:
            raise damage_error(f"kernel {self.name} states no bounds of {', '.join(sorted(wanted))} ({error})") from error
        return found


@dataclass(frozen=True)
class _Bounds:
    """The work-items of a launch, and by parameter the number of elements (or the last texel across and down) that it
    accesses.
    """

    items: tuple[int, ...]
    touched: Mapping[str, tuple[int, ...]]


def check_bounds(program: Program, source: str) -> None:
    """Raise BundleError unless every launch has arguments of the right kinds, and the kernel stays inside their memory."""
    kernels = parsed_kernels(source)
    known: dict[tuple[str, tuple[int, ...], tuple[int, ...]], _Bounds] = {}
    tensors = {tensor.name: tensor for tensor in program.tensors}
    slices = program.readable()
    for launch in (*program.launches, *(each.launch for each in program.steady)):
        name = f"layer {launch.name!r}"
        kernel = kernels.get(launch.kernel)
        _require(kernel is not None, f"{name} runs the kernel {launch.kernel}, which its kernels lack")
        assert kernel is not None
        _check_kinds(name, kernel, launch)
        _check_overlaps(name, kernel, launch, tensors)
        numbers = tuple(cast(int, arg.value) for arg in launch.args if arg.kind == "int")
        key = (launch.kernel, numbers, launch.global_size)
        if key not in known:
            known[key] = _bounds(name, kernel, numbers, launch.global_size, len(program.launches))
        bounds = known[key]
        group = launch.local_size or (1,) * len(launch.global_size)
        _require(
            len(bounds.items) == len(launch.global_size)
            and all(size == -(-n // g) * g for n, size, g in zip(bounds.items, launch.global_size, group, strict=True)),
            f"{name} has {launch.global_size} work-items, not those of its kernel",
        )
        for parameter, arg in zip(kernel.parameters, launch.args, strict=True):
            if parameter.kind == "texture":
                part = slices[str(arg.value)]
                across, down = bounds.touched[parameter.name]
                _require(
                    part.is_image and across < part.width and down < part.height, f"{name} leaves the texture {arg.value!r}"
                )
            elif parameter.kind == "pointer":
                room = arg.nbytes
                if arg.kind == "tensor":
                    tensor = tensors[str(arg.value)]
                    room = _elements(tensor) if parameter.written else tensor.nbytes
                elif arg.kind == "slice":
                    room = slices[str(arg.value)].nbytes
                _require(
                    bounds.touched[parameter.name][0] * parameter.itemsize <= room,
                    f"{name} leaves the memory of {parameter.name!r}",
                )


def _check_overlaps(name: str, kernel: Kernel, launch: Launch, tensors: Mapping[str, Tensor]) -> None:
    """Require that written tensors of a launch share no element with its other tensors, except where the kernel states
    `over`.
    """
    given = [
        (parameter, tensors[str(arg.value)])
        for parameter, arg in zip(kernel.parameters, launch.args, strict=True)
        if parameter.kind == "pointer" and arg.kind == "tensor"
    ]
    for parameter, tensor in given:
        for other, shared in given if parameter.written else ():
            if other is parameter or (tensor is shared and other.name in kernel.over and not other.written):
                continue
            before = tensor.offset + _elements(tensor)
            behind = shared.offset + _elements(shared)
            apart = before <= shared.offset or behind <= tensor.offset
            _require(apart or tensor.memory != shared.memory, f"{name} writes {parameter.name!r} over {other.name!r}")


def _elements(tensor: Tensor) -> int:
    """Bytes of a tensor's elements, without slack."""
    return ITEMSIZE[tensor.dtype] * math.prod(tensor.shape)


def _check_kinds(name: str, kernel: Kernel, launch: Launch) -> None:
    """Require that a launch has an argument of the right kind for each parameter, and writes to tensors only."""
    _require(len(kernel.parameters) == len(launch.args), f"{name} has another number of arguments than its kernel")
    for parameter, arg in zip(kernel.parameters, launch.args, strict=True):
        allowed = {
            "int": ("int",), "float": ("float",), "texture": ("slice",),
            "pointer": ("tensor",) if parameter.written else ("tensor", "slice", "constant"),
        }[parameter.kind]  # fmt: skip
        _require(arg.kind in allowed, f"{name} gives a {arg.kind} for {parameter.name!r}")


def _bounds(name: str, kernel: Kernel, numbers: tuple[int, ...], size: tuple[int, ...], layers: int) -> _Bounds:
    """Evaluate a kernel's statements with these numbers."""
    names = [parameter.name for parameter in kernel.parameters if parameter.kind == "int"]
    values = dict(zip(names, numbers, strict=True))
    for number, value in values.items():
        _require(value >= kernel.least.get(number, 1), f"{name} gives {value} for {number!r}")
    values |= {"layers": layers, **{f"global_{direction}": items for direction, items in enumerate(size)}}
    known = {number: Range(value, value) for number, value in values.items()}
    try:
        for variable, end in kernel.ranges:
            known[variable] = Range(0, max(end(known).high - 1, 0))
        for small, large, text in kernel.requirements:
            _require(small(known).high <= large(known).low, f"{name} needs {text}")
        touched: dict[str, tuple[int, ...]] = {}
        for pointer, places, width in kernel.touched:
            at = [place(known) for place in places]
            _require(all(place.low >= 0 for place in at), f"{name} leaves the memory of {pointer!r}")
            ends = (at[0].high + width,) if len(at) == 1 else tuple(place.high for place in at)
            touched[pointer] = tuple(map(max, ends, touched.get(pointer, ends)))
        items = tuple(item(known).high for item in kernel.items)
    except (KeyError, ArithmeticError) as error:
        raise BundleError(
            f"the bundle is damaged: the kernel of {name} states no bounds ({error}); compile the model again"
        ) from error
    _require(bool(items), f"the kernel of {name} states no work-items")
    for parameter in kernel.parameters:
        stated = parameter.kind in ("int", "float") or parameter.name in touched
        _require(stated, f"the kernel of {name} does not state what it touches of {parameter.name!r}")
    return _Bounds(items, touched)


def parsed_kernels(source: str) -> dict[str, Kernel]:
    """Parse an OpenCL C text: its kernels by name, with their `//@` statements.

    Raises:
        BundleError: a statement cannot be parsed, or a kernel has more parameters or statements than flashmem's.
    """
    found = {}
    behind = 0
    bodies = _bodies(source)
    for head in kernel_heads(source):
        declared = source[head.start : head.end]
        _require("//" not in declared and "/*" not in declared, f"kernel {head.name[:60]} has a comment in its declaration")
        parameters = head.parameters.split(",")
        _require(len(parameters) <= _MOST_PARAMETERS, f"kernel {head.name[:60]} has {len(parameters)} parameters")
        kernel = Kernel(head.name, [_parameter(text) for text in parameters])
        kernel.stated = _statements(source[behind : head.start])
        _require(len(kernel.stated) <= _MOST_STATED, f"kernel {head.name[:60]} states {len(kernel.stated)} facts")
        for line in kernel.stated:
            _state(kernel, line)
        behind = head.end
        for function in ("prologue", "epilogue"):
            for pointer, index, width in _loads(bodies.get(f"{head.name}_{function}", "")):
                kernel.touched.append((pointer, (parse_expression(index),), width))
                _require(len(kernel.touched) <= _MOST_STATED, f"kernel {head.name[:60]} has too many reads")
        found[head.name] = kernel
    return found


def _bodies(source: str) -> dict[str, str]:
    """The bodies of pointwise functions, by name."""
    begun: dict[str, int] = {}
    for match in _FUNCTION.finditer(source):
        name = last_word(source[max(0, match.start() - _LONGEST_NAME) : match.end() - 1])
        begun.setdefault(name, match.end())  # a function is defined before it is called
    bodies = {}
    for name, (start, following) in zip(begun, pairwise([*begun.values(), len(source)]), strict=True):
        end = source.find("\n}", start, following)
        text = source[start : end if end >= 0 else following]
        bodies[name] = text[text.find("{") :]
    return bodies


def _statements(before: str) -> list[str]:
    """The statements in the `//@` lines at the end of a text."""
    lines = (line.strip() for line in reversed(before.splitlines()))
    stated = [line.removeprefix("//@").strip() for line in takewhile(lambda line: not line or line.startswith("//@"), lines)]
    return [line for line in reversed(stated) if line]


def _parameter(text: str) -> _Parameter:
    """Parse one parameter of a kernel."""
    words = text.replace("*", " * ").split()
    name = words[-1]
    declared = set(words[:-1])
    if "image2d_t" in declared:
        return _Parameter(name, "texture")
    kind = next((word for word in words if (match := _VECTOR.fullmatch(word)) and match[1] in _ITEMSIZE), "")
    _require(bool(kind), f"a kernel takes {text.strip()[:100]!r}")
    if "*" not in declared:
        _require(kind in ("int", "float"), f"a kernel takes {text.strip()[:100]!r}")
        return _Parameter(name, kind)
    match = _VECTOR.fullmatch(kind)
    assert match is not None
    return _Parameter(name, "pointer", _ITEMSIZE[match[1]] * int(match[2] or 1), "const" not in declared)


def _state(kernel: Kernel, line: str) -> None:
    """Parse one `//@` statement and add it to the kernel."""
    _require(len(line) <= MOST_LETTERS, f"a kernel states {line[:60]!r}, which does not end")
    word, _, rest = line.partition(" ")
    if word == "items":
        kernel.items = [parse_expression(text) for text in arguments(rest)]
    elif word in ("zero", "any"):
        kernel.least |= {name.strip(): 0 if word == "zero" else -(2**31) for name in rest.split(",")}
    elif word == "over":
        kernel.over.add(rest.strip())
    elif word == "require":
        small, _, large = rest.partition("<=")
        kernel.requirements.append((parse_expression(small), parse_expression(large), rest))
    elif (match := re.fullmatch(r"(\w+) < (.+)", line)) is not None:
        kernel.ranges.append((match[1], parse_expression(match[2])))
    elif (match := re.fullmatch(r"(\w+)\[(.+)\]", line)) is not None:
        kernel.touched.append((match[1], (parse_expression(match[2]),), 1))
    elif (match := re.fullmatch(r"(\w+)\((.+)\)", line)) is not None:
        kernel.touched.append((match[1], tuple(parse_expression(text) for text in arguments(match[2])), 1))
    else:
        _require(False, f"a kernel states {line[:100]!r}")


def _loads(body: str) -> Iterator[tuple[str, str, int]]:
    """The reads of a pointwise function: (operand, index, elements from there on)."""
    ends = _match_brackets(body)
    for match in _LOAD.finditer(body):
        yield match[2], _index(body, match.end(), ends.get(body.index("(", match.start()))), int(match[1] or 1)
    for match in _SUBSCRIPT.finditer(body):
        yield match[1], _index(body, match.end(), ends.get(match.end() - 1)), 1


def _match_brackets(text: str) -> dict[int, int]:
    """The place of the bracket that closes each bracket, by the place of that."""
    open_at = list[int]()
    ends = dict[int, int]()
    for match in _BRACKET.finditer(text):
        if match[0] in "([":
            open_at.append(match.start())
        elif open_at:
            ends[open_at.pop()] = match.start()
    return ends


def _index(body: str, start: int, end: int | None) -> str:
    """The index that ends at `end`."""
    if end is None or end - start > MOST_LETTERS:
        raise damage_error(f"a kernel reads at {body[start : start + 60]!r}, which does not end")
    return body[start:end]


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise damage_error(what)


def damage_error(what: str) -> BundleError:
    """The error for a damaged bundle; `what` is the defect."""
    return BundleError(f"the bundle is damaged: {what}; compile the model again")
