// Synthetic weights, byte for byte those of plugins/core/splat.py: what an engine without a weights file runs on.
//
// One thread a value of the tensor (a byte of an INT4 tile), grid-stride. Bytes moved: the tensor, written once.
#include "ptx.cuh"

constexpr int TILE = 576, NIBBLES = 512;  // of int4_marlin_gemm: 32 x 32 weights, then 32 bfloat16 scales

__device__ __forceinline__ u32 hash32(u32 value, u32 seed) {
    value ^= seed;
    value = (value ^ (value >> 16)) * 0x7FEB352Du;
    value = (value ^ (value >> 15)) * 0x846CA68Bu;
    return value ^ (value >> 16);
}

__device__ __forceinline__ float unit(u32 bits) { return __fadd_rn(__fmul_rn((float)(bits >> 8), 0x1p-23f), -1.f); }

// Rounded product, then rounded sum, as numpy computes; the compiler would fuse them.
__device__ __forceinline__ float scaled(u32 bits, float factor, float offset) {
    return __fadd_rn(__fmul_rn(unit(bits), factor), offset);
}

enum Kind { TILES, FLOAT_VECTOR, BF16_VECTOR, FLOAT_MATRIX, BF16_MATRIX };

extern "C" __global__ __launch_bounds__(256) void splat(void* out, i64 count, i64 seed, i64 kind, i64 scale_bits) {
    const float scale = __uint_as_float((u32)scale_bits);
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < count; i += (i64)gridDim.x * blockDim.x) {
        const u32 bits = hash32((u32)i, (u32)seed);
        const bool vector = kind == FLOAT_VECTOR || kind == BF16_VECTOR;
        const float value = vector ? scaled(bits, 0.1f, 1.f) : __fmul_rn(unit(bits), scale);
        if (kind == FLOAT_VECTOR || kind == FLOAT_MATRIX) {
            ((float*)out)[i] = value;
        } else if (kind == BF16_VECTOR || kind == BF16_MATRIX) {
            ((u16*)out)[i] = bf16_bits(value);
        } else if (i % TILE < NIBBLES) {
            ((u8*)out)[i] = (u8)bits;
        } else {  // a scale: both of its bytes come from the hash of the first
            const u32 first = hash32((u32)(i & ~1ll), (u32)seed);
            const u16 word = bf16_bits(__fmul_rn(scaled(first, 0.1f, 1.f), scale));
            ((u8*)out)[i] = (u8)(i & 1 ? word >> 8 : word);
        }
    }
}
