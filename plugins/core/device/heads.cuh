// A head of HALVES x 2 values in a warp, as a drafter in Qwen's manner has them: RMSNorm, then RoPE on (i, i + d / 2).
#pragma once

#include "ptx.cuh"
#include "rope.cuh"

// Lane l holds values l + 32 j of each half. Rounded to bfloat16 where the reference rounds: before and after the
// multiplication by the norm's weight, and at the end.
template <int dim>
__device__ __forceinline__ void norm_and_rotate(const u16* from, const u16* weight, float eps, const u32* inv_freq,
                                                float amplitude, int position, u16* to) {
    constexpr int half = dim / 2, per = (half + 31) / 32;
    const int lane = threadIdx.x % 32;
    float first[per], second[per], squares = 0.f;
#pragma unroll
    for (int j = 0; j < per; j++) {
        const int i = lane + 32 * j;
        first[j] = i < half ? bf16_value(from[i]) : 0.f;
        second[j] = i < half ? bf16_value(from[i + half]) : 0.f;
        squares += first[j] * first[j] + second[j] * second[j];
    }
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) squares += __shfl_xor_sync(~0u, squares, d);
    const float scale = rsqrtf(squares / dim + eps);
#pragma unroll
    for (int j = 0; j < per; j++) {
        const int i = lane + 32 * j;
        if (i >= half) continue;
        const float2 turn = cos_sin(position, __uint_as_float(inv_freq[i]), amplitude);
        const float a = bf16_value(bf16_bits(bf16_value(weight[i]) * bf16_value(bf16_bits(first[j] * scale))));
        const float b =
            bf16_value(bf16_bits(bf16_value(weight[i + half]) * bf16_value(bf16_bits(second[j] * scale))));
        to[i] = bf16_bits(a * turn.x - b * turn.y);
        to[i + half] = bf16_bits(b * turn.x + a * turn.y);
    }
}
