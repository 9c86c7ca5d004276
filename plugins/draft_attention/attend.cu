// draft_attention, second part: attention of a block's rows over a split of the context; the first split has the block's own
// keys too. A thread block a split, KV head and DFlash block.
//
// A warp takes 16 query rows (row of the block, head of the group), whose queries and sums it keeps in registers; keys and
// values come in tiles of 64 through two stages of shared memory. Constants: those of block.cuh, WARPS (of 16 rows), SCALE
// (float32 bits of log2 e / sqrt(DIM)). Bytes moved: the context's keys and values, once. Shared memory: 272 B a key and value
// of 128, in two stages: 70 KB.
#include "attention.cuh"
#include "block.cuh"

constexpr int THREADS = 32 * WARPS, VECTORS = DIM / 8;
constexpr int STRIDE = DIM + 8;

struct Stage {
    u16 keys[TILE][STRIDE], values[TILE][STRIDE];
};

extern "C" __global__ __launch_bounds__(THREADS) void attend(BLOCK_PARAMETERS) {
    DYNAMIC_SHARED(memory);
    Stage* stages = (Stage*)memory;
    const int split = blockIdx.x, group = blockIdx.y, block = blockIdx.z;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int place = (block * GROUPS + group) * SPLITS + split;
    wait_for_previous_kernel();
    allow_next_kernel();
    const int request = draft_requests[block];
    if (request < 0) return;  // the last part writes its zeros
    const Context context = context_of(request, context_len, draft_start);
    const int tiles = (context.stop - context.start + TILE - 1) / TILE, chunk = (tiles + SPLITS - 1) / SPLITS;
    const int first = min(split * chunk, tiles), last = min(first + chunk, tiles);
    const int count = last - first + (split == 0);  // the block's own keys come last
    const u16* pool = draft_kv + (u64)layer * 2 * SLOTS * GROUPS * DIM + group * DIM;

    auto load = [&](int i) {
        Stage& stage = stages[i % 2];
        const bool own = split == 0 && i == count - 1;
        for (int j = threadIdx.x; j < TILE * VECTORS; j += THREADS) {
            const int row = j / VECTORS, v = 8 * (j % VECTORS);
            const u16 *key, *value;
            bool exists;
            if (own) {
                const u64 at = (u64)block * BLOCK + min(row, BLOCK - 1);
                exists = row < BLOCK;
                key = own_keys(workspace) + (at * GROUPS + group) * DIM;
                value = qkv + (at * (HEADS + 2 * GROUPS) + HEADS + GROUPS + group) * DIM;
            } else {
                const int wanted = context.start + (first + i) * TILE + row, position = min(wanted, context.stop - 1);
                exists = wanted < context.stop;
                const u64 slot = (u64)block_table[request * PAGES + position / PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE;
                key = pool + slot * GROUPS * DIM;
                value = key + (u64)SLOTS * GROUPS * DIM;
            }
            copy16_or_zero(&stage.keys[row][v], key + v, exists);
            copy16_or_zero(&stage.values[row][v], value + v, exists);
        }
        end_group();
    };
    if (count > 0) load(0);

    u32 qa[DIM / 16][4];
    const int rows[2] = {16 * warp + g, 16 * warp + g + 8};
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = min(rows[h], QUERIES - 1), j = row / (HEADS / GROUPS), head = row % (HEADS / GROUPS);
        const u16* from =
            queries(workspace) + (((u64)block * BLOCK + j) * HEADS + group * (HEADS / GROUPS) + head) * DIM;
        load_query(qa, h, from);
    }
    float sum[DIM / 8][4] = {}, most[2] = {-INFINITY, -INFINITY}, total[2] = {};
#pragma unroll 1
    for (int i = 0; i < count; i++) {
        if (i + 1 < count) load(i + 1);
        if (i + 1 < count)
            copies_left<1>();
        else
            copies_left<0>();
        __syncthreads();
        const Stage& stage = stages[i % 2];
        const bool own = split == 0 && i == count - 1;
        const int valid = own ? BLOCK : min(context.stop - context.start - (first + i) * TILE, TILE);
        float scores[TILE / 8][4] = {};
        add_scores<STRIDE>(scores, qa, stage.keys[0]);
        float largest[2] = {most[0], most[1]};
#pragma unroll
        for (int n = 0; n < TILE / 8; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const bool seen = 8 * n + 2 * t + j % 2 < valid;
                scores[n][j] = seen ? scores[n][j] * __uint_as_float(SCALE) : -INFINITY;
                largest[j / 2] = fmaxf(largest[j / 2], scores[n][j]);
            }
#pragma unroll
        for (int h = 0; h < 2; h++) {
#pragma unroll
            for (int d = 1; d < 4; d <<= 1) largest[h] = fmaxf(largest[h], __shfl_xor_sync(~0u, largest[h], d));
            const float factor = most[h] == largest[h] ? 1.f : exp2f(most[h] - largest[h]);
            most[h] = largest[h];
            total[h] *= factor;
#pragma unroll
            for (int n = 0; n < DIM / 8; n++) sum[n][2 * h] *= factor, sum[n][2 * h + 1] *= factor;
        }
        add_values<STRIDE>(sum, total, scores, 1.f, most, stage.values[0]);
        __syncthreads();
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int d = 1; d < 4; d <<= 1) total[h] += __shfl_xor_sync(~0u, total[h], d);
        if (rows[h] >= QUERIES) continue;
        store_sums(sums(workspace, place) + (u64)rows[h] * DIM, sum, h);
        if (t == 0) weights(workspace, place)[rows[h]] = make_float2(most[h], total[h]);
    }
}
