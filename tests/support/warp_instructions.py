"""Instructions of NVIDIA's warps in OpenCL C for CPUs, after the PTX ISA: kernels for tensor cores run with their own indices.

Work-items of a warp exchange registers through local memory, with barriers. So every work-item of a group must reach every
instruction: configs whose warps only copy cannot run so. Compilers of CPUs are slow with so many barriers: blocks are small.
"""

from __future__ import annotations

import re

_WORDS = 6
"""Words that a work-item gives others: registers of both operands of a product."""

_FUNCTIONS = r"""
#define FM_TENSOR_CORES
#define FM_LANE ((uint)(get_local_id(0) % 32))
#define FM_OF(lane) (fm_words + ((get_local_id(0) / 32 * 32) + (lane)) * 6)
static inline float fm_half(uint word, uint odd)
{
    const ushort bits = word >> (16 * odd);
    return vload_half(0, (const half*)&bits);
}
static inline float fm_bf16(uint word, uint odd) { return as_float(odd ? word & 0xffff0000u : word << 16); }
static inline uint fm_sum_bf16(uint a, uint b)
{
    return as_uint(fm_bf16(a, 0) + fm_bf16(b, 0)) >> 16 | as_uint(fm_bf16(a, 1) + fm_bf16(b, 1)) & 0xffff0000u;
}
static inline uint fm_two_bytes(uint a, uint b, uint byte)
{
    return a >> 8 * byte & 255u | (b >> 8 * byte & 255u) << 16 | 0xab00cd00u;
}
static inline void fm_copy_(__local float4* staged, uint place, __global const void* source, int bytes)
{
    ((__local uint4*)staged)[place / 16] = bytes ? *(__global const uint4*)source : (uint4)(0);
}
// ldmatrix: lane 8 j + i has the place of row i of matrix j, of 8 halves; lane l gets a pair of row l / 4 of each, or of its
// transpose.
static inline uint4 fm_matrices(__local const float4* staged, __local uint* fm_words, uint place, int turned)
{
    FM_OF(FM_LANE)[0] = place;
    barrier(CLK_LOCAL_MEM_FENCE);
    uint found[4];
    for (uint j = 0; j < 4; ++j) {
        const uint row = FM_LANE / 4, pair = FM_LANE % 4 * 2;
        ushort both[2];
        for (uint e = 0; e < 2; ++e) {
            const uint from = FM_OF(8 * j + (turned ? pair + e : row))[0] + 2 * (turned ? row : pair + e);
            both[e] = ((__local const ushort*)staged)[from / 2];
        }
        found[j] = both[0] | (uint)both[1] << 16;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    return (uint4)(found[0], found[1], found[2], found[3]);
}
static inline void fm_give(__local uint* fm_words, uint4 a, uint2 b)
{
    __local uint* own = FM_OF(FM_LANE);
    own[0] = a.x; own[1] = a.y; own[2] = a.z; own[3] = a.w; own[4] = b.x; own[5] = b.y;
    barrier(CLK_LOCAL_MEM_FENCE);
}
// mma.m16n8k16 on halves or bfloat16 (`brain`), and mma.m16n8k8 on floats: numbers of the result in rows l / 4 and l / 4 + 8,
// two columns each.
static inline float4 fm_products(__local uint* fm_words, uint4 a, uint2 b, float4 c, int halves, int brain)
{
    fm_give(fm_words, a, b);
    float sums[4] = {c.x, c.y, c.z, c.w};
    for (uint e = 0; e < 4; ++e) {
        const uint row = FM_LANE / 4 + e / 2 * 8, column = FM_LANE % 4 * 2 + e % 2;
        for (uint k = 0; k < (halves ? 16 : 8); ++k) {
            const uint at = halves ? k % 8 / 2 : k % 4, far = halves ? k / 8 : k / 4;
            const uint x = FM_OF(row % 8 * 4 + at)[row / 8 + 2 * far], y = FM_OF(column * 4 + at)[4 + far];
            if (brain) sums[e] += fm_bf16(x, k % 2) * fm_bf16(y, k % 2);
            else sums[e] += halves ? fm_half(x, k % 2) * fm_half(y, k % 2) : as_float(x) * as_float(y);
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    return (float4)(sums[0], sums[1], sums[2], sums[3]);
}
static inline float2 fm_shuffled_(__local uint* fm_words, float2 v, uint distance)
{
    fm_give(fm_words, (uint4)(as_uint(v.x), as_uint(v.y), 0, 0), (uint2)(0));
    const float2 other = (float2)(as_float(FM_OF(FM_LANE ^ distance)[0]), as_float(FM_OF(FM_LANE ^ distance)[1]));
    barrier(CLK_LOCAL_MEM_FENCE);
    return other;
}
static inline float4 fm_neighbours_(__local uint* fm_words, float4 c, int odd)
{
    const float2 other = fm_shuffled_(fm_words, odd ? c.xy : c.zw, 1);
    return odd ? (float4)(other, c.zw) : (float4)(c.xy, other);
}
static inline float2 fm_four_(__local uint* fm_words, float2 v, int largest)
{
    for (uint distance = 1; distance < 4; distance *= 2) {
        const float2 other = fm_shuffled_(fm_words, v, distance);
        v = largest ? fmax(v, other) : v + other;
    }
    return v;
}
static inline uint fm_two_halves(float2 v)
{
    ushort bits[2];
    vstore_half2_rte(v, 0, (half*)bits);
    return bits[0] | (uint)bits[1] << 16;
}
static inline uint4 fm_tf32(uint4 v) { return v + (uint4)(0x1000) & (uint4)(0xffffe000); }
#define fm_copy(place, source, bytes) fm_copy_(staged, (place) - staged_at, source, bytes)
#define fm_commit()
#define fm_wait(groups)
#define fm_fragment(place) fm_matrices(staged, fm_words, (place) - staged_at, 0)
#define fm_fragment_by_columns(place) fm_matrices(staged, fm_words, (place) - staged_at, 1)
#define fm_mma(a, b, c) fm_products(fm_words, a, b, c, 1, 0)
#define fm_mma_bf16(a, b, c) fm_products(fm_words, a, b, c, 1, 1)
#define fm_mma_tf32(a, b, c) fm_products(fm_words, a, b, c, 0, 0)
#define fm_neighbours(c, odd) fm_neighbours_(fm_words, c, odd)
#define fm_largest_of_four(v) fm_four_(fm_words, v, 1)
#define fm_sum_of_four(v) fm_four_(fm_words, v, 0)
#define fm_exp2(x) exp2(x)
#define fm_put_halves(v, place) vstore_half4_rte(v, 0, place)
"""

_GROUP = re.compile(r"reqd_work_group_size\((\d+), 1, 1\)")
_STAGED = re.compile(r"__local float4 staged\[\d+\];")


def with_warps(text: str, *, mma: bool) -> str:
    """The text for a compiler, in place of `flashmem.runtime.opencl.tensor_cores.with_tensor_cores`."""
    if "FM_TENSOR_CORES" not in text:
        return text

    def declared(match: re.Match[str]) -> str:
        items = [int(each[1]) for each in _GROUP.finditer(text, 0, match.start())][-1]
        return f"{match[0]}\n    __local uint fm_words[{_WORDS * items}];"

    return _FUNCTIONS + _STAGED.sub(declared, text)
