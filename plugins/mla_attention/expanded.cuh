// What the three kernels of an expanded attention pass share: operands, workspace, the request.
//
// A pass without a mask holds rows of one request, at positions context, context + 1, .. Its keys and values are built per
// head from the latents, SEGMENT positions at a time: expand.cu writes a segment, attend.cu adds it to the sums of every row,
// and after the last segment merge.cu puts the SPLITS of a row's positions together. Segments past the end are empty launches.
//
// Constants: TOKENS, REQUESTS, HEADS, C (kv_lora_rank), P (qk_rope_head_dim), NOPE, V (v_head_dim), PAGE_SIZE, PAGES of a
// block table row, SLOTS of the pool, SEGMENT (positions), SPLITS.
#pragma once

#include "operands.cuh"

#define EXPANDED_PARAMETERS ATTENTION_PARAMETERS, i64 segment

constexpr int DIM = NOPE + P;
constexpr int K_STRIDE = DIM + 8, V_STRIDE = V + 8;  // rows as shared memory wants them: no bank conflicts
static_assert(C == 512 && P == 64 && NOPE == 128 && V == 128, "shapes of these kernels");

// Workspace: keys [HEADS, SEGMENT, K_STRIDE] and values [HEADS, SEGMENT, V_STRIDE] in bfloat16; sums float32 [SPLITS, TOKENS,
// HEADS, V]; (largest score in units of log 2, sum of weights) [SPLITS, TOKENS, HEADS].
__device__ __forceinline__ u16* keys(u8* workspace, int head) {
    return (u16*)workspace + (u64)head * SEGMENT * K_STRIDE;
}
__device__ __forceinline__ u16* values(u8* workspace, int head) {
    return keys(workspace, HEADS) + (u64)head * SEGMENT * V_STRIDE;
}
__device__ __forceinline__ u64 place(int split, int row, int head) {
    return ((u64)split * TOKENS + row) * HEADS + head;
}
__device__ __forceinline__ float* sums(u8* workspace, u64 place) {
    return (float*)values(workspace, HEADS) + place * V;
}
__device__ __forceinline__ float2* weights(u8* workspace, u64 place) {
    return (float2*)sums(workspace, (u64)SPLITS * TOKENS * HEADS) + place;
}

struct Request {
    int index, first, rows, context;
};

// The one that has rows; rows = 0 where none has.
__device__ __forceinline__ Request find_request(const int* first_row, const int* request_rows, const int* context_len) {
    int r = 0;
    while (r < REQUESTS - 1 && request_rows[r] == 0) r++;
    return {r, first_row[r], request_rows[r], context_len[r]};
}
