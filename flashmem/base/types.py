"""Types and constants that all packages share: memory paths, transfer modes, element types, alignments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

MemoryPath = Literal["buffer", "texture"]


TransferMode = str
"""How weights get into the memory that kernels read, by a name in `schedule.modes.MODES`."""

Channel = Literal["float", "half", "uint8", "uint16"]
"""The type of a texel's four components. Signed integers are stored bit for bit in unsigned components."""


TEXEL_BYTES: dict[Channel, int] = {"float": 16, "half": 8, "uint8": 4, "uint16": 8}


OperatorClass = Literal["elemental", "reusable", "hierarchical"]


Optimize = Literal["cold", "steady"]
"""Whether kernels are chosen for the first answer, including their build and load times, or for later answers."""


Quantize = Literal["int4", "int8"]
"""The integers that the weights of matrices become; other weights become int8."""


States = Mapping[str, str] | Literal["auto"]
"""The output that becomes each input of the next run, by the input's name; "auto": pairs that are named past and present."""


Precision = Literal["fp32", "fp16", "tf32"]
"""The stored type of weights and activations. "tf32": float32, of which tensor cores round the operands of products."""


StatePrecision = Literal["fp32", "fp16", "int8"]
"""The stored type of states. "int8": caches of keys and values in 8 bits with a scale for each row; other states in half."""


TableType = Literal["float32", "float16", "bfloat16", "int8", "uint8", "int4", "uint4"]
"""The element type of a host embedding table. Two 4-bit elements share a byte, low nibble first."""


DType = Literal["bool", "float32", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
"""Element types on the device, by numpy's names. A model's float16, bfloat16 and float64 are computed as float32."""


StoredType = Literal["bool", "float16", "float32", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
"""Element types in device memory. With `--precision fp16` a float32 is stored as float16."""


ITEMSIZE: dict[StoredType, int] = {
    "bool": 1, "float16": 2, "float32": 4, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint8": 1, "uint16": 2, "uint32": 4,
    "uint64": 8,
}  # fmt: skip
"""Bytes of one element in device memory."""


TENSOR_ALIGNMENT = 512
"""Alignment of offsets in the arena and the constants, in bytes: enough for sub-buffers on every known device
(CL_DEVICE_MEM_BASE_ADDR_ALIGN; NVIDIA: 4096 bits).
"""


SLACK = 128
"""Bytes of padding after each tensor and constant, which a vector load at the last element may read."""


POOL_ALIGNMENT = 4096
"""Alignment of slices in pools and in staging, in bytes: enough for sub-buffers and buffer-backed textures on every device."""


DEFAULT_PAGE = 4096
"""Page size in bytes that weight files are laid out for unless a descriptor has another (`Program.page_bytes`)."""
