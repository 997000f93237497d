"""Instructions of NVIDIA's tensor cores, which OpenCL C has no names for, in PTX (PTX ISA, compute capability 8.0).

A bundle may be a stranger's, so its kernels contain no assembly (`flashmem.bundle.kernel_source`). They call functions by name
where `FM_TENSOR_CORES` is defined (kernels/templates/contraction/tensor.cl.j2), and this trusted text has the functions.
"""

from __future__ import annotations

from flashmem.program.kernel_text import uses_tensor_cores

_FUNCTIONS = r"""
#define FM_TENSOR_CORES
static inline void fm_copy(uint place, __global const void* source, int bytes)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" :: "r"(place), "l"(source), "r"(bytes) : "memory");
}
static inline void fm_commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}
static inline void fm_wait(int groups)
{
    if (groups == 0) asm volatile("cp.async.wait_group 0;" ::: "memory");
    else if (groups == 1) asm volatile("cp.async.wait_group 1;" ::: "memory");
    else if (groups == 2) asm volatile("cp.async.wait_group 2;" ::: "memory");
    else asm volatile("cp.async.wait_group 3;" ::: "memory");
}
static inline uint4 fm_fragment(uint place)
{
    uint4 r;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "r"(place) : "memory");
    return r;
}
static inline uint4 fm_fragment_by_columns(uint place)
{
    uint4 r;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "r"(place) : "memory");
    return r;
}
static inline float4 fm_mma(uint4 a, uint2 b, float4 c)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c.x), "+f"(c.y), "+f"(c.z), "+f"(c.w) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
    return c;
}
static inline uint4 fm_tf32(uint4 v)
{
    uint4 r;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r.x) : "f"(as_float(v.x)));
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r.y) : "f"(as_float(v.y)));
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r.z) : "f"(as_float(v.z)));
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r.w) : "f"(as_float(v.w)));
    return r;
}
static inline float4 fm_mma_tf32(uint4 a, uint2 b, float4 c)
{
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c.x), "+f"(c.y), "+f"(c.z), "+f"(c.w) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
    return c;
}
static inline float4 fm_mma_bf16(uint4 a, uint2 b, float4 c)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c.x), "+f"(c.y), "+f"(c.z), "+f"(c.w) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
    return c;
}
static inline uint fm_sum_bf16(uint a, uint b)
{
    uint r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(0x3f803f80), "r"(b));
    return r;
}
static inline uint fm_two_bytes(uint a, uint b, uint byte)
{
    uint r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(byte | byte + 4 << 8));
    return r;
}
static inline float4 fm_neighbours(float4 c, int odd)
{
    const float2 given = odd ? c.xy : c.zw;
    float2 other;
    asm volatile("shfl.sync.bfly.b32 %0, %1, 1, 31, -1;" : "=f"(other.x) : "f"(given.x));
    asm volatile("shfl.sync.bfly.b32 %0, %1, 1, 31, -1;" : "=f"(other.y) : "f"(given.y));
    return odd ? (float4)(other, c.zw) : (float4)(c.xy, other);
}
static inline uint fm_two_halves(float2 v)
{
    uint r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(v.y), "f"(v.x));
    return r;
}
static inline float fm_exp2(float x)
{
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
static inline float2 fm_shuffled(float2 v, int distance)
{
    float2 r;
    asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 31, -1;" : "=f"(r.x) : "f"(v.x), "r"(distance));
    asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 31, -1;" : "=f"(r.y) : "f"(v.y), "r"(distance));
    return r;
}
static inline float2 fm_largest_of_four(float2 v)
{
    v = fmax(v, fm_shuffled(v, 1));
    return fmax(v, fm_shuffled(v, 2));
}
static inline float2 fm_sum_of_four(float2 v)
{
    v += fm_shuffled(v, 1);
    return v + fm_shuffled(v, 2);
}
static inline void fm_put_halves(float4 v, __global half* place)
{
    uint2 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r.x) : "f"(v.y), "f"(v.x));
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r.y) : "f"(v.w), "f"(v.z));
    *(__global uint2*)place = r;
}
"""
"""Copies of 16 bytes to a byte of local memory, of which the rest after `bytes` is zero, in groups; a wait until all but the
last `groups` have ended, at most 3. 16 x 16 halves (or 16 x 8 floats) of the left operand, 16 x 16 halves of the right one, and
sums of 16 x 8. Four floats rounded to TF32, and sums of 16 x 8 from such operands. Sums of 16 x 8 from pairs of bfloat16, the
sum of two such pairs, and a byte of two words in the first and third byte of one, whose others may be anything. The numbers of
the next work-item, so that each has four columns. Two halves in one word. A power of two, to 2 units in the last place. The
largest number and the sum of four work-items, side by side. Four halves, stored at a multiple of 8 bytes.
"""


def with_tensor_cores(text: str, *, mma: bool) -> str:
    """The kernels of `text` after these functions, if they use them and the device can (`mma`)."""
    return _FUNCTIONS + text if mma and uses_tensor_cores(text) else text
