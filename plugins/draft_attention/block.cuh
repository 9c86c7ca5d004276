// What the three kernels of draft_attention share: operands, workspace, and the context of a block.
//
// Constants: BLOCKS (B), BLOCK (rows of one), HEADS, GROUPS (KV heads), DIM, PAGES of a block table row, PAGE_SIZE, SLOTS,
// WINDOW (0: none), SPLITS of the context. The layer is a scalar.
#pragma once

#include "ptx.cuh"

#define BLOCK_PARAMETERS                                                                                          \
    const u16 *qkv, const u16 *q_norm, const u16 *k_norm, const int *draft_requests, const int *context_len,      \
        const int *draft_start, const int *block_table, const u16 *draft_kv, u16 *out, u8 *workspace, i64 layer

constexpr int QUERIES = HEADS / GROUPS * BLOCK;  // rows that share keys: (row of the block, head of the group)
constexpr int TILE = 64;                         // keys

// Workspace: q [B BLOCK, HEADS, DIM] and k [B BLOCK, GROUPS, DIM] after norm and RoPE; then, per block, group and split,
// sums float32 [QUERIES, DIM] and (largest score in units of log 2, sum of weights) of each row.
__device__ __forceinline__ u16* queries(u8* workspace) { return (u16*)workspace; }
__device__ __forceinline__ u16* own_keys(u8* workspace) { return queries(workspace) + (u64)BLOCKS * BLOCK * HEADS * DIM; }
__device__ __forceinline__ float* sums(u8* workspace, int place) {
    return (float*)(own_keys(workspace) + (u64)BLOCKS * BLOCK * GROUPS * DIM) + (u64)place * QUERIES * DIM;
}
__device__ __forceinline__ float2* weights(u8* workspace, int place) {
    return (float2*)sums(workspace, BLOCKS * GROUPS * SPLITS) + (u64)place * QUERIES;
}

struct Context {
    int start, stop;  // positions seen
};

__device__ __forceinline__ Context context_of(int request, const int* context_len, const int* draft_start) {
    const int stop = context_len[request];
    const int start = min(draft_start[request], stop);
    return {WINDOW ? max(start, stop - WINDOW) : start, stop};
}
