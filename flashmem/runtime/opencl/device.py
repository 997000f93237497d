"""An OpenCL device as data, and which of the shipped descriptors fits it. `discovery.py` asks the drivers."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from flashmem.runtime.opencl.dot_products import with_dot_products
from flashmem.runtime.opencl.handles import DeviceHandle
from flashmem.runtime.opencl.masked_reads import with_masked_reads
from flashmem.runtime.opencl.tensor_cores import with_tensor_cores
from flashmem.target.descriptor import SHUFFLES, descriptor_names

IMAGE_FROM_BUFFER = "cl_khr_image2d_from_buffer"
HALF_ARITHMETIC = "cl_khr_fp16"
NVIDIA_ATTRIBUTES = "cl_nv_device_attribute_query"
GENERIC_GPU = "generic-gpu"


@dataclass(frozen=True)
class Device:
    """An OpenCL device as reported by its driver. Sizes in bytes, image limits in texels."""

    platform: str
    platform_version: str
    name: str
    vendor: str
    version: str
    driver_version: str
    kind: Literal["cpu", "gpu", "other"]
    extensions: frozenset[str]
    has_images: bool
    image_max_width: int
    image_max_height: int
    image_pitch_alignment: int  # 0: no image2d from buffer
    image_base_alignment: int  # of the first texel of such an image
    base_address_alignment: int  # of a sub-buffer
    max_alloc_bytes: int
    global_memory_bytes: int
    unified_memory: bool
    compute_units: int
    handle: DeviceHandle = field(repr=False, compare=False)
    local_memory_bytes: int = 0  # of a work-group; 0: unknown
    max_group_items: int = 0  # of a work-group; 0: unknown
    mma: bool = False  # products of matrices of halves by a subgroup: NVIDIA's tensor cores, compute capability 8.0
    dots: str = ""  # instruction for dot products of bytes (`flashmem.runtime.opencl.dot_products`); "": none is used
    fuses: bool = True  # multiply-adds of floats in hardware, by CL_FP_FMA of its driver
    target: str = ""  # compile target of its driver (`flashmem.runtime.opencl.compile_target`)
    instruction_set: str = ""  # of a CPU's kernels (`flashmem.runtime.opencl.instruction_set`)
    variables: Mapping[str, str] = field(default_factory=dict, compare=False)  # of the driver, at its start
    by_address: bool = False  # whether buffers are shared virtual memory (`flashmem.runtime.opencl.shared_memory`)
    coherent: bool = False  # whether host and kernels see each other's writes without maps: fine-grained shared virtual memory

    @property
    def key(self) -> str:
        """All properties that may change a compiled program."""
        names = (self.platform, self.platform_version, self.vendor, self.name, self.version, self.driver_version)
        return "\n".join((*names, self.target))

    @property
    def driver(self) -> str:
        """The device and its driver's version: results of probes are valid for these (`DeviceDescriptor.probed`)."""
        return ", ".join((self.name, self.version, self.driver_version))

    @property
    def survives_fork(self) -> bool:
        """Whether a forked child can use the device after the parent started the driver (docs/research/opencl-notes.md)."""
        return self.kind == "cpu" and "intel" in self.platform.lower()

    @property
    def compiles_at_launch(self) -> bool:
        """Whether the driver compiles a kernel at its first launch, and for other sizes (docs/research/opencl-notes.md)."""
        return "portable computing language" in self.platform.lower()

    @property
    def reads_unasked(self) -> bool:
        """Whether kernels read where no work-item asks (`flashmem.runtime.opencl.masked_reads`)."""
        return self.name.lower().startswith("llvmpipe")

    @property
    def shuffles(self) -> bool:
        """Whether kernels can use subgroup shuffles: an extension in OpenCL C 3.0, which has subgroup functions."""
        version = re.match(r"OpenCL (\d+)", self.version)
        return version is not None and int(version[1]) >= 3 and not self.extensions.isdisjoint(SHUFFLES)

    @property
    def descriptor_name(self) -> str:
        """The name of the shipped descriptor that fits best."""
        return fitting_descriptor(self.kind, self.platform, self.name, self.version, descriptor_names())

    def with_instructions(self, text: str) -> str:
        """The text for the compiler: the kernels of `text`, after functions for instructions of the device that they use."""
        text = with_masked_reads(text) if self.reads_unasked else text
        return with_dot_products(with_tensor_cores(text, mma=self.mma), self.dots)

    @property
    def uses_host_memory(self) -> bool:
        """Whether kernels use any host memory in place."""
        return self.kind == "cpu"

    @property
    def has_image_from_buffer(self) -> bool:
        """Whether a texture can be a view over a buffer."""
        return self.has_images and self.image_pitch_alignment > 0


def fitting_descriptor(kind: str, platform: str, name: str, version: str, shipped: Collection[str]) -> str:
    """The name of the descriptor among `shipped` for a driver's names of its platform, its device and the device's version.

    A phone's GPU is recognised by its model. Adreno drivers report the number in the version ("OpenCL 3.0 Adreno(TM) 740"),
    some also in the name ("QUALCOMM Adreno(TM) 750"). Arm's report "Mali-G710 r0p0" or "Mali-G715-Immortalis MC11 r1p2"; the
    number of cores of a Mali is ignored. A model without its own descriptor gets the generic one.
    """
    platform = platform.lower()
    if kind != "gpu":
        if "portable computing language" in platform:
            return "pocl"
        return "intel-cpu" if "intel" in platform else "generic-cpu"
    if "nvidia" in platform:
        return "nvidia"
    model = _GPU_MODEL.search(f"{name} {version}".lower())
    own = f"adreno{model['adreno']}" if model and model["adreno"] else f"mali-{model['mali']}" if model else ""
    return own if own in shipped else GENERIC_GPU


_GPU_MODEL = re.compile(r"\badreno ?\(tm\) ?(?P<adreno>\d+)\b|\bmali-(?P<mali>g\d+)\b")
