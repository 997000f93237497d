"""Properties reported by drivers of phones and of one GPU with its own memory, from published dumps.

`assumed` lists the properties for which no dump of the family was found.

A smaller figure is the stricter one: if dumps of a family differ, the smallest is used. Extensions are those that the strict
device can emulate on PoCL. A phone has more (cl_khr_fp16, subgroups, command buffers, cl_qcom_large_buffer), but a program that
runs here does not need them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MIB = 1 << 20

_CORE = (
    "cl_khr_byte_addressable_store",
    "cl_khr_global_int32_base_atomics",
    "cl_khr_global_int32_extended_atomics",
    "cl_khr_icd",
    "cl_khr_local_int32_base_atomics",
    "cl_khr_local_int32_extended_atomics",
)
_VIEWS = "cl_khr_image2d_from_buffer"
_RECORDING = "cl_qcom_recordable_queues"
_DOTS = "cl_khr_integer_dot_product"
_ARM_DOTS = ("cl_arm_integer_dot_product_int8", "cl_arm_integer_dot_product_accumulate_int8")
_IMPORTS = ("cl_arm_import_memory", "cl_arm_import_memory_host")


@dataclass(frozen=True)
class Profile:
    """Limits of a device: bytes, texels of an image, pixels of alignments (`image_pitch`, `image_base`)."""

    name: str
    platform: str
    device: str
    vendor: str
    version: str
    driver: str
    sources: tuple[str, ...]
    assumed: str
    max_alloc: int
    global_memory: int
    base_align: int  # of a sub-buffer's origin
    image_width: int
    image_height: int
    image_pitch: int
    image_base: int
    compute_units: int
    max_group: int
    max_group_sizes: tuple[int, int, int]
    local_memory: int = 32 << 10
    max_parameters: int = 1024
    read_images: int = 128
    write_images: int = 64
    samplers: int = 16
    constant_arguments: int = 8
    constant_bytes: int = 64 << 10
    unified_memory: bool = True
    fuses: bool = True  # multiply-adds of floats: dumps of Adreno's drivers report none
    fast_dot_products: tuple[int, ...] = (0,) * 6  # of packed words: signed, unsigned, mixed, the same that saturate
    recordable: int = 0  # CL_DEVICE_RECORDABLE_QUEUE_MAX_SIZE
    fine_grained: bool = True  # shared virtual memory buffers that need no maps
    extensions: frozenset[str] = field(default_factory=lambda: frozenset((*_CORE, _VIEWS)))
    kernel_groups: tuple[tuple[int, int], ...] = ()  # largest group of a kernel with up to so many registers, ascending
    compiles_kernels_apart: bool = False  # clCreateKernel compiles; a binary has only the kernels that were created before

    def group_of(self, registers: int) -> int:
        """CL_KERNEL_WORK_GROUP_SIZE of a kernel with so many registers; with more than all listed ones, it spills."""
        fits = (group for most, group in self.kernel_groups if registers <= most)
        return min(self.max_group, next(fits, self.kernel_groups[-1][1] if self.kernel_groups else self.max_group))


_SNAPDRAGON = "QUALCOMM Snapdragon(TM)"
_ADRENO_OLD = "https://github.com/BOINC/boinc/issues/3613"
_ADRENO_6 = "https://github.com/ggml-org/whisper.cpp/issues/3935"
_ADRENO_650 = "https://github.com/xmrig/xmrig/issues/2383"
_ADRENO_7 = "https://github.com/Oblomov/clinfo/issues/92"
_ADRENO_740 = "https://github.com/CodeLinaro/llama.cpp/pull/17"
_ADRENO_IMAGES = "https://github.com/ggml-org/llama.cpp/issues/11953"
_ADRENO_8 = "https://github.com/ggml-org/llama.cpp/pull/14535"
_ADRENO_NEW = "https://github.com/ggml-org/whisper.cpp/issues/3708"
_PIXEL_7 = "https://github.com/ggml-org/llama.cpp/issues/2636"
_PIXEL_7_CORES = "https://github.com/GPGPUCourse/GPGPUTasks2025/pull/60"
_MALI_610 = "https://github.com/darktable-org/darktable/issues/15067"
_NVIDIA = "https://github.com/leela-zero/leela-zero/issues/1554"
_NVIDIA_ARGUMENTS = "https://github.com/BVLC/caffe/issues/5406"
_NVIDIA_CONSTANTS = "https://github.com/apache/tvm/issues/3492"
_NVIDIA_DRIVER = "https://github.com/10gic/vanitygen-plusplus/issues/100"
_MALI_52 = "https://github.com/ARM-software/ComputeLibrary/issues/999"
_MALI_IMPORTS = "https://github.com/hominoids/sgminer-arm/issues/12"
_MALI_BINARY = "https://github.com/viennacl/viennacl-dev/pull/225"
_MALI_REGISTERS = "http://infocenter.arm.com/help/topic/com.arm.doc.101574_0302_00_en/nic1465568963198.html"
_ADRENO_REGISTERS = "https://github.com/ysh329/OpenCL-101/issues/33"
_ADRENO_GROUPS = "https://github.com/tensorflow/tensorflow/issues/61373"

_ADRENO_KERNELS = ((48, 1024), (96, 512), (192, 256))
_OF_KERNELS = (
    f"groups of kernels: a compute unit has 128 x 96 registers of four floats, {_ADRENO_REGISTERS}, a work-item at most 48; "
    f"an Adreno 610 refuses groups above 256 of some kernels, {_ADRENO_GROUPS}"
)

PROFILES = (
    Profile(
        name="adreno6xx",
        platform=_SNAPDRAGON,
        device="QUALCOMM Adreno(TM)",
        vendor="QUALCOMM",
        fuses=False,
        version="OpenCL 2.0 Adreno(TM) 650",
        driver="OpenCL 2.0 QUALCOMM Compiler E031.37.12.01",
        sources=(
            f"version, driver, compute units: clinfo of an Adreno 650, {_ADRENO_650}",
            f"allocations, global memory, base address, images, work-group, fine-grained SVM: an Adreno 643, {_ADRENO_6}",
            f"image alignments, arguments, local and constant memory: clinfo of an Adreno under OpenCL 2.0, {_ADRENO_OLD}",
            _OF_KERNELS,
        ),
        assumed="the Adreno of the third source is not named there; 128 bytes of base address are newer than the 650's driver",
        max_alloc=910 * MIB,
        global_memory=3642 * MIB,
        base_align=128,
        image_width=16384,
        image_height=16384,
        image_pitch=64,
        image_base=64,
        compute_units=3,
        max_group=1024,
        max_group_sizes=(1024, 1024, 1024),
        kernel_groups=_ADRENO_KERNELS,
    ),
    Profile(
        name="adreno7xx",
        platform=_SNAPDRAGON,
        device="QUALCOMM Adreno(TM) 750",
        vendor="QUALCOMM",
        fuses=False,
        version="OpenCL 3.0 Adreno(TM) 750",
        driver="OpenCL 3.0 QUALCOMM build: commit unknown Compiler E031.45.02.06",
        sources=(
            f"version, driver, largest allocation, memory, fine-grained SVM: clinfo of an Adreno 750, {_ADRENO_7}",
            f"cl_khr_image2d_from_buffer, cl_qcom_recordable_queues: clinfo of an Adreno 740, {_ADRENO_740}",
            f"cl_khr_integer_dot_product: clinfo of an Adreno 740 and of a 750, {_ADRENO_740}, {_ADRENO_7}",
            f"images, their alignments and arguments, local memory: clinfo of an Adreno under OpenCL 3.0, {_ADRENO_IMAGES}",
            _OF_KERNELS,
        ),
        assumed="compute units; work-group, base address, parameters and constant memory as of the 6xx; 32 recorded launches; "
        "fast dot products of unsigned and of mixed signs, as Mesa's compiler for it has them",
        max_alloc=1024 * MIB,
        global_memory=5814714368,
        base_align=128,
        image_width=16384,
        image_height=16384,
        image_pitch=64,
        image_base=64,
        compute_units=6,
        max_group=1024,
        max_group_sizes=(1024, 1024, 1024),
        kernel_groups=_ADRENO_KERNELS,
        recordable=32,
        extensions=frozenset((*_CORE, _VIEWS, _RECORDING, _DOTS)),
        fast_dot_products=(0, 1, 1, 0, 1, 1),
    ),
    Profile(
        name="adreno8xx",
        platform=_SNAPDRAGON,
        device="QUALCOMM Adreno(TM) 830",
        vendor="QUALCOMM",
        fuses=False,
        version="OpenCL 3.0 Adreno(TM) 830",
        driver="OpenCL 3.0 QUALCOMM build: commit unknown Compiler E031.47.18.23",
        sources=(
            f"version, driver, base address, largest allocation, fine-grained SVM: an Adreno 830, {_ADRENO_8}",
            f"image alignments, size of images: clinfo of an Adreno under a newer driver, {_ADRENO_NEW}",
            _OF_KERNELS,
        ),
        assumed="global memory; compute units; work-group, arguments, local and constant memory as of the 6xx",
        max_alloc=1024 * MIB,
        global_memory=5814714368,
        base_align=128,
        image_width=16384,
        image_height=16384,
        image_pitch=64,
        image_base=64,
        compute_units=12,
        max_group=1024,
        max_group_sizes=(1024, 1024, 1024),
        kernel_groups=_ADRENO_KERNELS,
    ),
    Profile(
        name="mali-valhall",
        platform="ARM Platform",
        device="Mali-G710 r0p0",
        vendor="ARM",
        version="OpenCL 3.0 v1.r51p0-00eac0.5491dbbe6a8ad90707c5bca9eec07875",
        driver="3.0",
        sources=(
            f"base address, images, their alignments, arguments, no fine-grained SVM: clinfo of a Pixel 7, {_PIXEL_7}",
            f"version, compute units, global and local memory: a Pixel 7, {_PIXEL_7_CORES}",
            f"parameters, images, their alignments: clinfo of a Mali-G610, {_MALI_610}",
            f"work-group: the smallest that clinfo of a Mali was found to say, of a Mali-G52, {_MALI_52}",
            f"cl_arm_import_memory_host, cl_arm_integer_dot_product_*: clinfo of a Mali-G610, {_MALI_IMPORTS}",
            f"registers: 64 of a work-item, {_MALI_REGISTERS}",
            f"kernels are compiled by clCreateKernel: measured on a Mali-T628, {_MALI_BINARY}",
        ),
        assumed="a largest allocation of 1 GiB: a Mali-G610 reports all of its memory; constant memory as of older Malis; "
        "half the threads for kernels above 32 registers, as Mesa's compiler for Valhall has it",
        max_alloc=1024 * MIB,
        global_memory=1862 * MIB,
        base_align=128,
        image_width=65536,
        image_height=65536,
        image_pitch=64,
        image_base=32,
        compute_units=7,
        max_group=384,
        max_group_sizes=(384, 384, 384),
        kernel_groups=((32, 384), (64, 192)),
        compiles_kernels_apart=True,
        extensions=frozenset((*_CORE, _VIEWS, *_IMPORTS, *_ARM_DOTS)),
        fine_grained=False,
    ),
    Profile(
        name="nvidia",
        platform="NVIDIA CUDA",
        device="Tesla T4",
        vendor="NVIDIA Corporation",
        version="OpenCL 3.0 CUDA",
        driver="535.161.08",
        sources=(
            f"version, driver, compute units, work-group: clinfo of a Tesla T4, {_NVIDIA_DRIVER}",
            f"memory of its own, base address, largest allocation, width of images: clinfo of a Tesla P100, {_NVIDIA}",
            f"height and number of images, parameters: clinfo of an older card, {_NVIDIA_ARGUMENTS}",
            f"constant arguments: clinfo of a card under OpenCL 1.2, {_NVIDIA_CONSTANTS}",
        ),
        assumed="48 KiB of local memory, 64 KiB of a constant argument",
        max_alloc=4267933696,
        global_memory=17071734784,
        base_align=512,
        image_width=16384,
        image_height=16384,
        image_pitch=0,
        image_base=0,
        compute_units=40,
        max_group=1024,
        max_group_sizes=(1024, 1024, 64),
        local_memory=48 << 10,
        max_parameters=4352,
        read_images=256,
        write_images=16,
        samplers=32,
        constant_arguments=9,
        unified_memory=False,
        fine_grained=False,
        extensions=frozenset(_CORE),
    ),
)
