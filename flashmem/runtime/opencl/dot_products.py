"""Instructions for dot products of bytes, which OpenCL C 1.2 has no names for: those of a device, and their code.

Kernels multiply words of four bytes by macros (`FM_DOT4`, `FM_DOT16` in kernels/templates/common/prelude.cl.j2). These compute
the same in plain OpenCL C where a device has no instruction. A bundle may be a stranger's, so its kernels contain no assembly;
this trusted text precedes them.

- x86: `vpdpbusd` (AVX-512 VNNI), unsigned times signed bytes. Without it `vpmaddwd`, pairs of 16 bits, which is exact for
  all bytes; `vpmaddubsw` is not, because it saturates. PoCL's compiler accepts assembly. Intel's accepts none with vector
  registers, but calls of LLVM's intrinsics by name, as AMD's device libraries make them. LLVM 22 changed the types of
  `vpdpbusd`, and a wrong type ends the process. So it is used with the versions that were tried. Others use `vpmaddwd`, whose
  types never changed.
- NVIDIA: `dp4a` in PTX (compute capability 7).
- Phones: `cl_khr_integer_dot_product` where the driver says that unsigned times signed bytes are accelerated, or signed ones:
  Adreno's instruction is the former, Mali's the latter. Else Arm's `cl_arm_integer_dot_product_accumulate_int8` or
  `cl_arm_integer_dot_product_int8`. Qualcomm's `cl_qcom_dot_product8` has no
  public text, and public programs contradict each other about its signs (docs/research/phone-compilers.md).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from flashmem.program.kernel_text import uses_dot_products
from flashmem.runtime.opencl.cpuinfo import processors

KHRONOS = "cl_khr_integer_dot_product"
KHRONOS_MIXED = f"{KHRONOS}, mixed"
ARM_ACCUMULATED = "cl_arm_integer_dot_product_accumulate_int8"
ARM = "cl_arm_integer_dot_product_int8"
_TRIED_INTEL = ("2026.",)
"""Versions of Intel's runtime in which `vpdpbusd` has the types that are declared here."""

