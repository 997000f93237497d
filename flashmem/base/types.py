"""Types and constants that everyone names: memory paths, transfer modes, element types, alignments."""

from __future__ import annotations

from typing import Literal

MemoryPath = Literal["buffer", "texture"]


TransferMode = Literal["map", "alias", "dma", "interleave"]
"""How weights reach the memory that kernels read (docs/streaming.md)."""

TRANSFER_MODES: tuple[TransferMode, ...] = ("map", "alias", "dma", "interleave")

Channel = Literal["float", "half", "uint8", "uint16"]
"""What one of the four numbers of a texel is. Signed integers lie in unsigned channels, bit for bit."""


TEXEL_BYTES: dict[Channel, int] = {"float": 16, "half": 8, "uint8": 4, "uint16": 8}


OperatorClass = Literal["elemental", "reusable", "hierarchical"]


Optimize = Literal["cold", "steady"]
"""Whether kernels are chosen for the first answer, building and loading included, or for later ones."""


TableType = Literal["float32", "float16", "int8", "uint8", "int4", "uint4"]
"""What the elements of a table are that the host picks rows from. Two of 4 bits share a byte, low nibble first."""


DType = Literal["bool", "float32", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
"""Element types on the device, by numpy's names. float16, bfloat16 and float64 of a model are computed as float32 there."""


StoredType = Literal["bool", "float16", "float32", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
"""What an element is in memory: its type, or float16 for a float32 that `--precision fp16` rounds when it is stored."""


ITEMSIZE: dict[StoredType, int] = {
    "bool": 1, "float16": 2, "float32": 4, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint8": 1, "uint16": 2, "uint32": 4,
    "uint64": 8,
}  # fmt: skip
"""Bytes of one element in the device's memory."""


TENSOR_ALIGNMENT = 512
"""Arena and constant offsets: sub-buffer alignment of every known device (CL_DEVICE_MEM_BASE_ADDR_ALIGN; NVIDIA: 4096 bits)."""


SLACK = 128
"""Bytes after each tensor and constant: a vector load at the last element may run this far."""


POOL_ALIGNMENT = 4096
"""Where slices start in pools and in staging: suits sub-buffers and textures over buffers of every known device."""


DEFAULT_PAGE = 4096
"""Bytes of the pages that a weight file is laid out for where a descriptor does not say otherwise (`Program.page_bytes`)."""
