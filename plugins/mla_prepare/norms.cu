// mla_prepare, first part: RMSNorm of a row's q_a to the workspace; RMSNorm of its latent and RoPE of its key, to the pool.
//
// Two blocks a row. Constants: those of prepare.cuh, EPS and AMPLITUDE (float32 bits), INV_FREQ (a list of float32 bits).
// Bytes moved: the rows of qkv_a, read once; q_a and pool entries, written once.
#include "prepare.cuh"
#include "rope.cuh"
#include "rows.cuh"

constexpr int THREADS = 256;
__constant__ u32 INV_FREQ_BITS[] = {INV_FREQ};
static_assert(sizeof(INV_FREQ_BITS) == 4 * P / 2, "a frequency for each pair");

template <int columns>
__device__ __forceinline__ void norm(const u16* from, const u16* weight, u16* to) {
    constexpr int vectors = columns / 8, per = (vectors + THREADS - 1) / THREADS;
    uint4 w[per];
    float row[per][8];
#pragma unroll
    for (int p = 0; p < per; p++) {
        const int v = threadIdx.x + p * THREADS;
        w[p] = load_weights16((const uint4*)weight + min(v, vectors - 1));
    }
    wait_for_previous_kernel();
    allow_next_kernel();
#pragma unroll
    for (int p = 0; p < per; p++) {
        const int v = threadIdx.x + p * THREADS;
        widen(load_activations16((const uint4*)from + v, v < vectors), row[p]);
    }
    store_normed<vectors, per, THREADS>(row, w, __uint_as_float(EPS), (uint4*)to);
}

extern "C" __global__ __launch_bounds__(THREADS) void norms(PREPARE_PARAMETERS) {
    const int t = blockIdx.x;
    const u16* row = qkv_a + (u64)t * (Q + C + P);
    if (blockIdx.y == 0) {
        norm<Q>(row, q_a_norm, normed_q_a(workspace) + (u64)t * Q);
        return;
    }
    __shared__ __align__(16) u16 latent[C];
    norm<C>(row + Q, kv_a_norm, latent);  // waits for the previous kernel
    __syncthreads();
    u16* entry = kv_pool + ((u64)layer * SLOTS + row_slot[t]) * (C + P);
    for (int v = threadIdx.x; v < C / 8; v += THREADS) ((uint4*)entry)[v] = ((const uint4*)latent)[v];
    for (int p = threadIdx.x; p < P / 2; p += THREADS) {
        const float2 turn = cos_sin(positions[t], __uint_as_float(INV_FREQ_BITS[p]), __uint_as_float(AMPLITUDE));
        turns(workspace)[t * (P / 2) + p] = turn;
        ((u32*)(entry + C))[p] = rotated(((const u32*)(row + Q + C))[p], turn);
    }
}
