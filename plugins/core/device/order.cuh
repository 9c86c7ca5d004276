// Floats as integers of the same order, and with their index in ties: the larger key is the larger value, then the lower
// index. Keys of a row are all different, so that whatever is chosen by them is unique.
#pragma once

#include "ptx.cuh"

__device__ __forceinline__ u32 ordered_bits(float v) {
    const u32 bits = __float_as_uint(v + 0.f);  // -0 becomes 0
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float from_ordered_bits(u32 o) { return __uint_as_float(o >> 31 ? o & 0x7fffffffu : ~o); }

__device__ __forceinline__ u64 order_key(float value, u32 index) { return (u64)ordered_bits(value) << 32 | ~index; }
__device__ __forceinline__ float key_value(u64 key) { return from_ordered_bits((u32)(key >> 32)); }
__device__ __forceinline__ u32 key_index(u64 key) { return ~(u32)key; }

__device__ __forceinline__ u64 warp_max(u64 key) {
    const u32 high = __reduce_max_sync(~0u, (u32)(key >> 32));
    const u32 low = __reduce_max_sync(~0u, (u32)(key >> 32) == high ? (u32)key : 0u);
    return (u64)high << 32 | low;
}

// The largest key of the block, in every thread; `parts` has a place for each warp.
template <int threads>
__device__ __forceinline__ u64 block_max(u64 key, u64* parts) {
    key = warp_max(key);
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = key;
    __syncthreads();
    u64 most = 0;
#pragma unroll
    for (int w = 0; w < threads / 32; w++) most = parts[w] > most ? parts[w] : most;
    return most;
}
