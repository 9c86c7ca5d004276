// mla_attention, expanded, a segment of positions added to the sums of every row: 128 rows of a head a block.
//
// A warp keeps 16 rows' queries, scores and sums in registers. Tiles of 64 keys and of 64 values, which lie in the workspace
// as shared memory wants them, come through a ring of two each. The first warp asks the copy engine for them between its
// scores and its sums: the keys after next, the next values. Warps tell it which they are done with, and no barrier stops
// all of them together. Rows with the most positions begin first. The positions that a block's rows see in the segment are
// cut into SPLITS parts, so that few rows fill the chip too. A row's largest score, sum of weights and sums rest in the
// workspace between segments.
//
// Constants: those of expanded.cuh; SCALE (float32 bits of softmax_scale log2 e). Bytes moved: 672 B a head and position for
// every 128 rows, mostly from L2. Shared memory: 86,080 B.
#include "attention.cuh"
#include "expanded.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS, ROWS = 16 * WARPS, TILE = 64;
constexpr int TILES = (TOKENS + ROWS - 1) / ROWS;

struct Shared {
    u16 keys[2][TILE * K_STRIDE], values[2][TILE * V_STRIDE];
    u64 keys_full[2], keys_free[2], values_full[2], values_free[2];
};

extern "C" __global__ __launch_bounds__(THREADS, 1) void attend(EXPANDED_PARAMETERS) {
    DYNAMIC_SHARED(memory);
    Shared& shared = *(Shared*)memory;
    const int head = blockIdx.x % HEADS, split = blockIdx.x / HEADS % SPLITS;
    const int first = (TILES - 1 - (int)blockIdx.x / (HEADS * SPLITS)) * ROWS;  // row of the request
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    if (threadIdx.x < 2) {
        mbarrier_init(&shared.keys_full[threadIdx.x]);
        mbarrier_init(&shared.keys_free[threadIdx.x], WARPS);
        mbarrier_init(&shared.values_full[threadIdx.x]);
        mbarrier_init(&shared.values_free[threadIdx.x], WARPS);
    }
    wait_for_previous_kernel();
    allow_next_kernel();
    const Request request = find_request(first_row, request_rows, context_len);
    if (first >= request.rows) return;
    const int start = (int)segment * SEGMENT;
    const int seen = request.context + min(first + ROWS, request.rows) - start;  // by the last row
    const int tiles = (min(seen, SEGMENT) + TILE - 1) / TILE;
    if (tiles <= 0) return;
    const int part = (tiles + SPLITS - 1) / SPLITS;
    const int begin = min(split * part, tiles), count = min(begin + part, tiles) - begin;
    if (count == 0 && segment > 0) return;
    __syncthreads();
    auto load_keys = [&](int i) {
        u64* full = &shared.keys_full[i % 2];
        mbarrier_expect(full, sizeof(shared.keys[0]));
        bulk_copy(shared.keys[i % 2], keys(workspace, head) + (u64)(begin + i) * TILE * K_STRIDE, sizeof(shared.keys[0]),
                  full);
    };
    auto load_values = [&](int i) {
        u64* full = &shared.values_full[i % 2];
        mbarrier_expect(full, sizeof(shared.values[0]));
        bulk_copy(shared.values[i % 2], values(workspace, head) + (u64)(begin + i) * TILE * V_STRIDE,
                  sizeof(shared.values[0]), full);
    };
    if (threadIdx.x == 0 && count > 0) {
        load_keys(0);
        load_values(0);
        if (count > 1) load_keys(1);
    }
    const int rows[2] = {first + 16 * warp + g, first + 16 * warp + g + 8};
    u32 qa[DIM / 16][4];
    float sum[V / 8][4] = {}, most[2] = {-INFINITY, -INFINITY}, total[2] = {};
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = request.first + min(rows[h], request.rows - 1);
        load_query(qa, h, q + ((u64)row * HEADS + head) * DIM);
        if (segment == 0) continue;
        const float2 weight = *weights(workspace, place(split, row, head));
        most[h] = weight.x;
        total[h] = t == 0 ? weight.y : 0.f;
        if (weight.x == -INFINITY) continue;
        const float* old = sums(workspace, place(split, row, head)) + 2 * t;
#pragma unroll
        for (int n = 0; n < V / 8; n++) {
            const float2 pair = *(const float2*)(old + 8 * n);
            sum[n][2 * h] = pair.x;
            sum[n][2 * h + 1] = pair.y;
        }
    }
    const float scale = __uint_as_float(SCALE);
#pragma unroll 1
    for (int i = 0; i < count; i++) {
        mbarrier_wait(&shared.keys_full[i % 2], i / 2 & 1);
        float scores[TILE / 8][4] = {};
        add_scores<K_STRIDE>(scores, qa, shared.keys[i % 2]);
        __syncwarp();
        if (lane == 0) mbarrier_arrive(&shared.keys_free[i % 2]);
        // a row sees the positions up to its own; what lies past the request's end is further still
        const int position = start + (begin + i) * TILE;
        if (position + TILE - 1 > request.context + first + 16 * warp) {
#pragma unroll
            for (int n = 0; n < TILE / 8; n++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    if (position + 8 * n + 2 * t + j % 2 > request.context + rows[j / 2]) scores[n][j] = -INFINITY;
        }
        float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
        for (int n = 0; n < TILE / 8; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) largest[j / 2] = fmaxf(largest[j / 2], scores[n][j]);
        float base[2];
        bool moved = false;
#pragma unroll
        for (int h = 0; h < 2; h++) {
#pragma unroll
            for (int d = 1; d < 4; d <<= 1) largest[h] = fmaxf(largest[h], __shfl_xor_sync(~0u, largest[h], d));
            largest[h] = fmaxf(most[h], largest[h] * scale);
            moved |= largest[h] != most[h];
            base[h] = largest[h] == -INFINITY ? 0.f : largest[h];  // nothing seen yet: all weights 0
        }
        if (__any_sync(~0u, moved)) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float factor = exp2f(most[h] - base[h]);
                most[h] = largest[h];
                total[h] *= factor;
#pragma unroll
                for (int n = 0; n < V / 8; n++) sum[n][2 * h] *= factor, sum[n][2 * h + 1] *= factor;
            }
        }
        if (threadIdx.x == 0) {
            if (i + 2 < count) {
                mbarrier_wait(&shared.keys_free[i % 2], i / 2 & 1);
                load_keys(i + 2);
            }
            if (i + 1 < count) {
                if (i > 0) mbarrier_wait(&shared.values_free[(i - 1) % 2], (i - 1) / 2 & 1);
                load_values(i + 1);
            }
        }
        __syncwarp();
        mbarrier_wait(&shared.values_full[i % 2], i / 2 & 1);
        add_values<V_STRIDE>(sum, total, scores, scale, base, shared.values[i % 2]);
        __syncwarp();
        if (lane == 0) mbarrier_arrive(&shared.values_free[i % 2]);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int d = 1; d < 4; d <<= 1) total[h] += __shfl_xor_sync(~0u, total[h], d);
        if (rows[h] >= request.rows) continue;
        const u64 at = place(split, request.first + rows[h], head);
        store_sums(sums(workspace, at), sum, h);
        if (t == 0) *weights(workspace, at) = make_float2(most[h], total[h]);
    }
}
