// y = x W^T for bf16 x [TOKENS, K] and W [N, K], the weights read once per 8 TOKEN_TILES tokens.
//
// Constants: TOKENS, N, K_TILES (of 32 columns); ROW_TILES (of 32 rows, of a block), TOKEN_TILES (of 8 tokens, of a
// block), K_WARPS and CLUSTER (K is cut into CLUSTER x K_WARPS parts of SLICE tiles), STAGES (tiles a warp has in
// flight), MIN_BLOCKS; SILU_MUL, OUT_FLOAT32.
//
// Weights are the 16-row operand of mma.sync. Every lane copies what it will itself multiply, 16 bytes at a time, to
// its own places in shared memory, so the ring needs no barrier. The first weights are on their way before the kernel
// waits for its predecessor. Sums of the parts of K meet in shared memory, first of the block's warps, then of the
// cluster's blocks, always in the same order.
#pragma once
#include "ptx.cuh"

constexpr int WARPS = ROW_TILES * K_WARPS;
constexpr int THREADS = 32 * WARPS;
constexpr int K = 32 * K_TILES;
constexpr int SUMS = ROW_TILES * TOKEN_TILES * 64;  // float4s of a part of K: [row tile][token][g]
constexpr int STAGE = 32 * (4 + TOKEN_TILES);      // uint4s of a warp's tile and its activations: [.][lane]
static_assert(K_TILES == CLUSTER * K_WARPS * SLICE, "the parts of K must be equal");
static_assert(SUMS % CLUSTER == 0, "the blocks of a cluster must share the sums evenly");

struct Tile {
    uint4 rows[4];  // 8 columns of rows g, g + 8, g + 16, g + 24
};

__device__ __forceinline__ void multiply(float (&acc)[8], const Tile& w, uint4 x) {
    float(&upper)[4] = *(float(*)[4])acc;
    float(&lower)[4] = *(float(*)[4])(acc + 4);
    mma_16x8x16(upper, w.rows[0].x, w.rows[1].x, w.rows[0].y, w.rows[1].y, x.x, x.y, upper);
    mma_16x8x16(lower, w.rows[2].x, w.rows[3].x, w.rows[2].y, w.rows[3].y, x.x, x.y, lower);
    mma_16x8x16(upper, w.rows[0].z, w.rows[1].z, w.rows[0].w, w.rows[1].w, x.z, x.w, upper);
    mma_16x8x16(lower, w.rows[2].z, w.rows[3].z, w.rows[2].w, w.rows[3].w, x.z, x.w, lower);
}

// The outputs of four rows g, g + 8, g + 16, g + 24 of one token.
__device__ __forceinline__ void store(void* y, int token, int tile_row, int g, float4 sum) {
    if (token >= TOKENS) return;
    const float rows[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int i = 0; i < (SILU_MUL ? 2 : 4); ++i) {
        const float value = SILU_MUL ? silu(rows[i]) * rows[(i + 2) % 4] : rows[i];
        const int width = SILU_MUL ? N / 2 : N, column = (SILU_MUL ? 16 : 32) * tile_row + 8 * i + g;
        if (column >= width) continue;
        if (OUT_FLOAT32) {
            ((float*)y)[(u64)token * width + column] = value;
        } else {
            ((u16*)y)[(u64)token * width + column] = bf16_bits(value);
        }
    }
}

__device__ __forceinline__ float4 add(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

__device__ __forceinline__ void gemm_block(const u16* x, const u16* weight, void* y) {
    DYNAMIC_SHARED(memory);
    float4* sums = (float4*)memory;  // [K_WARPS][SUMS]
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int row_tile = warp / K_WARPS, k_warp = warp % K_WARPS;
    const int rank = blockIdx.x, first_token = 8 * TOKEN_TILES * blockIdx.y, first_tile = ROW_TILES * blockIdx.z;
    const int column = 32 * SLICE * (rank * K_WARPS + k_warp) + 8 * t;

    const int first_row = 32 * (first_tile + row_tile) + g;
    const u16* lane_weight = weight + (u64)first_row * K + column;
    const u16* lane_x = x + (u64)(first_token + g) * K + column;
    uint4* ring = (uint4*)memory + warp * STAGES * STAGE + lane;
    auto copy_tile = [&](int slot, int tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            // rows past the end are computed from the last one, and not stored
            const int row = N % (32 * ROW_TILES) == 0 ? 8 * i : min(8 * i, N - 1 - first_row);
            copy16_streamed(ring + slot * STAGE + 32 * i, lane_weight + (i64)row * K + 32 * tile);
        }
    };
    auto copy_x = [&](int slot, int tile) {
#pragma unroll
        for (int i = 0; i < TOKEN_TILES; ++i) {
            const bool exists = first_token + 8 * i + g < TOKENS;
            copy16_or_zero(ring + slot * STAGE + 32 * (4 + i), exists ? lane_x + 8 * i * K + 32 * tile : x, exists);
        }
    };
#pragma unroll 1
    for (int i = 0; i < STAGES && i < SLICE; ++i) copy_tile(i, i);
    wait_for_previous_kernel();
    allow_next_kernel();
#pragma unroll 1
    for (int i = 0; i < STAGES; ++i) {
        if (i < SLICE) copy_x(i, i);
        end_group();
    }

    float acc[TOKEN_TILES][8] = {};
    int slot = 0;
#pragma unroll 1
    for (int tile = 0; tile < SLICE; ++tile) {
        copies_left<STAGES - 1>();
        const uint4* stage = ring + slot * STAGE;
        const Tile weights = {{stage[0], stage[32], stage[64], stage[96]}};
#pragma unroll
        for (int j = 0; j < TOKEN_TILES; ++j) multiply(acc[j], weights, stage[32 * (4 + j)]);
        if (tile + STAGES < SLICE) {
            copy_tile(slot, tile + STAGES);
            copy_x(slot, tile + STAGES);
        }
        end_group();
        slot = slot + 1 == STAGES ? 0 : slot + 1;
    }
    copies_left<0>();
    __syncthreads();  // the sums take the place of the rings
#pragma unroll
    for (int j = 0; j < TOKEN_TILES; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            sums[k_warp * SUMS + (row_tile * 8 * TOKEN_TILES + 8 * j + 2 * t + i) * 8 + g] =
                make_float4(acc[j][i], acc[j][2 + i], acc[j][4 + i], acc[j][6 + i]);
        }
    }
    __syncthreads();
    auto finish = [&](int i, float4 sum) {
        store(y, first_token + i / 8 % (8 * TOKEN_TILES), first_tile + i / (64 * TOKEN_TILES), i % 8, sum);
    };
#pragma unroll 1
    for (int i = threadIdx.x; i < SUMS; i += THREADS) {
        float4 sum = sums[i];
#pragma unroll
        for (int part = 1; part < K_WARPS; ++part) sum = add(sum, sums[part * SUMS + i]);
        if (CLUSTER == 1) {
            finish(i, sum);
        } else {
            sums[i] = sum;
        }
    }
    if (CLUSTER == 1) return;
    cluster_sync();
#pragma unroll 1
    for (int i = rank * (SUMS / CLUSTER) + threadIdx.x; i < (rank + 1) * (SUMS / CLUSTER); i += THREADS) {
        float4 sum = load_cluster16(sums + i, 0);
#pragma unroll
        for (int part = 1; part < CLUSTER; ++part) sum = add(sum, load_cluster16(sums + i, part));
        finish(i, sum);
    }
    cluster_sync();  // nobody leaves while others read its sums
}
