// RoPE angles: float32(position) * inv_freq, rounded as in transformers, then turned into cosine and sine without the
// long way that large angles take in the library (and its stack).
#pragma once

#include "ptx.cuh"

__device__ __forceinline__ float2 cos_sin(int position, float inv_freq, float amplitude) {
    const double turns = (double)__fmul_rn((float)position, inv_freq) * 0.15915494309189535;  // 1 / (2 pi)
    float s, c;
    sincospif((float)(2.0 * (turns - rint(turns))), &s, &c);
    return {__fmul_rn(amplitude, c), __fmul_rn(amplitude, s)};
}
