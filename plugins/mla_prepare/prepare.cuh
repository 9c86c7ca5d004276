// What the kernels of mla_prepare share: operands and workspace.
//
// Constants: TOKENS, Q (q_lora_rank), C (kv_lora_rank), P (qk_rope_head_dim), NOPE (qk_nope_head_dim), HEADS, SLOTS of the
// pool. The layer is a scalar.
#pragma once

#include "ptx.cuh"

#define PREPARE_PARAMETERS                                                                                      \
    const u16 *qkv_a, const u16 *q_a_norm, const u16 *kv_a_norm, const u16 *q_b, const u16 *w_uk,               \
        const int *positions, const int *row_slot, u16 *kv_pool, u16 *q, u8 *workspace, i64 layer

constexpr int HEAD = NOPE + P;  // of q before absorption

// Workspace: normed q_a [TOKENS, Q], q after q_b [TOKENS, HEADS, HEAD], cosine and sine [TOKENS, P / 2].
__device__ __forceinline__ u16* normed_q_a(u8* workspace) { return (u16*)workspace; }
__device__ __forceinline__ u16* q_rows(u8* workspace) { return (u16*)workspace + (u64)TOKENS * Q; }
__device__ __forceinline__ float2* turns(u8* workspace) {
    return (float2*)(q_rows(workspace) + (u64)TOKENS * HEADS * HEAD);
}

// The rotated pair, rounded to bfloat16.
__device__ __forceinline__ u32 rotated(u32 pair, float2 turn) {
    const float a = bf16_low(pair), b = bf16_high(pair);
    return bf16_pair(a * turn.x - b * turn.y, a * turn.y + b * turn.x);
}
