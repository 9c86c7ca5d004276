// Rows of bfloat16 spread over a block: VECTORS vectors of 8 values, PER of them a thread (thread, thread + THREADS, ..).
#pragma once

#include "ptx.cuh"

// The sum over the block in every thread; the same order, and so the same bits, every time.
template <int threads>
__device__ __forceinline__ float block_sum(float v) {
    constexpr int warps = threads / 32;
    __shared__ float parts[warps];
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) v += __shfl_xor_sync(~0u, v, d);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
    __syncthreads();
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < warps; w++) sum += parts[w];
    return sum;
}

__device__ __forceinline__ void widen(const uint4& v, float (&f)[8]) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        f[2 * i] = bf16_low(words[i]);
        f[2 * i + 1] = bf16_high(words[i]);
    }
}

__device__ __forceinline__ uint4 narrow(const float (&f)[8]) {
    return {bf16_pair(f[0], f[1]), bf16_pair(f[2], f[3]), bf16_pair(f[4], f[5]), bf16_pair(f[6], f[7])};
}

// What bfloat16 keeps of a value.
__device__ __forceinline__ float rounded(float v) { return bf16_value(bf16_bits(v)); }

// RMSNorm of a row that the block holds in `row`, to `out`: rounded before the multiplication by the weight, as
// plugins/rms_norm/reference.py is. `weight` was loaded by the caller, before it waited.
template <int vectors, int per, int threads>
__device__ __forceinline__ void store_normed(const float (&row)[per][8], const uint4 (&weight)[per], float eps,
                                             uint4* out) {
    float squares = 0.f;
#pragma unroll
    for (int p = 0; p < per; p++)
#pragma unroll
        for (int i = 0; i < 8; i++) squares += row[p][i] * row[p][i];
    const float scale = rsqrtf(block_sum<threads>(squares) / (8 * vectors) + eps);
#pragma unroll
    for (int p = 0; p < per; p++) {
        const int v = threadIdx.x + p * threads;
        if (v >= vectors) continue;
        float w[8], y[8];
        widen(weight[p], w);
#pragma unroll
        for (int i = 0; i < 8; i++) y[i] = w[i] * rounded(row[p][i] * scale);
        out[v] = narrow(y);
    }
}
