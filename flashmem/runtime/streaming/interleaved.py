"""Interleaved copy streams: the plan's x_{w,l} as kernel arguments (transfer mode `interleave`; FlashMem section 4.4).

A launch makes up to four copies (`program.lane_places`), the first of them between the steps of its work. Each copies rows of
one slice from staging to its permanent place: rows of an image, or 16-byte words of a plain buffer. Six arguments describe a
copy, the last ones of every kernel of the lane source: lane_src, lane_dst, lane_first, lane_count, lane_width, lane_pitch
(kernels/templates/common/lane.cl.j2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from flashmem.base.types import TEXEL_BYTES
from flashmem.program.lanes import LANE_UNIT, LaneKind, lane_places
from flashmem.program.tensors import Slice
from flashmem.schedule.loads import WORD, whole_words
from flashmem.schedule.plan import OverlapPlan, PlannedWeight

COPY_GROUP = 64
"""Work-items of a work-group of the copy kernel."""

_MOST_COPY_ITEMS = 1 << 14
"""Most work-items of the copy kernel; with more units, each work-item copies several."""

T = TypeVar("T")


@dataclass(frozen=True)
class Move:
    """One copy: rows `first` to `first + count` - 1 of `part`. `width` and `pitch` count texels; both are 0 for words."""

    part: Slice
    first: int
    count: int
    width: int
    pitch: int

    @property
    def kind(self) -> LaneKind:
        """The type of the destination: a texture's channel type, or "buffer"."""
        return self.part.channel if self.width else "buffer"

    @property
    def nbytes(self) -> int:
        """Bytes copied."""
        return self.count * (self.width or 1) * LANE_UNIT[self.kind]

    def numbers(self, kind: LaneKind) -> tuple[int, int, int, int]:
        """First row, rows, width and pitch for a stream of `kind`, whose unit may be smaller than a word."""
        words = LANE_UNIT[self.kind] // LANE_UNIT[kind]
        return self.first * words, self.count * words, self.width or 1, self.pitch or 1


@dataclass(frozen=True)
class CopyStream:
    """The copies of one launch: at most as many as its stream of `kind` has places, and at least one of that kind."""

    kind: LaneKind
    moves: tuple[Move, ...]

    @property
    def copier(self) -> str:
        """The kernel of the lane source that makes such copies and nothing else."""
        return f"lane_copy_{self.kind}"

    @property
    def copy_items(self) -> int:
        """Work-items of that kernel, in whole work-groups."""
        units = sum(move.nbytes for move in self.moves) // LANE_UNIT[self.kind]
        return min(-(-units // COPY_GROUP) * COPY_GROUP, _MOST_COPY_ITEMS)

    def arguments(self, source: Callable[[Slice], T], home: Callable[[Slice], T], number: Callable[[int], T]) -> list[T]:
        """The stream's kernel arguments: memory of each copied slice, numbers as `number` makes them. `source`: its staging.

        An unused place has no rows. Its memory arguments repeat another copy's and are not accessed: a texture that the
        kernel reads must not be among those that it may write.
        """
        waiting = list(self.moves)
        idle = next(move.part for move in waiting if move.kind == self.kind)
        arguments: list[T] = []
        for place in lane_places(self.kind):
            move = next((move for move in waiting if move.kind == place), None)
            if move is not None:
                waiting.remove(move)
                arguments += [source(move.part), home(move.part), *map(number, move.numbers(self.kind))]
                continue
            staging = source(idle)
            arguments += [staging, staging if place == "buffer" else home(idle), *map(number, (0, 0, 1, 1))]
        assert not waiting
        return arguments


@dataclass(frozen=True)
class LayerMoves:
    """The copies during one launch: in its kernel's own stream, and by launches of the copy kernel.

    `leading` copies, also by the copy kernel, run before the launch's kernel, which needs these slices.
    """

    interleaved: CopyStream | None
    separate: tuple[CopyStream, ...] = ()
    leading: tuple[CopyStream, ...] = ()

    @property
    def all(self) -> tuple[Move, ...]:
        """Every copy of the launch."""
        streams = (*self.leading, *((self.interleaved,) if self.interleaved else ()), *self.separate)
        return tuple(move for stream in streams for move in stream.moves)


def layer_moves(plan: OverlapPlan, slices: Mapping[str, Slice], lane: LaneKind, *, lanes: bool = True) -> dict[int, LayerMoves]:
    """The copies of each launch that has any. `lane`: the type that the kernels' streams write (`program.lane_kind`).

    The largest copies are interleaved, as far as the stream has places. Without `lanes` all copies are made by the copy kernel,
    as many in one launch as it has places.
    """
    beside: dict[int, list[Move]] = {}
    before: dict[int, list[Move]] = {}
    for weight in plan.weights:
        for layer, move in _moves(weight, slices[weight.name]):
            (before if layer == weight.first_use else beside).setdefault(layer, []).append(move)
    result = {}
    for layer in beside.keys() | before.keys():
        moves = beside.get(layer, [])
        interleaved = _taken(moves, lane) if lanes else None
        left = [move for move in moves if interleaved is None or move not in interleaved.moves]
        result[layer] = LayerMoves(interleaved, _launches(left), _launches(before.get(layer, ())))
    return result


def _taken(moves: Iterable[Move], lane: LaneKind) -> CopyStream | None:
    """The largest copies that fit a stream's places; None without one of its own kind, whose texture it requires."""
    places = list(lane_places(lane))
    taken = []
    for move in sorted(moves, key=lambda move: -move.nbytes):
        if move.kind in places:
            places.remove(move.kind)
            taken.append(move)
    return CopyStream(lane, tuple(taken)) if any(move.kind == lane for move in taken) else None


def _launches(moves: Sequence[Move]) -> tuple[CopyStream, ...]:
    """Launches of the copy kernel for `moves`: textures of one channel type in each, buffers in the remaining place."""
    waiting = list(moves)
    streams = []
    while waiting:
        kind = next((move.kind for move in waiting if move.kind != "buffer"), waiting[0].kind)
        stream = _taken(waiting, kind)
        assert stream is not None
        waiting = [move for move in waiting if move not in stream.moves]
        streams.append(stream)
    return tuple(streams)


def needed_slices(plan: OverlapPlan, moves: Mapping[int, LayerMoves]) -> dict[int, tuple[str, ...]]:
    """The slices that must be loaded before each launch: those that it uses or copies first."""
    needs: dict[int, list[str]] = {}
    first_moved: dict[str, int] = {}
    for layer in sorted(moves):
        for move in moves[layer].all:
            first_moved.setdefault(move.part.name, layer)
    for w in plan.weights:
        needs.setdefault(first_moved.get(w.name, w.first_use), []).append(w.name)
    return {layer: tuple(names) for layer, names in needs.items()}


def _moves(weight: PlannedWeight, part: Slice) -> list[tuple[int, Move]]:
    """The chunks of each launch as rows, to whole rows of an image: consecutive, and together the whole slice."""
    width, pitch, rows = _geometry(part)
    moves = []
    chunks = 0
    for layer, count in weight.moves:
        first = rows * chunks // weight.chunks
        chunks += count
        after = rows * chunks // weight.chunks
        if after > first:
            moves.append((layer, Move(part, first, after - first, width, pitch)))
    return moves


def _geometry(part: Slice) -> tuple[int, int, int]:
    """Width and pitch in texels (0 for words), and the number of rows."""
    if part.is_image:
        return part.width, part.row_pitch // TEXEL_BYTES[part.channel], part.height
    return 0, 0, whole_words(part.file_bytes) // WORD
