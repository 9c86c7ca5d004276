// What mma.sync alone reaches: ROUNDS rounds of 8 independent m16n8k16 products a warp, from registers. For bench/mla.py.
#include "ptx.cuh"

extern "C" __global__ __launch_bounds__(256) void mma_rate(float* out) {
    const u32 seed = threadIdx.x * 0x3f803f80u;
    float acc[8][4] = {};
#pragma unroll 4
    for (int i = 0; i < ROUNDS; i++)
#pragma unroll
        for (int j = 0; j < 8; j++)
            mma_16x8x16(acc[j], seed + j, seed, seed + 1, seed + 2, seed + i, seed + 3, acc[j]);
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < 8; j++) sum += acc[j][0] + acc[j][1] + acc[j][2] + acc[j][3];
    out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
