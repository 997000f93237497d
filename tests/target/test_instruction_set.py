"""Instruction sets of CPUs: their tiles, and descriptors for them."""

from __future__ import annotations

import pytest

from flashmem.base.errors import UserError
from flashmem.compiler.configs.workload import Workload
from flashmem.compiler.kernels.contraction.configs import plain_tile
from flashmem.compiler.weights.packing import Storage
from flashmem.target.descriptor import DeviceDescriptor, load_descriptor
from flashmem.target.instruction_set import INSTRUCTION_SETS, PANEL


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_the_tile_fills_the_registers_and_no_more(name: str) -> None:
    kind = INSTRUCTION_SETS[name]
    across = 4 * PANEL * kind.panels // kind.register_bytes

    def registers(rows: int) -> int:
        return rows * across + across + 1  # sums, a row of weights, a number of the left operand

    assert registers(kind.rows) <= kind.registers
    assert registers(kind.rows + 1) > kind.registers or kind.panels == 2


def test_tiles_of_known_processors() -> None:
    assert {name: (kind.rows, kind.panels) for name, kind in INSTRUCTION_SETS.items()} == {
        "sse": (2, 1),
        "avx": (6, 1),
        "avx2": (6, 1),
        "avx512": (8, 2),
        "neon": (6, 1),
    }


@pytest.mark.parametrize("family", ["matmul", "conv", "deform_conv"])
@pytest.mark.parametrize("storage", ["float32", "float16", "int8", "uint4"])
@pytest.mark.parametrize("columns", [3, 8, 16, 17, 40, 4096])
@pytest.mark.parametrize("groups", [1, 3])
def test_weights_are_packed_alike_for_all_processors(family: str, storage: Storage, columns: int, groups: int) -> None:
    shipped = load_descriptor("intel-cpu")
    workload = Workload(family, "buffer", 64, 576, columns, groups, storage)
    tiles = [plain_tile(shipped.for_instruction_set(name), family).cut(workload) for name in INSTRUCTION_SETS]
    assert len({tile.panel for tile in tiles}) == 1
    assert all(tile.columns % tile.panel == 0 and tile.vector <= tile.panel for tile in tiles)
    if groups > 1 or family == "deform_conv":
        assert all(tile.columns == tile.panel for tile in tiles), "kernels that read one panel"


@pytest.mark.parametrize("name", ["pocl", "intel-cpu"])
def test_a_descriptor_for_another_instruction_set_has_its_tile_and_rates(name: str) -> None:
    shipped = load_descriptor(name)
    narrow = shipped.for_instruction_set("avx2")
    assert (narrow.tile.rows, narrow.tile.columns, narrow.tile.vector) == (6, 16, 16)
    assert narrow.rates.gemm_flops == shipped.rates.gemm_flops / 2
    assert narrow.rates.memory_bandwidth == shipped.rates.memory_bandwidth
    assert narrow.instruction_set == "avx2" and narrow.tuned == "", "measured for other registers"
    assert shipped.for_instruction_set("avx512") is shipped
    assert narrow.for_instruction_set("avx2") is narrow
    assert DeviceDescriptor.from_dict(narrow.to_dict()) == narrow


def test_a_gpu_states_no_instruction_set() -> None:
    gpu = load_descriptor("nvidia")
    assert gpu.for_instruction_set("avx2") is gpu


def test_an_unknown_instruction_set_is_refused() -> None:
    data = load_descriptor("generic-cpu").to_dict()
    with pytest.raises(UserError, match="here: unknown instruction set 'mmx'; name one of: sse, avx"):
        DeviceDescriptor.from_dict({**data, "instruction_set": "mmx"}, where="here")
