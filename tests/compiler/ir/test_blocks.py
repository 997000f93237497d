"""Kinds of blocks beside the package gguf, and packed panels read as their description says."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import quants
from numpy.typing import NDArray

from flashmem.compiler.ir.blocks import FORMATS
from flashmem.compiler.ir.blocks.constant import BlockConstant
from flashmem.compiler.ir.blocks.format import BlockFormat, Bytes, Plane
from flashmem.compiler.ir.blocks.places import bit_places
from flashmem.compiler.ir.graph import ArrayConstant
from tests.support.blocks import any_blocks

ROWS, DEPTH = 37, 768


def same_bits(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> bool:
    """Whether all numbers are the same, of NaN any one."""
    is_nan = np.isnan(found) & np.isnan(wanted)
    return bool((is_nan | (found.view(np.uint32) == wanted.view(np.uint32))).all())


@pytest.mark.parametrize("name", FORMATS)
@np.errstate(all="ignore")
def test_weights_are_those_of_the_package(name: str) -> None:
    kind = FORMATS[name]
    assert (kind.weights, kind.nbytes) == gguf.GGML_QUANT_SIZES[Kind[name]]
    data = any_blocks(kind, ROWS, DEPTH, 1)
    wanted = quants.dequantize(data, Kind[name])
    matrix = BlockConstant(ArrayConstant(data), kind)
    assert matrix.shape == (ROWS, DEPTH) and same_bits(matrix.array(), wanted)
    some, deep = matrix.sliced(0, 5, 17), matrix.sliced(1, 256, 512)
    assert some is not None and same_bits(some.array(), wanted[5:17])
    assert deep is not None and same_bits(deep.array(), np.ascontiguousarray(wanted[:, 256:512]))
    assert matrix.sliced(1, 0, 16) is None


@pytest.mark.parametrize("panel", [4, 8, 16])
@pytest.mark.parametrize("name", FORMATS)
@np.errstate(all="ignore")
def test_a_panel_has_the_same_bits(name: str, panel: int) -> None:
    """Number by number, as kernels find them. The last column of the panel is missing."""
    kind = FORMATS[name]
    if kind.is_narrow and panel == 4:
        pytest.skip("panels of nibbles have eight columns")
    data = any_blocks(kind, panel - 1, 512, 2)
    packed = kind.pack(data, panel).reshape(512 // kind.weights, -1)
    assert packed.shape[1] == kind.nbytes * panel
    found = np.array([unpacked(kind, block, panel) for block in packed])  # [blocks, weights, columns]
    wanted = quants.dequantize(data, Kind[name])
    assert same_bits(np.ascontiguousarray(found.reshape(512, panel).T[:-1]), wanted)


def unpacked(kind: BlockFormat, block: Bytes, panel: int) -> NDArray[np.float32]:
    """What a packed block stands for, [weights, columns]."""
    scale, minimum = (block[at * panel : (at + 2) * panel].view("<f2").astype(np.float32) for at in (0, 2))
    made = np.empty((kind.weights, panel), np.float32)
    for at in range(kind.weights):
        run = at // kind.run
        factor = number([factor_bits(plane, block, panel, run) for plane in kind.factor_rows()], kind.factor_planes)
        lowering = number([factor_bits(plane, block, panel, kind.runs + run) for plane in kind.factor_rows()], (4, 2))
        code = number([code_bits(plane, block, panel, at) for plane in kind.code_rows(panel)], kind.planes)
        code = np.array(kind.values)[code] if kind.values else code
        steps = code - kind.offset if kind.is_narrow else code.astype(np.int8)
        scaled = scale * (factor - kind.factor_offset).astype(np.float32) if kind.factor_planes else scale
        made[at] = steps.astype(np.float32) * scaled
        if kind.has_minimum:
            made[at] += -(minimum * lowering.astype(np.float32)) if kind.factor_planes else minimum
    return made


def number(planes: list[NDArray[np.int64]], bits: tuple[int, ...]) -> NDArray[np.int64]:
    """Numbers of their planes; those of eight bits are signed."""
    found = sum((plane << sum(bits[:i]) for i, plane in enumerate(planes)), np.int64(0))
    return np.asarray(found).astype(np.int8).astype(np.int64) if bits == (8,) else np.asarray(found)


def factor_bits(plane: Plane, block: Bytes, panel: int, index: int) -> NDArray[np.int64]:
    """The bits of factor `index` of each column."""
    at = (plane.at + index % plane.rows) * panel
    return block[at : at + panel].astype(np.int64) >> index // plane.rows * plane.bits & (1 << plane.bits) - 1


def code_bits(plane: Plane, block: Bytes, panel: int, at: int) -> NDArray[np.int64]:
    """The bits of weight `at` of each column."""
    if plane.bits == 8:
        return block[plane.at + at * panel :][:panel].astype(np.int64)
    span = 32 // plane.bits
    row = block[plane.at + (at // span * 8 + at % 8) * panel // 2 :][: panel // 2].astype(np.int64)
    nibbles = np.concatenate([row & 15, row >> 4])
    return nibbles >> at // 8 % (4 // plane.bits) * plane.bits & (1 << plane.bits) - 1


@pytest.mark.parametrize("name", FORMATS)
def test_places_of_bits(name: str) -> None:
    """Numbers that are read bit by bit at these places of a table's row are those of the block."""
    kind = FORMATS[name]
    blocks, places = any_blocks(kind, 9, kind.weights, 3), bit_places(kind)
    parts, data = kind.parts(blocks), kind.rows(blocks)
    read, numbers = np.unpackbits(data, axis=1, bitorder="little").astype(np.int64), places.numbers.astype(int)
    codes, factors = np.zeros(parts.codes.shape, int), np.zeros((9, kind.factors), int)
    for planes, made, size in ((kind.code_rows(1), codes, kind.weights), (kind.factor_rows(), factors, kind.factors)):
        for plane in planes:
            for bit in range(plane.bits):
                made += read[:, numbers[:size] + bit] << plane.below + bit
            numbers = numbers[size:]
    np.testing.assert_array_equal(codes, parts.codes)
    assert parts.factors is None or (factors == parts.factors).all()
    np.testing.assert_array_equal(data[:, places.scale : places.scale + 2], parts.scale)
    assert parts.minimum is None or (data[:, places.minimum : places.minimum + 2] == parts.minimum).all()
