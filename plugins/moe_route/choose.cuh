// The experts of one token, in one warp. Constants: EXPERTS, TOP_K, NORMALISE; SCALING (float bits).
#pragma once
#include "ptx.cuh"

constexpr int PER_LANE = (EXPERTS + 31) / 32;
static_assert(TOP_K <= 32 && TOP_K <= EXPERTS, "a lane keeps a choice");

struct Choice {
    int expert;    // lane j < TOP_K: the token's j-th expert, -1 for a padding row
    float weight;
};

// An unsigned integer that orders like the float, NaN above everything; never 0.
__device__ __forceinline__ u32 order_of(float value) {
    if (value != value) return 0xffffffffu;
    const u32 bits = __float_as_uint(value);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// logits [EXPERTS] of the token. Picks by sigmoid + bias, the lowest expert among equals; weighs by sigmoid.
__device__ __forceinline__ Choice choose(const float* logits, const float* bias, bool padding) {
    const int lane = threadIdx.x % 32;
    u32 key[PER_LANE];
    float score[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
        const int expert = 32 * i + lane;
        const bool exists = EXPERTS % 32 == 0 || expert < EXPERTS;
        score[i] = exists ? 1.f / (1.f + expf(-logits[expert])) : 0.f;
        key[i] = exists ? order_of(score[i] + bias[expert]) : 0;
    }
    Choice mine = {-1, 0.f};
    float sum = 0.f;
    for (int j = 0; j < TOP_K; ++j) {
        u32 best = 0, slot = 0;
        float best_score = 0.f;
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            if (key[i] > best) best = key[i], slot = i, best_score = score[i];
        }
        const u32 top = __reduce_max_sync(0xffffffffu, best);
        const u32 expert = __reduce_min_sync(0xffffffffu, best == top ? 32 * slot + lane : 0xffffffffu);
        const float weight = __shfl_sync(0xffffffffu, best_score, expert % 32);
        if (lane == expert % 32) {
#pragma unroll
            for (int i = 0; i < PER_LANE; ++i) {
                if (i == (int)(expert / 32)) key[i] = 0;
            }
        }
        if (lane == j) mine = {(int)expert, weight};
        sum += weight;
    }
    if (NORMALISE) mine.weight /= sum + 1e-20f;
    mine.weight *= __uint_as_float(SCALING);
    if (padding) mine = {-1, 0.f};
    return mine;
}
