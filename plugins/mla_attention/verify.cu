// mla_attention, absorbed: softmax(scale q . [latent ; k_rope]) times the latents, of all rows over their paged context.
//
// Work split: verify.cuh. A block keeps QUERIES query rows as fragments in registers (its warps share the rows and the
// columns of the scores' sum: 1 or 2 row groups x 4 parts of the 576, with 16 rows also 2 halves of a tile's positions), and a
// ring of tiles of 16 positions in shared memory, filled row by row by the copy engine. A tile's scores of all warps meet in
// shared memory, some threads take the softmax of each row, then every warp adds 64 of the latent's 512 columns for all
// rows. Scores of a tile are multiplied before the sums of the tile before it, and each warp tells the others by barriers when
// it has put its scores or weights down: a warp that waits for neither goes on, so softmax and products of different
// warps overlap. Only tiles that reach the pass's own rows look at the tree mask. Positions past the end are zeroed
// in shared memory: what a page holds there is not the request's.
//
// Constants: those of verify.cuh; MT (QUERIES = 16 MT), STAGES; SCALE (float32 bits of softmax_scale log2 e); MASKED, WORDS of
// a mask row. Bytes moved: the KV of every request once per item, and the partials. Limits: C = 512, P = 64, PAGE_SIZE a
// multiple of 16. Shared memory: 18,688 B a stage, 5 to 18 KB of scores, up to 4 KB of weights.
#include "verify.cuh"

constexpr int WARPS = 8, THREADS = 256;
constexpr int WIDTH = C + P, STRIDE = 2 * WIDTH + 16;  // bytes of a row in shared memory: 16 more, no bank conflicts
constexpr int KP = 4, GROUPS = MT == 4 ? 2 : MT, NP = WARPS / (GROUPS * KP);
constexpr int GROUP = MT / GROUPS, STEPS = WIDTH / 16 / KP, COLUMNS = TILE / NP;  // of a warp's part of the scores
constexpr int SHARERS = THREADS / QUERIES, SPAN = TILE / SHARERS;  // threads of a row's softmax, columns of one
constexpr int OWN = C / WARPS;                                     // latent columns of a warp
constexpr int S_STRIDE = TILE + 2;
static_assert(C == 512 && P == 64 && GROUPS * KP * NP == WARPS && QUERIES == 16 * MT, "shapes of this kernel");

struct Shared {
    u8 kv[STAGES][TILE * STRIDE];
    u16 weights[2][QUERIES][TILE];  // the halves of a row in the order that `weight_at` gives
    float scores[KP][QUERIES][S_STRIDE];
    float factor[2][QUERIES];
    u64 full[STAGES], scored, weighed;
    Work work;
    int unit;
};

// Bytes from the start of weights to a half of a row: rows 4 to 7 of 8 have theirs swapped, no bank conflicts.
__device__ __forceinline__ u32 weight_at(int row, int half) { return 2 * TILE * row + 16 * (half ^ (row >> 2 & 1)); }

