// End of the second stage for many tokens: y[t] = sum over t's routes of weight * workspace[route] + shared[t].
// Constants: TOP_K, TOKENS, N_TILES, HAS_SHARED, FLOAT32 (the workspace; else bf16). A thread makes 8 columns; the routes are added in their order.
#include "ptx.cuh"

constexpr int N = 32 * N_TILES;
constexpr int THREADS = 256;

__device__ __forceinline__ void add_columns(float (&sum)[8], uint4 columns, float factor) {
    const u32 pairs[4] = {columns.x, columns.y, columns.z, columns.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        sum[2 * i] += factor * bf16_low(pairs[i]);
        sum[2 * i + 1] += factor * bf16_high(pairs[i]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    combine(const u16*, const u8*, const int*, const int*, const float* route_weights, const u16* shared, u16* y,
            const void* workspace) {
    wait_for_previous_kernel();
    allow_next_kernel();
    const u64 index = (u64)blockIdx.x * THREADS + threadIdx.x;
    const u64 token = index / (N / 8), column = index % (N / 8) * 8;
    if (token >= TOKENS) return;
    float sum[8] = {};
#pragma unroll
    for (int i = 0; i < TOP_K; ++i) {
        // a padding token has no routes: nothing was written for it, and its weights are 0
        const float factor = route_weights[token * TOP_K + i];
        const bool exists = factor != 0.f;
        const u64 from = (token * TOP_K + i) * N + column;
        if (FLOAT32) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint4 four = load_activations16((const float*)workspace + from + 4 * half, exists);
                sum[4 * half] += factor * __uint_as_float(four.x), sum[4 * half + 1] += factor * __uint_as_float(four.y);
                sum[4 * half + 2] += factor * __uint_as_float(four.z);
                sum[4 * half + 3] += factor * __uint_as_float(four.w);
            }
        } else {
            add_columns(sum, load_activations16((const u16*)workspace + from, exists), factor);
        }
    }
    if (HAS_SHARED) add_columns(sum, load_activations16(shared + token * N + column, true), 1.f);
    *(uint4*)(y + token * N + column) = make_uint4(bf16_pair(sum[0], sum[1]), bf16_pair(sum[2], sum[3]),
                                                   bf16_pair(sum[4], sum[5]), bf16_pair(sum[6], sum[7]));
}
