"""Stream lanes: the plan's x_{w,l} turned into kernel arguments (transfer mode `interleave`; FlashMem section 4.4).

A lane moves units of one slice from staging to its home: texels of an image, or 16-byte words of a plain buffer. Six arguments
describe it, last in every kernel of the lane source: lane_src, lane_dst, lane_first, lane_count, lane_width, lane_pitch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flashmem.planning.plan import OverlapPlan, PlannedWeight
from flashmem.program import TEXEL_BYTES, Slice
from flashmem.runtime.transfer import WORD, whole_words

COPY_GROUP = 64
"""Work-items of a work-group of such a kernel."""

_MOST_COPY_ITEMS = 1 << 14
"""Most work-items of such a kernel; where there are more units, each moves several."""


@dataclass(frozen=True)
class Move:
    """Units `first` to `first + count` - 1 of `part`. `width` and `pitch` count texels; both are 0 for words."""

    part: Slice
    first: int
    count: int
    width: int
    pitch: int

    @property
    def copier(self) -> str:
        """The kernel of the lane source that makes this move and does nothing else."""
        return f"lane_copy_{self.kind}"

    @property
    def kind(self) -> str:
        """What is written: a texture's channel type, or "buffer"."""
        return self.part.channel if self.width else "buffer"

    @property
    def copy_items(self) -> int:
        """Work-items of that kernel: whole work-groups."""
        return min(-(-self.count // COPY_GROUP) * COPY_GROUP, _MOST_COPY_ITEMS)


@dataclass(frozen=True)
class LayerMoves:
    """What moves while one layer computes: in the kernel's own lane, and by launches of their own.

    `leading` moves, by launches of their own too, come before the layer's kernel, which needs what they bring.
    """

    riding: Move | None
    separate: tuple[Move, ...]
    leading: tuple[Move, ...] = ()

    @property
    def all(self) -> tuple[Move, ...]:
        """Every move of the layer."""
        return (*self.leading, *((self.riding,) if self.riding else ()), *self.separate)


def layer_moves(plan: OverlapPlan, slices: Mapping[str, Slice], lane: str, *, lanes: bool = True) -> dict[int, LayerMoves]:
    """The moves of each layer that has any. `lane`: the one kind of memory that kernels' lanes write
    (`program.lane_kind`), so that what goes elsewhere cannot ride along.

    Without `lanes` nothing rides: every move is a launch of its own.
    """
    beside: dict[int, list[Move]] = {}
    before: dict[int, list[Move]] = {}
    for weight in plan.weights:
        for layer, move in _moves(weight, slices[weight.name]):
            (before if layer == weight.first_use else beside).setdefault(layer, []).append(move)
    result = {}
    for layer in beside.keys() | before.keys():
        moves = beside.get(layer, [])
        riding = next((move for move in moves if move.kind == lane), None) if lanes else None
        separate = tuple(move for move in moves if move is not riding)
        result[layer] = LayerMoves(riding, separate, tuple(before.get(layer, ())))
    return result


def needed_slices(plan: OverlapPlan, moves: Mapping[int, LayerMoves]) -> dict[int, tuple[str, ...]]:
    """The slices that must be loaded before a layer: those it is the first to use, or to move."""
    needs: dict[int, list[str]] = {}
    first_moved: dict[str, int] = {}
    for layer in sorted(moves):
        for move in moves[layer].all:
            first_moved.setdefault(move.part.name, layer)
    for w in plan.weights:
        needs.setdefault(first_moved.get(w.name, w.first_use), []).append(w.name)
    return {layer: tuple(names) for layer, names in needs.items()}


def _moves(weight: PlannedWeight, part: Slice) -> list[tuple[int, Move]]:
    """The chunks of each layer as units: consecutive, and together the whole slice."""
    width, pitch, units = _geometry(part)
    moves, chunks = [], 0
    for layer, count in weight.moves:
        first = units * chunks // weight.chunks
        chunks += count
        after = units * chunks // weight.chunks
        if after > first:
            moves.append((layer, Move(part, first, after - first, width, pitch)))
    return moves


def _geometry(part: Slice) -> tuple[int, int, int]:
    """Width and pitch in texels (0 for words), and the number of units."""
    if part.is_image:
        return part.width, part.row_pitch // TEXEL_BYTES[part.channel], part.width * part.height
    return 0, 0, whole_words(part.file_bytes) // WORD
