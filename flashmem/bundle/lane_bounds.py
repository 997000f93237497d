"""Bounds checking of interleaved copy streams: the copies that a plan may request must stay inside staging and slices.

A bundle has no lane arguments; the runtime derives them from the plan and the slices (`runtime.streaming.interleaved`). So each
lane is checked with the largest copy of every slice that it can have, the whole slice. The order of its arguments is checked
too.
"""

from __future__ import annotations

from collections.abc import Mapping

from flashmem.bundle.kernel_bounds import Kernel, damage_error, parsed_kernels
from flashmem.program.lanes import LANE_UNIT, LaneKind, lane_kind, lane_places
from flashmem.program.program import Program
from flashmem.program.tensors import Slice

_NUMBERS = ("first", "count", "width", "pitch")


def check_lanes(program: Program, source: str) -> None:
    """Raise BundleError unless each kernel in the lane source has a lane's arguments last and stays inside the memory it
    copies.

    Checks every slice that a lane can copy, in its staging and in its destination.
    """
    kind = lane_kind(program)
    shapes = {_shape(part): part for part in program.slices}
    held: set[tuple[object, ...]] = set()  # already checked: lanes of one kind have the same text
    for kernel in parsed_kernels(source).values():
        copied = kernel.name.removeprefix("lane_copy_")
        own: LaneKind = kind if copied == kernel.name else next((each for each in LANE_UNIT if each == copied), "buffer")
        says = _lane_of(kernel, own)
        if says in held:
            continue
        for part in shapes.values():
            for place, written in enumerate(lane_places(own)):
                if (part.channel if part.is_image else "buffer") == written:
                    _check_place(kernel, own, part, place)
        held.add(says)


def _shape(part: Slice) -> tuple[object, ...]:
    return part.channel, part.width, part.height, part.row_pitch, part.file_bytes


def _lane_of(kernel: Kernel, kind: LaneKind) -> tuple[object, ...]:
    """The lane's parameters, the last of the kernel, and the kernel's statements about them."""
    names = []
    kinds = []
    for place, written in enumerate(lane_places(kind)):
        names += [f"lane_{each}{place}" for each in ("src", "dst", *_NUMBERS)]
        kinds += ["pointer", "pointer" if written == "buffer" else "texture", *("int" for _ in _NUMBERS)]
    last = kernel.parameters[-len(names) :]
    right = [each.name for each in last] == names and [each.kind for each in last] == kinds
    if not right:
        raise damage_error(f"kernel {kernel.name} does not take the arguments of a stream lane")
    return kind, tuple(last), *(line for line in kernel.stated if "lane_" in line)


def _check_place(kernel: Kernel, kind: LaneKind, part: Slice, place: int) -> None:
    """Check the lane of `kernel` for a copy of the whole `part` with argument set `place`, and no copy with the other sets."""
    room = -(-part.file_bytes // 16) * 16
    if part.is_image:
        unit = LANE_UNIT[kind]
        numbers = (0, part.height, part.width, part.row_pitch // unit)
    else:
        numbers = (0, room // LANE_UNIT[kind], 1, 1)
    known: Mapping[str, int] = {
        f"lane_{name}{other}": number
        for other in range(len(lane_places(kind)))
        for name, number in zip(_NUMBERS, numbers if other == place else (0, 0, 1, 1), strict=True)
    }
    touched = kernel.touches(known, {f"lane_src{place}", f"lane_dst{place}"}, "lane_")
    source = touched.get(f"lane_src{place}")
    target = touched.get(f"lane_dst{place}")
    itemsize = {each.name: each.itemsize for each in kernel.parameters}
    if source is None or target is None:
        raise damage_error(f"kernel {kernel.name} does not state what its stream lane touches")
    if source[0] * itemsize[f"lane_src{place}"] > room:
        raise damage_error(f"the stream lane of kernel {kernel.name} leaves the staging of slice {part.name!r}")
    if part.is_image:
        inside = all(at < size for at, size in zip(target, (part.width, part.height), strict=True))
    else:
        inside = target[0] * itemsize[f"lane_dst{place}"] <= room
    if not inside:
        raise damage_error(f"the stream lane of kernel {kernel.name} leaves the home of slice {part.name!r}")
