// Attention of a warp on 16 query rows that it keeps in registers, over tiles of keys and values in shared memory.
//
// Fragments are those of mma.sync m16n8k16: a lane has rows g and g + 8 (g = lane / 4; index h below) and column pairs 2 t
// (t = lane % 4). STRIDE: u16 from a row of a tile to the next, such that rows lie in different banks.
#pragma once

#include "ptx.cuh"

// A lane's part of query row h; `row` begins at its first column.
template <int STEPS>
__device__ __forceinline__ void load_query(u32 (&q)[STEPS][4], int h, const u16* row) {
    row += 2 * (threadIdx.x % 4);
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        q[s][h] = *(const u32*)(row + 16 * s);
        q[s][2 + h] = *(const u32*)(row + 16 * s + 8);
    }
}

// scores += q keys^T, of a tile of 8 N keys.
template <int STRIDE, int STEPS, int N>
__device__ __forceinline__ void add_scores(float (&scores)[N][4], const u32 (&q)[STEPS][4], const u16* keys) {
    const int lane = threadIdx.x % 32;
    const u32 at = shared_address(keys + (lane % 8 + lane / 16 * 8) * STRIDE + lane / 8 % 2 * 8);
#pragma unroll
    for (int s = 0; s < STEPS; s++)
#pragma unroll
        for (int n = 0; n < N / 2; n++) {
            const uint4 b = ldmatrix(at + 2 * (16 * n * STRIDE + 16 * s));
            mma_16x8x16(scores[2 * n], q[s][0], q[s][1], q[s][2], q[s][3], b.x, b.y, scores[2 * n]);
            mma_16x8x16(scores[2 * n + 1], q[s][0], q[s][1], q[s][2], q[s][3], b.z, b.w, scores[2 * n + 1]);
        }
}

// sums += weights values, total += weights, with weights 2^(scale scores - base) in bfloat16.
template <int STRIDE, int N, int COLUMNS>
__device__ __forceinline__ void add_values(float (&sums)[COLUMNS][4], float (&total)[2], const float (&scores)[N][4],
                                           float scale, const float (&base)[2], const u16* values) {
    const int lane = threadIdx.x % 32;
    const u32 at = shared_address(values + lane % 16 * STRIDE + lane / 16 * 8);
#pragma unroll
    for (int k = 0; k < N / 2; k++) {
        u32 a[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {  // the scores' fragment is the weights' fragment
            const float* pair = &scores[2 * k + j / 2][j % 2 * 2];
            a[j] = bf16_pair(exp2f(pair[0] * scale - base[j % 2]), exp2f(pair[1] * scale - base[j % 2]));
            total[j % 2] += bf16_low(a[j]) + bf16_high(a[j]);
        }
#pragma unroll
        for (int n = 0; n < COLUMNS / 2; n++) {
            const uint4 b = ldmatrix_trans(at + 2 * (16 * k * STRIDE + 16 * n));
            mma_16x8x16(sums[2 * n], a[0], a[1], a[2], a[3], b.x, b.y, sums[2 * n]);
            mma_16x8x16(sums[2 * n + 1], a[0], a[1], a[2], a[3], b.z, b.w, sums[2 * n + 1]);
        }
    }
}

// A lane's sums of row h; `row` begins at its first column.
template <int COLUMNS>
__device__ __forceinline__ void store_sums(float* row, const float (&sums)[COLUMNS][4], int h) {
    row += 2 * (threadIdx.x % 4);
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) *(float2*)(row + 8 * n) = make_float2(sums[n][2 * h], sums[n][2 * h + 1]);
}
