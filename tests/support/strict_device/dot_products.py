"""Built-in functions of extensions for dot products of bytes, imitated in OpenCL C for the device below.

Khronos: OpenCL C specification, "Integer dot product" (cl_khr_integer_dot_product, version 2). Arm: Khronos' registry,
extensions/arm/cl_arm_integer_dot_product.txt.
"""

from __future__ import annotations

from collections.abc import Collection

KHRONOS = "cl_khr_integer_dot_product"
ARM = "cl_arm_integer_dot_product_int8"
ARM_ACCUMULATED = "cl_arm_integer_dot_product_accumulate_int8"

BUILT_INS = {r"\bdot_(?:4x8packed|acc_sat)\w*": KHRONOS, r"\barm_dot\b": ARM, r"\barm_dot_acc\b": ARM_ACCUMULATED}
"""Patterns of the names, and the extension that defines each."""

_IMITATED = {
    KHRONOS: """
#define cl_khr_integer_dot_product 1
static inline int strict_dot_ss(uint a, uint b)
{
    const char4 x = as_char4(a), y = as_char4(b);
    return (int)x.s0 * y.s0 + (int)x.s1 * y.s1 + (int)x.s2 * y.s2 + (int)x.s3 * y.s3;
}
#define dot_4x8packed_ss_int(a, b) strict_dot_ss(a, b)
static inline int strict_dot_us(uint a, uint b)
{
    const uchar4 x = as_uchar4(a);
    const char4 y = as_char4(b);
    return (int)x.s0 * y.s0 + (int)x.s1 * y.s1 + (int)x.s2 * y.s2 + (int)x.s3 * y.s3;
}
#define dot_4x8packed_us_int(a, b) strict_dot_us(a, b)
""",
    ARM: """
#define cl_arm_integer_dot_product_int8 1
static inline int strict_arm_dot(char4 x, char4 y)
{
    return (int)x.s0 * y.s0 + (int)x.s1 * y.s1 + (int)x.s2 * y.s2 + (int)x.s3 * y.s3;
}
#define arm_dot(a, b) strict_arm_dot(a, b)
""",
    ARM_ACCUMULATED: """
#define cl_arm_integer_dot_product_accumulate_int8 1
static inline int strict_arm_dot_acc(char4 x, char4 y, int c)
{
    return c + (int)x.s0 * y.s0 + (int)x.s1 * y.s1 + (int)x.s2 * y.s2 + (int)x.s3 * y.s3;
}
#define arm_dot_acc(a, b, c) strict_arm_dot_acc(a, b, c)
""",
}


def imitated(extensions: Collection[str]) -> str:
    """OpenCL C that defines the functions of those of `extensions` that are known here."""
    return "".join(text for name, text in _IMITATED.items() if name in extensions)
