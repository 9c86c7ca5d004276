// The work of a pass: blocks of routes that share an expert. Constant: EXPERTS.
#pragma once
#include "ptx.cuh"

struct Block {
    u32 expert_count;  // expert | routes of the block << 16
    int first;         // its routes are sorted_routes[first ..]

    __device__ __forceinline__ int expert() const { return expert_count & 0xffff; }
    __device__ __forceinline__ int count() const { return expert_count >> 16; }
};

constexpr int MAX_WARPS = 32;

// Writes the blocks of all experts that have routes to `blocks` (shared memory), in the order of the experts, and
// returns their number. An expert's routes are cut evenly into blocks of at most MOST. All threads call it;
// `scratch` is shared memory for MAX_WARPS + 1 ints.
template <int MOST, int THREADS>
__device__ __forceinline__ int list_blocks(const int* __restrict__ offsets, Block* blocks, int* scratch) {
    constexpr int EACH = (EXPERTS + THREADS - 1) / THREADS;  // experts of a thread
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, expert = EACH * threadIdx.x;
    int bounds[EACH + 1], end = 0;
#pragma unroll
    for (int i = 0; i <= EACH; ++i) bounds[i] = offsets[min(expert + i, EXPERTS)];
#pragma unroll
    for (int i = 0; i < EACH; ++i) end += (bounds[i + 1] - bounds[i] + MOST - 1) / MOST;
    const int own = end;
    for (int step = 1; step < 32; step *= 2) {  // inclusive sum over the threads
        const int before = __shfl_up_sync(0xffffffffu, end, step);
        if (lane >= step) end += before;
    }
    if (lane == 31) scratch[warp] = end;
    __syncthreads();
    int total = 0;
#pragma unroll
    for (int i = 0; i < THREADS / 32; ++i) {
        if (i == warp) end += total;
        total += scratch[i];
    }
    int place = end - own;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int routes = bounds[i + 1] - bounds[i], parts = (routes + MOST - 1) / MOST;
        for (int part = 0; part < parts; ++part) {
            const int from = routes * part / parts, to = routes * (part + 1) / parts;
            blocks[place++] = {(u32)(expert + i) | (u32)(to - from) << 16, bounds[i] + from};
        }
    }
    __syncthreads();
    return total;
}

// Zeros the rows of y [COUNT, WIDTH] of routes that do not exist (padding tokens). All threads of one block call it;
// `present` is shared memory for COUNT bits that nobody uses any more.
template <int COUNT, int WIDTH, int THREADS>
__device__ __forceinline__ void clear_absent_routes(const int* sorted_routes, int listed, u16* y, u32* present) {
    if (listed == COUNT) return;
    __syncthreads();
    for (int i = threadIdx.x; i < (COUNT + 31) / 32; i += THREADS) present[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < listed; i += THREADS) {
        const int route = sorted_routes[i];
        atomicOr(present + route / 32, 1u << route % 32);
    }
    __syncthreads();
    for (int route = threadIdx.x / 32; route < COUNT; route += THREADS / 32) {
        if (present[route / 32] >> route % 32 & 1) continue;
        for (int i = threadIdx.x % 32; i < WIDTH; i += 32) y[(u64)route * WIDTH + i] = 0;
    }
}
