// The work of an absorbed attention pass: what every block can work out from the lengths of the requests.
//
// A request with n rows has n HEADS query rows, which lie together in q, and so ceil(n HEADS / QUERIES) items; an item has
// ceil((context + n) / TILE) tiles of KV. All tiles of all items in a row are cut into BLOCKS equal chunks. A block so works
// on the end of an item, on whole items, on the beginning of another, and leaves a partial result for each; no two
// partials have the same block + item, which is their place in the workspace. Equal lengths give equal cuts.
//
// Constants: TOKENS, REQUESTS, HEADS, C (kv_lora_rank), P (qk_rope_head_dim), V (v_head_dim), QUERIES (rows of an item),
// BLOCKS, PARTIALS (places), PAGE_SIZE, PAGES of a block table row, SLOTS of the pool.
#pragma once

#include "operands.cuh"

constexpr int TILE = 16;  // positions

struct Request {
    int first, rows, context;
    int item, unit;  // items and tiles before it

    __device__ __forceinline__ int items() const { return (rows * HEADS + QUERIES - 1) / QUERIES; }
    __device__ __forceinline__ int tiles() const { return rows ? (context + rows + TILE - 1) / TILE : 0; }
};

struct Work {
    Request requests[REQUESTS];
    int chunk;  // tiles of a block
};

// Filled by the first warp; the caller synchronises.
__device__ __forceinline__ void plan_work(Work& work, const int* first_row, const int* request_rows,
                                          const int* context_len) {
    for (int r = threadIdx.x; r < REQUESTS; r += 32) {
        work.requests[r].first = first_row[r];
        work.requests[r].rows = request_rows[r];
        work.requests[r].context = context_len[r];
    }
    __syncwarp();
    if (threadIdx.x != 0) return;
    int item = 0, unit = 0;
    for (int r = 0; r < REQUESTS; r++) {
        Request& request = work.requests[r];
        request.item = item;
        request.unit = unit;
        item += request.items();
        unit += request.items() * request.tiles();
    }
    work.chunk = max((unit + BLOCKS - 1) / BLOCKS, 1);
}

// What a block works on next, from its first tile that is not done.
struct Item {
    int request, index;     // request < 0: nothing is left
    int first_tile, stop;   // of the item's tiles
};

__device__ __forceinline__ Item find_item(const Work& work, int unit, int end) {
    for (int r = 0; r < REQUESTS && unit < end; r++) {
        const Request& request = work.requests[r];
        const int tiles = request.tiles();
        if (unit >= request.unit + request.items() * tiles) continue;
        const int index = (unit - request.unit) / tiles, first = (unit - request.unit) % tiles;
        return {r, index, first, min(tiles, first + end - unit)};
    }
    return {-1, 0, 0, 0};
}

// Workspace: sums float32 [PARTIALS, QUERIES, C], then (largest score in units of log 2, sum of weights) of each row.
__device__ __forceinline__ float* partial_sums(u8* workspace, int place) {
    return (float*)workspace + (u64)place * QUERIES * C;
}
__device__ __forceinline__ float2* partial_weights(u8* workspace, int place) {
    return (float2*)((float*)workspace + (u64)PARTIALS * QUERIES * C) + (u64)place * QUERIES;
}
