"""Buffer assignment: each activation gets separate memory, or a range of another's. Lifetimes are counted in groups.

- A contiguous range of another value is inside that value's memory (`compiler.memory.aliases`).
- Parts of a Concat that are contiguous in its result are written there by the groups that compute them; only other parts are
  copied. A part that is an input, a result of the model, or in another Concat is copied.
- A group whose kernel supports it (`Operator.in_place`) writes its output over an operand that is not read later. The operand
  has the output's shape and storage, and only the work-item that writes an element reads the operand there. Such kernels differ
  from others (their pointers are not `restrict`), so only groups that need it do so. These are the groups at which, without
  overwriting, more bytes would be alive than at the peak with overwriting.
- The next value of a state is in the state's memory (`compiler.memory.states`), which nothing else uses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType

from flashmem.base.types import ITEMSIZE, SLACK, TENSOR_ALIGNMENT, StoredType
from flashmem.compiler.ir.broadcast import row_part
from flashmem.compiler.ir.fusion_group import FusionGroup
from flashmem.compiler.ir.graph import Node, Value
from flashmem.compiler.memory.aliases import AliasAnalysis
from flashmem.compiler.memory.arena import LiveBytes, alive, shapes
from flashmem.compiler.operators import REGISTRY

_WIDEST = 16
"""Elements of the widest vector."""

Storage = Callable[[Value], StoredType]

_NO_STATES: Mapping[Value, Value] = MappingProxyType({})


@dataclass(frozen=True)
class BufferRange:
    """The memory of a value: it starts `offset` bytes after the start of `root`, which has a separate tensor."""

    root: Value
    offset: int


@dataclass(frozen=True)
class BufferAssignment:
    """Buffer assignment: the memory of each activation of a graph.

    Attributes:
        moved: the memory of values that groups compute, but that have no separate tensor.
        overwritten: by a group's main operator, the operand whose memory its output overwrites.
    """

    aliases: AliasAnalysis
    storage: Storage
    moved: Mapping[Value, BufferRange] = field(default_factory=dict)
    overwritten: Mapping[Node, Value] = field(default_factory=dict)

    def base(self, value: Value) -> Value:
        """The value of which `value` is a range (`compiler.memory.aliases`)."""
        return self.aliases.base(value)

    def of(self, value: Value) -> BufferRange:
        """The memory of `value`."""
        found = self.aliases.of(value)
        place = self.moved.get(found.base, BufferRange(found.base, 0))
        return BufferRange(place.root, place.offset + found.start * ITEMSIZE[self.storage(found.base)])

    def holds(self, whole: Value, part: Value, start: int) -> bool:
        """Whether `part` is stored in `whole` from element `start` on, so that no copy is needed."""
        outer = self.of(whole)
        inner = self.of(part)
        at = outer.offset + start * ITEMSIZE[self.storage(whole)]
        return outer.root is inner.root and inner.offset == at and self.storage(whole) == self.storage(part)


def assign_buffers(
    groups: Sequence[FusionGroup],
    early: Collection[Value],
    results: Collection[Value],
    aliases: AliasAnalysis,
    storage: Storage,
    states: Mapping[Value, Value] = _NO_STATES,
) -> BufferAssignment:
    """Assign memory to all values that `groups` read and write, in the order in which they run.

    `early`: values that exist before the first group: inputs, and values that the host writes. `results`: values that the host
    reads after the last one. `states`: for the next value of each state, the input in whose memory it is.
    """
    trees = _Trees(groups, early, results, aliases, storage)
    trees.keep(states)
    trees.join_parts(groups)
    apart = trees.alive()
    everywhere = trees.copy()
    everywhere.overwrite(groups, range(len(apart)))
    trees.overwrite(groups, where_needed(apart, max(everywhere.alive(), default=0)))
    moved = {
        item.base: BufferRange(root, item.at)
        for root, items in trees.members.items()
        for item in items
        if item.base is not root
    }
    return BufferAssignment(aliases, storage, moved, trees.overwritten)


def held_by(
    groups: Sequence[FusionGroup],
    early: Collection[Value],
    results: Collection[Value],
    aliases: AliasAnalysis,
    storage: Storage,
) -> list[tuple[int, tuple[int, ...]]]:
    """The pieces of memory that groups share, without overwriting: the bytes of each, and the groups that use it.

    Arguments as in `assign_buffers`. Groups count from 1; 0 is before all of them, and their number plus one is after. A piece
    is needed from the first of its groups to the last, in any order of execution.
    """
    trees = _Trees(groups, early, results, aliases, storage)
    trees.join_parts(groups)
    return list(trees.pieces())


def least_alive(
    groups: Sequence[FusionGroup],
    early: Collection[Value],
    results: Collection[Value],
    aliases: AliasAnalysis,
    storage: Storage,
) -> list[int]:
    """The bytes that are needed at each of `groups`, if every operand that can be overwritten is."""
    trees = _Trees(groups, early, results, aliases, storage)
    trees.join_parts(groups)
    trees.overwrite(groups, range(len(groups) + 2))
    return trees.alive()[1:-1]


def where_needed(apart: Sequence[int], least: int) -> set[int]:
    """The groups at which more than `least` bytes are alive. `apart`: the live bytes without overwriting."""
    return {at for at, nbytes in enumerate(apart) if nbytes > least}


@dataclass
class _Item:
    """A computed value, `at` bytes after the start of its root.

    Group `first` writes it. `reads` are (first byte, end, group), relative to its start.
    """

    base: Value
    nbytes: int
    at: int
    first: int
    reads: list[tuple[int, int, int]]

    def last(self, start: int, end: int, *, spared: int = -1) -> int:
        """The last group that needs bytes `start` to `end` of the root; reads by group `spared` do not count."""
        reads = (group for low, high, group in self.reads if self.at + low < end and start < self.at + high and group != spared)
        return max(reads, default=self.first)


def _apart(one: _Item, other: _Item, shift: int, spared: int) -> bool:
    """Whether nothing needs bytes of both at once, with `other` moved by `shift`; reads by group `spared` do not count."""
    low = max(one.at, other.at + shift)
    high = min(one.at + one.nbytes, other.at + shift + other.nbytes)
    if low >= high:
        return True
    return one.last(low, high, spared=spared) < other.first or other.last(low - shift, high - shift) < one.first


class _Trees:
    """Values grouped by the root of their memory, with their lifetimes. Groups count from 1."""

    def __init__(
        self,
        groups: Sequence[FusionGroup],
        early: Collection[Value],
        results: Collection[Value],
        aliases: AliasAnalysis,
        storage: Storage,
    ) -> None:
        self._aliases = aliases
        self._storage = storage
        self._groups = len(groups)
        self.overwritten: dict[Node, Value] = {}
        self._states: set[Value] = set()
        self._early = set(early)
        self._results = {aliases.base(value) for value in results}
        items = {value: self._item(value, 0) for value in early}
        for at, group in enumerate(groups, start=1):
            items.update((value, self._item(value, at)) for value in group.written)
            for value in group.read():
                self._read(items, value, at)
        for value in results:
            self._read(items, value, len(groups) + 1)
        self.members = {base: [item] for base, item in items.items()}
        self._item_of = items
        self._root_of = {base: base for base in items}

    def copy(self) -> _Trees:
        """A copy that can be changed independently."""
        made = object.__new__(_Trees)
        made.__dict__.update(self.__dict__)
        made._item_of = {base: _Item(i.base, i.nbytes, i.at, i.first, i.reads) for base, i in self._item_of.items()}
        made._root_of = dict(self._root_of)
        made.members = {root: [made._item_of[item.base] for item in items] for root, items in self.members.items()}
        made.overwritten = dict(self.overwritten)
        return made

    def _item(self, base: Value, first: int) -> _Item:
        return _Item(base, ITEMSIZE[self._storage(base)] * base.size, 0, first, [])

    def _span(self, value: Value) -> tuple[Value, int, int]:
        """The value of which `value` is a range, or a part of rows of a range, and that range's bytes in it."""
        part = row_part(value)
        value = value if part is None else part[0]
        found = self._aliases.of(value)
        itemsize = ITEMSIZE[self._storage(found.base)]
        return found.base, found.start * itemsize, (found.start + value.size) * itemsize

    def _read(self, items: Mapping[Value, _Item], value: Value, group: int) -> None:
        base, start, end = self._span(value)
        if base in items:
            items[base].reads.append((start, end, group))

    def alive(self) -> list[int]:
        """The live bytes at each group; the first entry is before the first group."""
        uses = [
            LiveBytes(str(number), item.at + low, high - low, item.first, group)
            for number, items in enumerate(self.members.values())
            for item in items
            for low, high, group in [(0, item.nbytes, item.first), *item.reads]
        ]
        return alive(shapes(uses), self._groups)

    def pieces(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Bytes that the same groups use, and those groups; see `held_by`."""
        for items in self.members.values():
            spans = [
                (item.at + low, item.at + high, item.first, group)
                for item in items
                for low, high, group in [(0, item.nbytes, item.first), *item.reads]
                if high > low
            ]
            end = max((high for _, high, *_ in spans), default=0)
            whole = -(-(end + SLACK) // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT
            cuts = sorted({cut for low, high, *_ in spans for cut in (low, high)} - {end} | {whole})
            for start, stop in pairwise(cuts):
                touching = {group for low, high, *both in spans if low <= start < high for group in both}
                if touching:
                    yield stop - start, tuple(sorted(touching))

    # -- states

    def keep(self, states: Mapping[Value, Value]) -> None:
        """Store the next values of states, given with the present ones, in these; nothing else is stored there."""
        for after, now in states.items():
            if after is not now:
                self._merge(after, now, 0)
            self._states.add(now)

    # -- parts of a Concat

    def join_parts(self, groups: Sequence[FusionGroup]) -> None:
        """Store parts of Concats inside their results if possible."""
        for group in groups:
            if group.main.op == "Concat":
                parts = list(parts_in_place(group.main))
                for i, (part, start) in enumerate(parts):
                    others = {self._aliases.base(other) for other, _ in parts[:i] + parts[i + 1 :]}
                    # A copied part must not share memory with the place that the copy is written to.
                    if not any(self._root_of.get(other) is self._aliases.base(part) for other in others):
                        self._join_part(group.output, part, start)

    def _join_part(self, whole: Value, part: Value, start: int) -> None:
        base, low, high = self._span(part)
        item = self._item_of.get(base)
        if item is None or (low, high) != (0, item.nbytes) or base in self._early or base in self._results:
            return
        if self._root_of[whole] in self._states:
            return
        storage = self._storage(whole)
        at = start * ITEMSIZE[storage]
        if self._root_of[base] is base and storage == self._storage(base) and at % TENSOR_ALIGNMENT == 0:
            self._merge(base, self._root_of[whole], self._item_of[whole].at + at)

    def _merge(self, root: Value, into: Value, at: int) -> None:
        """Store the tree of `root` in the tree of `into`, `at` bytes from its start."""
        for item in self.members.pop(root):
            item.at += at
            self._root_of[item.base] = into
            self.members[into].append(item)

    # -- in-place operands

    def overwrite(self, groups: Sequence[FusionGroup], where: Collection[int]) -> None:
        """Let the groups with the numbers `where` overwrite an operand, if they can."""
        for at, group in enumerate(groups, start=1):
            if at in where:
                for operand in self._candidates(group):
                    if self._give(operand, group, at):
                        self.overwritten[group.main] = operand
                        break

    def _candidates(self, group: FusionGroup) -> Iterator[Value]:
        """The operands that the group's kernel reads element by element, with the shape and storage of its output."""
        possible, output = _read_in_order(group), group.output
        read = dict.fromkeys(group.read())
        if not possible or not _fills_vectors(group, read):
            return
        for value in possible:
            base = self._aliases.base(value)
            if value.shape != output.shape or value.dtype != output.dtype or base not in self._item_of or row_part(value):
                continue
            _, start, end = self._span(value)
            alike = self._storage(base) == self._storage(output)
            if alike and not any(self._overlap(other, base, start, end) for other in read if other is not value):
                yield value

    def _overlap(self, value: Value, base: Value, start: int, end: int) -> bool:
        """Whether `value` shares memory with bytes `start` to `end` of `base`."""
        other, low, high = self._span(value)
        if other not in self._item_of or self._root_of[other] is not self._root_of[base]:
            return False
        shift = self._item_of[other].at - self._item_of[base].at
        return low + shift < end and start < high + shift

    def _give(self, operand: Value, group: FusionGroup, at: int) -> bool:
        """Give the memory of `operand` to the output of group `at`, if nothing else needs it later."""
        base, start, _ = self._span(operand)
        read = self._item_of[base]
        made = self._item_of[group.output]
        old = self._root_of[base]
        new = self._root_of[group.output]
        if old is new or old in self._states or new in self._states:
            return False
        shift = read.at + start - made.at  # distance from the new root's start to the old one's
        for one in self.members[old]:
            for other in self.members[new]:
                if not _apart(one, other, shift, spared=at if one is read and other is made else -1):
                    return False
        inside = self._item_of[new].nbytes + shift <= self._item_of[old].nbytes and shift >= 0
        if shift <= 0 and self._item_of[old].nbytes - shift <= self._item_of[new].nbytes:
            self._merge(old, new, -shift)
        elif inside and new not in self._results:
            self._merge(new, old, shift)
        else:
            return False
        return True


def _read_in_order(group: FusionGroup) -> list[Value]:
    """The operands that the group's kernel reads where it writes, element by element."""
    if group.moved is not None or group.prologue:  # it does not write where it reads, or reads in another order
        return []
    operator, read = REGISTRY[group.main.op], group.read()
    if operator.expression is not None:
        return list(dict.fromkeys(read))
    if not operator.in_place:
        return []
    possible = group.operands() + ([group.main.input(0)] if operator.in_place == "input" else [])
    return [value for value in possible if read.count(value) == 1]


def _fills_vectors(group: FusionGroup, read: Iterable[Value]) -> bool:
    """Whether vectors end with the rows; otherwise the last one reaches into the next row, which other work-items write."""
    shape = group.output.shape
    columns = REGISTRY[group.main.op].columns
    if columns is not None:
        groups = int(group.main.attributes.get("group", 1))
        return math.prod(shape[columns(group.main) :]) // groups % _WIDEST == 0
    one_row = all(value.shape == shape or value.size == 1 for value in read)
    return one_row or math.prod(shape[-1:]) % _WIDEST == 0


def parts_in_place(node: Node) -> Iterator[tuple[Value, int]]:
    """The parts of a Concat, each with its first element in the result; none if they are not contiguous there."""
    shape = node.outputs[0].shape
    axis = node.attributes["axis"]
    if math.prod(shape[:axis]) != 1:
        return
    start = 0
    for value in node.inputs:
        if value is not None:
            yield value, start
            start += value.size