extern "C" __global__ __launch_bounds__(THREADS, 1) void verify(ATTENTION_PARAMETERS) {
    DYNAMIC_SHARED(memory);
    Shared& shared = *(Shared*)memory;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    if (threadIdx.x < STAGES) mbarrier_init(&shared.full[threadIdx.x]);
    if (threadIdx.x == 32) {
        mbarrier_init(&shared.scored, WARPS);
        mbarrier_init(&shared.weighed, WARPS);
    }
    wait_for_previous_kernel();
    allow_next_kernel();
    if (warp == 0) plan_work(shared.work, first_row, request_rows, context_len);
    __syncthreads();
    const Work& work = shared.work;
    const float scale = __uint_as_float(SCALE);

    u32 uses = 0;  // tiles since the start: stage and phase of the ring, phase of both barriers
    if (threadIdx.x == 0) shared.unit = blockIdx.x * work.chunk;
    while (true) {
        __syncthreads();
        const Item item = find_item(work, shared.unit, (blockIdx.x + 1) * work.chunk);
        if (item.request < 0) break;
        const Request& request = work.requests[item.request];
        const int r = item.request, index = item.index, stop = item.stop;
        auto load = [&](int tile, u32 to) {  // by the first warp, a lane a row
            const int position = tile * TILE;
            const u64 slot = (u64)block_table[r * PAGES + position / PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE + lane;
            if (lane == 0) mbarrier_expect(&shared.full[to], TILE * 2 * WIDTH);
            __syncwarp();
            if (lane < TILE)
                bulk_copy(shared.kv[to] + lane * STRIDE, kv_pool + (layer * SLOTS + slot) * WIDTH, 2 * WIDTH,
                          &shared.full[to]);
        };
        if (warp == 0)
            for (int i = 0; i < STAGES - 1 && item.first_tile + i < stop; i++)
                load(item.first_tile + i, (uses + i) % STAGES);
        // this warp's part of the query rows
        const int m = warp / (KP * NP) * GROUP, k_part = warp / NP % KP, half = warp % NP;
        const int queries = min(request.rows * HEADS - index * QUERIES, QUERIES);
        const u16* q_item = q + ((u64)request.first * HEADS + index * QUERIES) * WIDTH + k_part * STEPS * 16 + 2 * t;
        u32 qa[GROUP][STEPS][4];
#pragma unroll
        for (int j = 0; j < GROUP; j++)
#pragma unroll
            for (int s = 0; s < STEPS; s++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int row = 16 * (m + j) + g + 8 * (i % 2);
                    const u32* from = (const u32*)(q_item + (u64)min(row, queries - 1) * WIDTH + 16 * s + 8 * (i / 2));
                    qa[j][s][i] = row < queries ? *from : 0u;
                }
        float sums[MT][OWN / 8][4] = {};
        // of the softmax: a row, and some of its columns
        const int row = threadIdx.x / SHARERS, column = threadIdx.x % SHARERS * SPAN;
        float largest = -INFINITY, total = 0.f;  // the row's largest score; the sum of this thread's weights

#pragma unroll 1
        for (int tile = item.first_tile;; tile++) {
            float acc[GROUP][2][4] = {};
            if (tile < stop) {
                u8* kv = shared.kv[uses % STAGES];
                mbarrier_wait(&shared.full[uses % STAGES], uses / STAGES & 1);
                if ((tile + 1) * TILE > request.context + request.rows) {
                    for (int i = threadIdx.x; i < TILE * (WIDTH / 8); i += THREADS)
                        if (tile * TILE + i / (WIDTH / 8) >= request.context + request.rows)
                            *(uint4*)(kv + i / (WIDTH / 8) * STRIDE + i % (WIDTH / 8) * 16) = make_uint4(0, 0, 0, 0);
                    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the copy engine writes here again
                    __syncthreads();
                }
                if (NP == 1) {
                    const u32 at = shared_address(kv) + (lane % 8 + lane / 16 * 8) * STRIDE + k_part * STEPS * 32 +
                                   lane / 8 % 2 * 16;
#pragma unroll
                    for (int s = 0; s < STEPS; s++) {
                        const uint4 b = ldmatrix(at + 32 * s);
#pragma unroll
                        for (int j = 0; j < GROUP; j++) {
                            const u32(&a)[4] = qa[j][s];
                            mma_16x8x16(acc[j][0], a[0], a[1], a[2], a[3], b.x, b.y, acc[j][0]);
                            mma_16x8x16(acc[j][1], a[0], a[1], a[2], a[3], b.z, b.w, acc[j][1]);
                        }
                    }
                } else {  // two steps of 8 positions at a time, in two sums; the last reads past its part
                    const u32 at = shared_address(kv) + (half * COLUMNS + lane % 8) * STRIDE + k_part * STEPS * 32 +
                                   lane / 8 * 16;
#pragma unroll
                    for (int s = 0; s < STEPS; s += 2) {
                        const uint4 b = ldmatrix(at + 32 * s);
                        const u32(&a)[4] = qa[0][s];
                        mma_16x8x16(acc[0][0], a[0], a[1], a[2], a[3], b.x, b.y, acc[0][0]);
                        if (s + 1 == STEPS) continue;
                        const u32(&next)[4] = qa[0][s + 1];
                        mma_16x8x16(acc[0][1], next[0], next[1], next[2], next[3], b.z, b.w, acc[0][1]);
                    }
#pragma unroll
                    for (int i = 0; i < 4; i++) acc[0][0][i] += acc[0][1][i];
                }
            }
            // the weights of the tile before are there, and nobody reads the scores or the tile before that any more
            if (tile > item.first_tile) mbarrier_wait(&shared.weighed, (uses - 1) & 1);
            if (tile < stop) {
#pragma unroll
                for (int j = 0; j < GROUP; j++)
#pragma unroll
                    for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
                        for (int i = 0; i < 2; i++)
                            *(float2*)&shared
                                 .scores[k_part][16 * (m + j) + g + 8 * i][half * COLUMNS + 8 * n + 2 * t] =
                                make_float2(acc[j][n][2 * i], acc[j][n][2 * i + 1]);
                __syncwarp();
                if (lane == 0) mbarrier_arrive(&shared.scored);
                const int next = tile + STAGES - 2;  // takes the place of the tile before the one before
                if (warp == 0 && tile > item.first_tile && next < stop) load(next, (uses + STAGES - 2) % STAGES);
            }
            if (tile > item.first_tile) {
                const u32 buffer = (uses - 1) & 1;
                bool moved = false;
                for (int i = lane; i < QUERIES; i += 32) moved |= shared.factor[buffer][i] != 1.f;
                if (__any_sync(~0u, moved)) {
#pragma unroll
                    for (int i = 0; i < MT; i++)
#pragma unroll
                        for (int h = 0; h < 2; h++) {
                            const float factor = shared.factor[buffer][16 * i + 8 * h + g];
#pragma unroll
                            for (int n = 0; n < OWN / 8; n++) {
                                sums[i][n][2 * h] *= factor;
                                sums[i][n][2 * h + 1] *= factor;
                            }
                        }
                }
                const u32 w_at = shared_address(shared.weights[buffer]) + weight_at(lane % 16, lane / 16);
                const u32 v_at = shared_address(shared.kv[(uses - 1) % STAGES]) + lane % 16 * STRIDE + 2 * (OWN * warp + lane / 16 * 8);
                uint4 a[MT];
#pragma unroll
                for (int i = 0; i < MT; i++) a[i] = ldmatrix(w_at + 32 * TILE * i);
#pragma unroll
                for (int n = 0; n < OWN / 16; n++) {
                    const uint4 b = ldmatrix_trans(v_at + 32 * n);
#pragma unroll
                    for (int i = 0; i < MT; i++) {
                        mma_16x8x16(sums[i][2 * n], a[i].x, a[i].y, a[i].z, a[i].w, b.x, b.y, sums[i][2 * n]);
                        mma_16x8x16(sums[i][2 * n + 1], a[i].x, a[i].y, a[i].z, a[i].w, b.z, b.w,
                                    sums[i][2 * n + 1]);
                    }
                }
            }
            if (tile == stop) break;
            mbarrier_wait(&shared.scored, uses & 1);
            {
                float score[SPAN], most = largest;
#pragma unroll
                for (int c = 0; c < SPAN; c++) score[c] = shared.scores[0][row][column + c];
#pragma unroll
                for (int k = 1; k < KP; k++)
#pragma unroll
                    for (int c = 0; c < SPAN; c++) score[c] += shared.scores[k][row][column + c];
                const bool own_rows = (tile + 1) * TILE > request.context;
#pragma unroll
                for (int c = 0; c < SPAN; c++) {
                    score[c] *= scale;
                    const int own = tile * TILE + column + c - request.context;
                    if (own_rows && own >= 0) {  // this pass's own rows
                        const int token = (index * QUERIES + min(row, queries - 1)) / HEADS;
                        bool seen = own < request.rows;
                        if (seen)
                            seen = MASKED ? mask[(u64)(request.first + token) * WORDS + own / 32] >> (own % 32) & 1
                                          : own <= token;
                        if (!seen) score[c] = -INFINITY;
                    }
                    most = fmaxf(most, score[c]);
                }
#pragma unroll
                for (int d = 1; d < SHARERS; d <<= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, d));
                const float base = most == -INFINITY ? 0.f : most;  // nothing seen yet: all weights 0
                const float factor = largest == most ? 1.f : exp2f(largest - base);
                total *= factor;
                u16* to = (u16*)((u8*)shared.weights[uses & 1] + weight_at(row, column / 8)) + column % 8;
#pragma unroll
                for (int c = 0; c < SPAN; c++) {
                    to[c] = bf16_bits(exp2f(score[c] - base));
                    total += bf16_value(to[c]);
                }
                largest = most;
                if (threadIdx.x % SHARERS == 0) shared.factor[uses & 1][row] = factor;
            }
            __syncwarp();
            if (lane == 0) mbarrier_arrive(&shared.weighed);
            uses++;
        }
        __syncthreads();
        const Item done = find_item(work, shared.unit, (blockIdx.x + 1) * work.chunk);  // again: no registers until here
        const int place = blockIdx.x + request.item + done.index;
        float* to = partial_sums(workspace, place);
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int row = 16 * i + 8 * h + g;
                if (row >= queries) continue;
#pragma unroll
                for (int n = 0; n < OWN / 8; n++)
                    *(float2*)(to + (u64)row * C + OWN * warp + 8 * n + 2 * t) =
                        make_float2(sums[i][n][2 * h], sums[i][n][2 * h + 1]);
            }
#pragma unroll
        for (int d = 1; d < SHARERS; d <<= 1) total += __shfl_xor_sync(~0u, total, d);
        if (threadIdx.x % SHARERS == 0) partial_weights(workspace, place)[row] = make_float2(largest, total);
        __syncthreads();
        if (threadIdx.x == 0) shared.unit += done.stop - done.first_tile;
    }
}
