// A tile of packed weights (see pack.py: 32 rows x 32 columns, 576 bytes) times activations, in one warp.
//
// Lane g * 4 + t holds 8 columns (8 t ..) of rows g, g + 8, g + 16, g + 24 and, as the B operand, the same 8
// columns of token g. mma.sync does not care about the order of k as long as both operands have the same one:
// a shift by 4 i and a mask give nibbles i and i + 4 of a word, so columns are taken in pairs (i, i + 4).
#pragma once
#include "ptx.cuh"

constexpr int TILE_BYTES = 576;
constexpr int SCALES_OFFSET = 512;
constexpr u32 PLUS_128 = 0x43004300u;   // bf16 128: its low mantissa bits are units
constexpr u32 PLUS_136 = 0x43084308u;   // the offset of a nibble (8) on top of that
constexpr u32 MINUS_136 = 0xc308c308u;

struct Tile {
    uint4 words;   // of rows g, g + 8, g + 16, g + 24
    uint2 scales;  // of the same rows, bf16
};

__device__ __forceinline__ Tile load_tile(const u8* tile, int lane) {
    return {load_weights16(tile + 16 * lane), load_weights8(tile + SCALES_OFFSET + 8 * (lane >> 2))};
}

// The same from shared memory.
__device__ __forceinline__ Tile read_tile(const u8* tile, int lane) {
    return {*(const uint4*)(tile + 16 * lane), *(const uint2*)(tile + SCALES_OFFSET + 8 * (lane >> 2))};
}

// 8 columns of a token, in pairs (i, i + 4).
struct Columns {
    u32 pair[4];
};

__device__ __forceinline__ Columns columns_of(uint4 x) {
    return {pick_bytes<0x5410>(x.x, x.z), pick_bytes<0x7632>(x.x, x.z), pick_bytes<0x5410>(x.y, x.w),
            pick_bytes<0x7632>(x.y, x.w)};
}

// 128 + nibble, for nibbles i and i + 4; exact in bf16
__device__ __forceinline__ u32 nibbles(u32 word, int i) { return and_or(word >> (4 * i), 0x000f000fu, PLUS_128); }

// acc[0..3]: rows g, g + 8; acc[4..7]: rows g + 16, g + 24; each for tokens 2 t, 2 t + 1.
//
// The product runs on 128 + nibble, which needs no arithmetic to make; -136 times the sum of the activations,
// by the same unit from a constant operand, takes the offset away. The scale is applied to the float32 sum of
// the tile's 32 columns, so no weight is rounded.
__device__ __forceinline__ void multiply_tile(float (&acc)[8], const Tile& tile, const Columns& x) {
    const float zero[4] = {0.f, 0.f, 0.f, 0.f};
    float offset[4];
    mma_16x8x16(offset, MINUS_136, MINUS_136, MINUS_136, MINUS_136, x.pair[0], x.pair[1], zero);
    mma_16x8x16(offset, MINUS_136, MINUS_136, MINUS_136, MINUS_136, x.pair[2], x.pair[3], offset);
    const u32 words[4] = {tile.words.x, tile.words.y, tile.words.z, tile.words.w};
    const float scale[4] = {bf16_low(tile.scales.x), bf16_high(tile.scales.x), bf16_low(tile.scales.y),
                            bf16_high(tile.scales.y)};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const u32 upper = words[2 * half], lower = words[2 * half + 1];
        float sum[4];
        mma_16x8x16(sum, nibbles(upper, 0), nibbles(lower, 0), nibbles(upper, 1), nibbles(lower, 1), x.pair[0],
                    x.pair[1], offset);
        mma_16x8x16(sum, nibbles(upper, 2), nibbles(lower, 2), nibbles(upper, 3), nibbles(lower, 3), x.pair[2],
                    x.pair[3], sum);
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[4 * half + i] += scale[2 * half + i / 2] * sum[i];
    }
}

// The same for up to 64 tokens, acc[token / 8], of which the first `tokens` exist: activations in shared memory,
// [token][t] in pair order. With so many tokens it is cheaper to take the offset off the weights, which is exact.
__device__ __forceinline__ void multiply_many(float (&acc)[8][8], const Tile& tile, const uint4* activations,
                                              int tokens, int g, int t) {
    const u32 words[4] = {tile.words.x, tile.words.y, tile.words.z, tile.words.w};
    const float scale[4] = {bf16_low(tile.scales.x), bf16_high(tile.scales.x), bf16_low(tile.scales.y),
                            bf16_high(tile.scales.y)};
    u32 weights[4][4];  // [row][pair]
#pragma unroll
    for (int row = 0; row < 4; ++row) {
#pragma unroll
        for (int i = 0; i < 4; ++i) weights[row][i] = bf16x2_sub(nibbles(words[row], i), PLUS_136);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if (8 * i >= tokens) break;
        const uint4 x = activations[4 * (8 * i + g) + t];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32(&upper)[4] = weights[2 * half];
            const u32(&lower)[4] = weights[2 * half + 1];
            const float zero[4] = {0.f, 0.f, 0.f, 0.f};
            float sum[4];
            mma_16x8x16(sum, upper[0], lower[0], upper[1], lower[1], x.x, x.y, zero);
            mma_16x8x16(sum, upper[2], lower[2], upper[3], lower[3], x.z, x.w, sum);
#pragma unroll
            for (int j = 0; j < 4; ++j) acc[i][4 * half + j] += scale[2 * half + j / 2] * sum[j];
        }
    }
}

// The four rows of a lane for one token: what a `float4` in the kernels' shared memory holds.
__device__ __forceinline__ float4 rows_of(const float (&acc)[8], int token) {
    return make_float4(acc[token], acc[2 + token], acc[4 + token], acc[6 + token]);
}

__device__ __forceinline__ float4 add(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
