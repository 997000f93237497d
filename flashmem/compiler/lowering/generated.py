"""Generated programs: what lowering makes of a placed graph, how it was told to, and the weight file of several programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flashmem.compiler.lowering.context import Cuts, PackedBefore
from flashmem.compiler.memory.placement import PlacedGraph
from flashmem.compiler.selection.selector import KernelRequest, KernelSelector
from flashmem.compiler.weights.packing_list import OnPiece, PackingList, WeightSink
from flashmem.compiler.weights.sharing import NOTHING_STORED, Placements, StoredWeights
from flashmem.compiler.weights.slicing import DEFAULT, Slicing
from flashmem.program.kernel_text import Source
from flashmem.program.program import Program
from flashmem.target.descriptor import DeviceDescriptor


class Reserved(NamedTuple):
    """Memory of a program's activations and constants."""

    arena_bytes: int = 0
    constants_bytes: int = 0


NOTHING_RESERVED = Reserved()


@dataclass(frozen=True)
class Lowering:
    """How a graph is lowered, for the default memory path of a device.

    Attributes:
        selector: selects the config of each contraction.
        slicing: the sizes of slices.
        earlier: weights already in the file, of programs for other shapes; they are read for comparison.
        least: memory that is reserved at least.
        before: slices of its own weights that another program of the same graph has packed.
    """

    descriptor: DeviceDescriptor
    selector: KernelSelector
    slicing: Slicing = DEFAULT
    earlier: StoredWeights = NOTHING_STORED
    least: Reserved = NOTHING_RESERVED
    before: PackedBefore = field(default_factory=PackedBefore)


@dataclass(frozen=True)
class Generated:
    """A generated program: the OpenCL C of its kernels, its weights (not yet read) and its resident constants (in memory).

    `weights` lists the weights that this program adds to the weight file. `placements` also has those that the file had before.
    `cuts`: the slices of its packed weights. `chosen`: by name, kernels of groups for which configs were selected, with the
    requests. It was made of `placed` by `lowering`.
    """

    program: Program
    source: Source
    weights: PackingList
    constants: NDArray[np.uint8]
    placements: Placements
    cuts: Cuts = field(repr=False)
    chosen: Mapping[str, frozenset[KernelRequest]] = field(repr=False)
    placed: PlacedGraph = field(repr=False)
    lowering: Lowering = field(repr=False)

    def reserving(self, least: Reserved) -> Generated:
        """The same program in at least that memory."""
        program = replace(
            self.program,
            arena_bytes=max(self.program.arena_bytes, least.arena_bytes),
            constants_bytes=max(self.program.constants_bytes, least.constants_bytes),
        )
        return replace(self, program=program, lowering=replace(self.lowering, least=least))

    def write(self, sink: WeightSink, on_piece: OnPiece = lambda name, nbytes: None) -> None:
        """Write the weight file of this program alone: see `PackingList.write`."""
        write_weights([self], sink, on_piece)


def write_weights(programs: Sequence[Generated], sink: WeightSink, on_piece: OnPiece = lambda name, nbytes: None) -> None:
    """Write the weight file of programs that were generated in sequence, each with those before it as `earlier`."""
    for made in programs:
        made.weights.write(sink, on_piece)
    write_constants(programs[-1], sink)
    on_piece("constants", programs[-1].constants.nbytes)


def write_constants(last: Generated, sink: WeightSink) -> None:
    """Write what follows the weights of several programs, of which `last` is the last one."""
    sink.append(last.constants, last.weights.page_bytes)


def sharing_weights(programs: Sequence[Generated]) -> list[Generated]:
    """The programs with their final offsets in the weight file: constants follow the weights of all programs.

    Each begins its constants with those of the program before. Those that share states use the same, which are all.
    """
    offset, end = constants_place(programs[-1].weights, programs[-1].constants.nbytes)
    made = [replace(each, program=replace(each.program, constants_offset=offset, weights_bytes=end)) for each in programs]
    if not programs[0].program.states:
        return made
    return [replace(each, program=replace(each.program, constants_bytes=end - offset)) for each in made]


def stored_by(made: Generated, before: StoredWeights) -> StoredWeights:
    """The stored weights that the next program can read: those of `before`, and those that `made` has placed."""
    return before.followed_by(made.placements, made.weights.size, made.constants.tobytes())


def constants_place(weights: PackingList, nbytes: int) -> tuple[int, int]:
    """The offsets at which the constants begin and the file ends."""
    offset = -(-weights.size // weights.page_bytes) * weights.page_bytes
    return offset, offset + nbytes
