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

// The largest or the smallest of the values, in a tree: its depth is what a round waits for.
template <bool largest>
__device__ __forceinline__ u32 reduce(u32 (&values)[PER_LANE]) {
#pragma unroll
    for (int step = 1; step < PER_LANE; step *= 2) {
#pragma unroll
        for (int i = 0; i + step < PER_LANE; i += 2 * step) {
            values[i] = largest ? max(values[i], values[i + step]) : min(values[i], values[i + step]);
        }
    }
    return values[0];
}

__device__ __forceinline__ float score_of(float logit) { return __fdividef(1.f, 1.f + __expf(-logit)); }

// A lane's biases, of experts 32 i + lane: weights, which may be read before the previous kernel has ended.
struct Biases {
    float of[PER_LANE];
};

__device__ __forceinline__ Biases load_biases(const float* bias) {
    Biases biases;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
        const int expert = 32 * i + threadIdx.x % 32;
        biases.of[i] = load_constant(bias + (EXPERTS % 32 == 0 ? expert : min(expert, EXPERTS - 1)));
    }
    return biases;
}

// logits [EXPERTS] of the token. Picks by sigmoid + bias, the lowest expert among equals; weighs by sigmoid.
__device__ __forceinline__ Choice choose(const float* logits, const Biases& biases, bool padding) {
    const int lane = threadIdx.x % 32;
    u32 key[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
        const int expert = 32 * i + lane;
        const bool exists = EXPERTS % 32 == 0 || expert < EXPERTS;
        key[i] = exists ? order_of(score_of(logits[expert]) + biases.of[i]) : 0;
    }
    int mine = 0;
#pragma unroll 1
    for (int j = 0; j < TOP_K; ++j) {
        u32 tree[PER_LANE];
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) tree[i] = key[i];
        const u32 top = __reduce_max_sync(0xffffffffu, reduce<true>(tree));
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) tree[i] = key[i] == top ? 32 * i + lane : 0xffffffffu;
        const u32 expert = __reduce_min_sync(0xffffffffu, reduce<false>(tree));
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            if (32 * i + lane == expert) key[i] = 0;
        }
        if (lane == j) mine = expert;
    }
    Choice choice = {mine, lane < TOP_K ? score_of(logits[mine]) : 0.f};
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < TOP_K; ++j) sum += __shfl_sync(0xffffffffu, choice.weight, j);
    if (NORMALISE) choice.weight /= sum + 1e-20f;
    choice.weight *= __uint_as_float(SCALING);
    if (padding) choice = {-1, 0.f};
    return choice;
}