_BY_WORD = """#define FM_HAS_DOT
static inline int fm_dot(uint x, int b, int c)
{
    %s
}
"""
_OF_16 = "#define FM_DOT_UNSIGNED\n#define FM_HAS_DOT16\n"
_VNNI = """static inline int16 fm_dot16(uint x, int16 b, int16 c)
{
    const uint16 words = (uint16)(x);
    %s
}
"""
_PAIRS_512 = """typedef short fm_short32 __attribute__((ext_vector_type(32)));
%s
static inline int16 fm_dot16(uint x, int16 b, int16 c)
{
    const uint16 even = (uint16)(x & 0xff00ffu), odd = (uint16)(x >> 8 & 0xff00ffu);
    const fm_short32 all = *(const fm_short32*)&b;
    c += fm_pairs(*(const fm_short32*)&even, all << (short)8 >> (short)8);
    return c + fm_pairs(*(const fm_short32*)&odd, all >> (short)8);
}
"""
_PAIRS_256 = """%s
static inline int8 fm_dot8(uint x, int8 b, int8 c)
{
    const ushort16 all = as_ushort16((uint8)(x));
    c += fm_pairs(as_short16(all & (ushort)255), as_short16(b) << (short)8 >> (short)8);
    return c + fm_pairs(as_short16(all >> (ushort)8), as_short16(b) >> (short)8);
}
static inline int16 fm_dot16(uint x, int16 b, int16 c)
{
    return (int16)(fm_dot8(x, b.lo, c.lo), fm_dot8(x, b.hi, c.hi));
}
"""
_PAIRS_ASSEMBLY = """static inline {ints} fm_pairs({shorts} x, {shorts} b)
{{
    {ints} r;
    __asm__("vpmaddwd %2, %1, %0" : "=v"(r) : "v"(x), "v"(b));
    return r;
}}"""
_FUNCTIONS = {
    "vpdpbusd": _OF_16 + _VNNI % '__asm__("vpdpbusd %2, %1, %0" : "+v"(c) : "v"(words), "v"(b));\n    return c;',
    "vpdpbusd by LLVM": (
        f"{_OF_16}typedef char fm_char64 __attribute__((ext_vector_type(64)));\n"
        'int16 fm_vpdpbusd(int16 c, fm_char64 x, fm_char64 b) __asm("llvm.x86.avx512.vpdpbusd.512");\n'
        + _VNNI % "return fm_vpdpbusd(c, *(const fm_char64*)&words, *(const fm_char64*)&b);"
    ),
    "vpmaddwd 512": _OF_16 + _PAIRS_512 % _PAIRS_ASSEMBLY.format(ints="int16", shorts="fm_short32"),
    "vpmaddwd 512 by LLVM": (
        _OF_16 + _PAIRS_512 % 'int16 fm_pairs(fm_short32 x, fm_short32 b) __asm("llvm.x86.avx512.pmaddw.d.512");'
    ),
    "vpmaddwd 256": _OF_16 + _PAIRS_256 % _PAIRS_ASSEMBLY.format(ints="int8", shorts="short16"),
    "vpmaddwd 256 by LLVM": _OF_16 + _PAIRS_256 % 'int8 fm_pairs(short16 x, short16 b) __asm("llvm.x86.avx2.pmadd.wd");',
    "dp4a": _BY_WORD % 'asm("dp4a.s32.s32 %0, %1, %2, %0;" : "+r"(c) : "r"(x), "r"(b));\n    return c;',
    KHRONOS: f"#pragma OPENCL EXTENSION {KHRONOS} : enable\n" + _BY_WORD % "return c + dot_4x8packed_ss_int(x, as_uint(b));",
    KHRONOS_MIXED: (
        f"#pragma OPENCL EXTENSION {KHRONOS} : enable\n#define FM_DOT_UNSIGNED\n"
        + _BY_WORD % "return c + dot_4x8packed_us_int(x, as_uint(b));"
    ),
    ARM_ACCUMULATED: (
        f"#pragma OPENCL EXTENSION {ARM_ACCUMULATED} : enable\n"
        + _BY_WORD % "return arm_dot_acc(as_char4(x), as_char4(b), c);"
    ),
    ARM: f"#pragma OPENCL EXTENSION {ARM} : enable\n" + _BY_WORD % "return c + arm_dot(as_char4(x), as_char4(b));",
}  # fmt: skip
"""OpenCL C of the functions, by `Device.dots`. Bytes of `b` are signed; those of `x` too, but with FM_DOT_UNSIGNED."""

DOT_PRODUCTS = tuple(_FUNCTIONS)
"""The names of the instructions."""


def cpu_dots(platform_name: str, driver_version: str, instruction_set: str) -> str:
    """The instruction of `DOT_PRODUCTS` for a CPU's driver that compiles for `instruction_set`; "" if it has none."""
    platform_name = platform_name.lower()
    by_llvm = " by LLVM" if "intel" in platform_name else ""
    if not by_llvm and "portable computing language" not in platform_name:
        return ""
    vnni = all("avx512_vnni" in each["flags"].split() for each in processors() if "flags" in each)
    if instruction_set == "avx512" and vnni and (not by_llvm or driver_version.startswith(_TRIED_INTEL)):
        return f"vpdpbusd{by_llvm}"
    widths = {"avx512": "512", "avx2": "256"}
    return f"vpmaddwd {widths[instruction_set]}{by_llvm}" if instruction_set in widths else ""


def gpu_dots(extensions: Collection[str], accelerated: Sequence[int] = ()) -> str:
    """The instruction of `DOT_PRODUCTS` by a GPU's `extensions`; "" if it has none.

    `accelerated`: which dot products of packed words the driver accelerates: of signed bytes, of unsigned ones, of both, ...
    (cl_device_integer_dot_product_acceleration_properties_khr); empty without `KHRONOS`.
    """
    if KHRONOS in extensions and any(accelerated):
        signed, _, mixed, *_ = accelerated
        if mixed or signed:
            return KHRONOS_MIXED if mixed else KHRONOS
    return next((name for name in (ARM_ACCUMULATED, ARM) if name in extensions), "")


def with_dot_products(text: str, dots: str) -> str:
    """The kernels of `text` after the functions of a device's instruction `dots`, if they use them; "": it has none."""
    return _FUNCTIONS[dots] + text if dots and uses_dot_products(text) else text
