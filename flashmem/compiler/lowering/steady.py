"""Steady launches: faster kernels, or one launch in place of several launches, for later runs.

NNV12 (MobiSys '23, section 3.5) switches from the kernels of a first answer to those of later ones. Here the program is
lowered again for later runs, over the weights in the file, and compared launch by launch. A launch that
computes the same in the same memory, by another kernel or in place of several, is added to the bundle.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from flashmem.compiler.lowering.context import PackedBefore
from flashmem.compiler.lowering.generated import Generated
from flashmem.compiler.lowering.program import lower_once
from flashmem.program.kernel_text import kernel_source, kernel_texts
from flashmem.program.launches import Arg, Joined, Launch, SteadyLaunch
from flashmem.program.program import Program
from flashmem.program.tensors import Slice, Tensor

_PART = re.compile(r"\[\d+\]$")


def with_steady(first: Generated) -> Generated:
    """`first` with its steady launches: none where they would gain nothing."""
    return with_steady_of(first, for_later_runs(first, PackedBefore(first.cuts)))


def for_later_runs(made: Generated, packed: PackedBefore) -> Generated | None:
    """The program that is faster than `made` in later runs over the same `packed` weights; None if it is the same."""
    selector = made.lowering.selector
    if not selector.differs_later() and all(len(parts) == 1 for parts in packed.cuts.values()):
        return None
    return lower_once(made.placed, replace(made.lowering, selector=selector.for_later_runs(), before=packed))


def with_steady_of(first: Generated, later: Generated | None) -> Generated:
    """`first` with the steady launches that are those of `later`, the program of later runs."""
    if later is None or later.cuts.keys() != first.cuts.keys():  # it would need them in another packing
        return first
    matched = MatchedPrograms(first, later)
    found = tuple(
        SteadyLaunch(number, number + len(cold) - 1, launch)
        for number, cold, made in pairs(first.program.launches, later.program.launches)
        if (launch := matched.launch(cold, made)) is not None
    )
    if not found:
        return first
    read = {name for each in found for name in slices_read(each.launch)}
    joined = tuple(matched.joined[name] for name in sorted(read & matched.joined.keys()))
    texts = kernel_texts(first.source.plain)
    more = kernel_texts(later.source.plain)
    texts |= {each.launch.kernel: more[each.launch.kernel] for each in found}
    source = replace(first.source, plain=kernel_source(texts), kernels=tuple(texts))
    return replace(first, program=replace(first.program, steady=found, joined=joined), source=source)


def pairs(first: Sequence[Launch], later: Sequence[Launch]) -> Iterator[tuple[int, Sequence[Launch], Launch]]:
    """Launches of later runs, each with the launches it replaces and their first launch's number, until the programs differ."""
    start = 0
    for launch in later:
        end = start + 1
        if start == len(first) or _PART.sub("", first[start].name) != _PART.sub("", launch.name):
            return
        if first[start].name != launch.name:  # several launches, from NAME[0] on, become one
            if first[start].name != f"{launch.name}[0]":
                return
            while end < len(first) and first[end].name == f"{launch.name}[{end - start}]":
                end += 1
        yield start + 1, first[start:end], launch
        start = end


def slices_read(launch: Launch) -> list[str]:
    """The names of the slices among the arguments of `launch`."""
    return [str(arg.value) for arg in launch.args if arg.kind == "slice"]


def _tensors_touched(launch: Launch) -> set[str]:
    """The names of the tensors among the arguments of `launch`."""
    return {str(arg.value) for arg in launch.args if arg.kind == "tensor"}


def _work(launch: Launch) -> tuple[object, ...]:
    """What a launch does, whatever its arguments."""
    return launch.kernel, launch.global_size, launch.local_size


@dataclass
class MatchedPrograms:
    """Two programs over the same weights: translates launches of the second to the memory of the first."""

    first: Generated
    later: Generated

    def __post_init__(self) -> None:
        one = self.first.program
        other = self.later.program
        self._tensors = _tensors(one)
        self._made = _tensors(other)
        self._slices = one.readable()
        self._wanted = {part.name: part for part in other.slices}
        self._status = {program.status for program in (one, other)}
        self.joined: dict[str, Joined] = {}

    def launch(self, cold: Sequence[Launch], made: Launch) -> Launch | None:
        """`made` with the arguments of the first program; None if it is no better, or accesses memory that `cold` does not."""
        if len(cold) == 1 and _work(cold[0]) == _work(made):
            return None
        touched = {name for launch in cold for name in _tensors_touched(launch)}
        read = [name for launch in cold for name in slices_read(launch)]
        args = [here for arg in made.args if (here := self._argument(arg, read, touched)) is not None]
        translated = replace(made, args=tuple(args))
        parts = {part for name in slices_read(translated) for part in self._parts(name)}
        same = len(args) == len(made.args) and parts == set(read) and _tensors_touched(translated) == touched
        return translated if same else None

    def _argument(self, arg: Arg, read: Sequence[str], touched: Collection[str]) -> Arg | None:
        """The first program's argument for an argument of the second; None if it has no such argument."""
        if arg.kind == "slice":
            name = self._slice(str(arg.value), read)
            return None if name is None else Arg("slice", name)
        if arg.kind == "tensor":
            return arg if arg.value in touched and arg.value not in self._status and self._alike(str(arg.value)) else None
        return None if arg.kind == "constant" and not self._holds(arg) else arg

    def _parts(self, name: str) -> tuple[str, ...]:
        return self.joined[name].parts if name in self.joined else (name,)

    def _alike(self, name: str) -> bool:
        one = self._tensors[name]
        other = self._made[name]
        return (one.shape, one.dtype, one.nbytes) == (other.shape, other.dtype, other.nbytes)

    def _holds(self, arg: Arg) -> bool:
        start = int(arg.value)
        one, other = (each.constants[start : start + arg.nbytes] for each in (self.first, self.later))
        return one.tobytes() == other.tobytes()

    def _slice(self, name: str, read: Sequence[str]) -> str | None:
        """The first program's slice for slice `name` of the second: one of `read`, or all of `read` of one weight, joined."""
        made = self._wanted[name]
        here = self._slices.get(name)
        if here is not None and replace(here, offset=0) == replace(made, offset=0):
            return name
        parts = [self._slices[each] for each in read if self._slices[each].weight == made.weight]
        if len(parts) < 2 or not _side_by_side(parts) or sum(part.nbytes for part in parts) != made.nbytes:
            return None
        joined = Joined(f"{_PART.sub('', parts[0].name)}[0-{len(parts) - 1}]", tuple(part.name for part in parts))
        self.joined[joined.name] = joined
        return joined.name


def _tensors(program: Program) -> Mapping[str, Tensor]:
    return {tensor.name: tensor for tensor in program.tensors}


def _side_by_side(parts: Sequence[Slice]) -> bool:
    ends = [part.offset + part.nbytes for part in parts[:-1]]
    return not any(part.is_image for part in parts) and ends == [part.offset for part in parts[1:]]
