// A sum of products in order of depth, as the plain contractions have it: two rows of one vector.
__kernel void sum(__global const float* a, __global const float4* b, __global float4* y, const int depth)
{
    const int row = get_global_id(0);
    float4 c0 = (float4)(0.0f), c1 = (float4)(0.0f);
    for (int k = 0; k < depth; ++k) {
        c0 = mad((float4)(a[row * depth + k]), b[k], c0);
        c1 = mad((float4)(a[(row + 1) * depth + k]), b[k], c1);
    }
    y[row] = c0;
    y[row + 1] = c1;
}
