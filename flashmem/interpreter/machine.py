"""The state of a launch while it is interpreted: its work-items, their variables, and which of them take part."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np

from flashmem.interpreter.errors import OutsideError, UnknownTextError
from flashmem.interpreter.memory import Image, KernelMemory, Pointer, PointerChoice
from flashmem.interpreter.syntax import Type
from flashmem.interpreter.values import DTYPES, Array, Number, reinterpret

Value = Any


class LaunchState:
    """All work-items of some work-groups, each group `copies` times with memory of its own.

    They execute each statement together, so that every barrier holds. `mask`: those that take part, None for all. `lost`: those
    of work-groups whose way depends on a number that another implementation may round to the other side: nothing is known of
    what they write from there on.
    """

    def __init__(
        self, size: Sequence[int], group: Sequence[int], groups: Sequence[tuple[int, ...]], copies: int, slots: int
    ) -> None:
        """`size` and `group` are the launch's, `groups` the work-groups that are executed, by their place in the grid."""
        self.size = tuple(size)
        self.group = tuple(group)
        dimensions = len(self.size)
        inside = np.array([place[::-1] for place in product(*(range(n) for n in reversed(self.group)))], np.int64)
        self._in_group = len(inside)
        self.teams = copies * len(groups)
        self.items = self.teams * self._in_group
        self._local = [np.tile(inside[:, axis], self.teams) for axis in range(dimensions)]
        places = np.array(groups, np.int64).reshape(len(groups), dimensions)
        self._group_id = [np.tile(np.repeat(places[:, axis], self._in_group), copies) for axis in range(dimensions)]
        self.copy = np.repeat(np.arange(copies), len(groups) * self._in_group)
        self.team = np.repeat(np.arange(self.teams), self._in_group)
        self.item = np.arange(self.items)
        self.variables: list[Value] = [None] * slots
        self.mask: Array | None = None
        self.lost: Array | None = None
        self.arrays: dict[int, KernelMemory] = {}  # by slot

    # -- who takes part

    @property
    def nobody(self) -> bool:
        """Whether no work-item takes part."""
        return self.mask is not None and not self.mask.any()

    def holds(self, condition: Array) -> Array:
        """Those that take part and for which a condition holds."""
        rows = np.broadcast_to(condition != 0, (self.items,))
        return rows.copy() if self.mask is None else rows & self.mask

    def agreed(self, x: Number) -> Number:
        """One number for all, if those that take part have the same; others may have left a loop earlier."""
        if x.is_uniform or self.mask is None:
            return x
        taken = x.v[self.mask]
        return Number(taken[:1]) if len(taken) and (taken == taken[0]).all() else x

    def doubt(self, condition: Number) -> None:
        """Lose the work-groups of work-items for which a condition may be otherwise."""
        if condition.e is None:
            return
        doubtful = self.holds(condition.e > 0)
        if doubtful.any():
            teams = np.zeros(self.teams, bool)
            teams[self.team[doubtful]] = True
            self.lost = teams[self.team] if self.lost is None else self.lost | teams[self.team]

    # -- variables

    def assign(self, slot: int, new: Value) -> None:
        """Set a variable of those that take part."""
        old = self.variables[slot]
        if self.mask is None or old is None:
            self.variables[slot] = new
        elif isinstance(new, Number):
            self.variables[slot] = merge_masked(self.mask, new, old)
        else:
            rows = Number(self.mask.astype(np.int32))
            self.variables[slot] = choose_pointer(rows, new, old)

    def store(self, pointer: Pointer | PointerChoice | Reference, x: Number) -> None:
        """Write to memory; nothing is known of what lost work-items write."""
        if self.lost is not None:
            rows = self.lost if x.v.ndim == 1 else self.lost[:, None]
            shape = (self.items,) if x.v.ndim == 1 else (self.items, x.width)
            x = Number(x.v, np.broadcast_to(np.where(rows, np.inf, 0.0 if x.e is None else x.e), shape))
        if isinstance(pointer, Reference):
            self.assign(pointer.slot, pointer.bits(x))
        else:
            pointer.store(x, self.mask, self.items)

    # -- work-item functions

    def identity(self, name: str, axis: int) -> Number:
        """The value of a work-item function of OpenCL."""
        inside = axis < len(self.size)
        if name == "get_global_id":
            return _size(self._group_id[axis] * self.group[axis] + self._local[axis] if inside else 0)
        if name == "get_local_id":
            return _size(self._local[axis] if inside else 0)
        if name == "get_group_id":
            return _size(self._group_id[axis] if inside else 0)
        if name == "get_global_size":
            return _size(self.size[axis] if inside else 1)
        if name == "get_local_size":
            return _size(self.group[axis] if inside else 1)
        return _size(self.size[axis] // self.group[axis] if inside else 1)  # get_num_groups


class Reference:
    """The address of a private variable, which is `declared` of a type; what it points to is taken for `type`."""

    def __init__(self, slot: int, declared: Type, type_: Type | None = None) -> None:
        self.slot = slot
        self.declared = declared
        self.type = type_ or declared

    def as_type(self, type_: Type) -> Reference:
        """The same address of another type."""
        return Reference(self.slot, self.declared, type_.target)

    def bits(self, x: Number) -> Number:
        """`x`, which is written there, as a value of the variable."""
        return reinterpret(x, DTYPES[self.declared.name], self.declared.width)


class PointerArray:
    """A private array of pointers, each of which is a variable of its own."""

    def __init__(self, name: str, first: int, count: int, type_: Type) -> None:
        self._name = name
        self._first = first
        self._count = count
        self._type = type_

    def moved(self, by: Number) -> Reference:
        """The variable of one element.

        Raises:
            UnknownTextError: work-items choose different ones.
            OutsideError: there is no such element.
        """
        if not by.is_uniform:
            raise UnknownTextError("an array of pointers with different indices")
        place = int(by.v[0])
        if not 0 <= place < self._count:
            raise OutsideError(f"a work-item uses element {place} of {self._name!r}, which has {self._count}")
        return Reference(self._first + place, self._type)


def _size(value: Any) -> Number:
    return Number(np.atleast_1d(np.asarray(value)).astype(np.uint64))


def merge_masked(mask: Array, new: Number, old: Number) -> Number:
    """`new` where the mask holds, else `old`."""
    rows = mask if new.v.ndim == 1 else mask[:, None]
    v = np.where(rows, new.v, old.v)
    if new.e is None and old.e is None:
        return Number(v)
    zero = np.zeros((1,) * new.v.ndim)
    return Number(v, np.where(rows, zero if new.e is None else new.e, zero if old.e is None else old.e))


def choose_pointer(condition: Number, yes: Any, no: Any) -> Any:
    """One of two pointers: one pointer, if both are into the same memory."""
    if isinstance(yes, Pointer) and isinstance(no, Pointer) and yes.memory is no.memory and yes.type == no.type:
        holds = condition.v != 0
        doubt = condition.e
        for each in (yes.doubt, no.doubt):
            doubt = each if doubt is None else doubt if each is None else doubt + each
        return Pointer(yes.memory, np.where(holds, yes.offset, no.offset), yes.type, doubt)
    if isinstance(yes, Image):
        return yes
    return PointerChoice(condition, yes, no)
