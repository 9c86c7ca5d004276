// mla_attention, absorbed: softmax(scale q . [latent ; k_rope]) times the latents, of all rows over their paged context.
//
// Work split: verify.cuh. A block keeps QUERIES query rows as fragments in registers (its warps share the rows and the
// columns of the scores' sum: MT row tiles x KP parts of the 576 x NP halves of a tile's positions), and a ring of two
// tiles of 32 positions in shared memory, filled row by row by the copy engine. Per tile: scores of all warps meet in
// shared memory, some threads take the softmax of each row, then every warp adds 64 of the latent's 512 columns for all
// rows. Only tiles that reach the pass's own rows look at the tree mask. Positions past the end are zeroed
// in shared memory: what a page holds there is not the request's.
//
// Constants: those of verify.cuh; MT (QUERIES = 16 MT); SCALE (float32 bits of softmax_scale log2 e); MASKED, WORDS of a mask
// row. Bytes moved: the KV of every request once per item, and the partials. Limits: C = 512, P = 64, PAGE_SIZE a multiple
// of 32. Shared memory: 74,752 B of KV, 8 to 16 KB of scores, up to 5 KB of weights.
#include "verify.cuh"

constexpr int WARPS = 8, THREADS = 256;
constexpr int WIDTH = C + P, STRIDE = 2 * WIDTH + 16;  // bytes of a row in shared memory: 16 more, no bank conflicts
constexpr int KP = MT == 4 ? 2 : 4, NP = WARPS / (MT * KP);
constexpr int STEPS = WIDTH / 16 / KP, COLUMNS = TILE / NP;  // of a warp's part of the scores
constexpr int SHARERS = THREADS / QUERIES, SPAN = TILE / SHARERS;  // threads of a row's softmax, columns of one
constexpr int OWN = C / WARPS;                                // latent columns of a warp
constexpr int P_STRIDE = TILE + 8, S_STRIDE = TILE + 4;
static_assert(C == 512 && P == 64 && MT * KP * NP == WARPS && QUERIES == 16 * MT, "shapes of this kernel");

struct Shared {
    u8 kv[2][TILE * STRIDE];
    float scores[KP][QUERIES][S_STRIDE];
    u16 weights[QUERIES][P_STRIDE];
    float factor[QUERIES];
    Work work;
    u64 full[2];
    int rescale, unit;
};

extern "C" __global__ __launch_bounds__(THREADS, 1) void verify(ATTENTION_PARAMETERS) {
    DYNAMIC_SHARED(memory);
    Shared& shared = *(Shared*)memory;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    if (threadIdx.x < 2) mbarrier_init(&shared.full[threadIdx.x]);
    wait_for_previous_kernel();
    allow_next_kernel();
    if (warp == 0) plan_work(shared.work, first_row, request_rows, context_len);
    __syncthreads();
    const Work& work = shared.work;
    const float scale = __uint_as_float(SCALE);

    u32 uses = 0;  // tiles since the start: stage and phase of the ring
    if (threadIdx.x == 0) shared.unit = blockIdx.x * work.chunk;
    while (true) {
        __syncthreads();
        const Item item = find_item(work, shared.unit, (blockIdx.x + 1) * work.chunk);
        if (item.request < 0) break;
        const Request& request = work.requests[item.request];
        const int r = item.request, index = item.index, stop = item.stop;
        auto load = [&](int tile, u32 stage) {  // by the first warp, a lane a row
            u8* to = shared.kv[stage] + lane * STRIDE;
            const int position = tile * TILE;
            const u64 slot = (u64)block_table[r * PAGES + position / PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE + lane;
            if (lane == 0) mbarrier_expect(&shared.full[stage], TILE * 2 * WIDTH);
            __syncwarp();
            bulk_copy(to, kv_pool + (layer * SLOTS + slot) * WIDTH, 2 * WIDTH, &shared.full[stage]);
        };
        if (warp == 0) {
            load(item.first_tile, uses % 2);
            if (item.first_tile + 1 < stop) load(item.first_tile + 1, (uses + 1) % 2);
        }
        // this warp's part of the query rows
        const int m = warp / (KP * NP), k_part = warp / NP % KP, half = warp % NP;
        const int queries = min(request.rows * HEADS - index * QUERIES, QUERIES);
        const u16* q_item = q + ((u64)request.first * HEADS + index * QUERIES) * WIDTH + k_part * STEPS * 16 + 2 * t;
        u32 qa[STEPS][4];
#pragma unroll
        for (int s = 0; s < STEPS; s++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int row = 16 * m + g + 8 * (i % 2);
                const u32* from = (const u32*)(q_item + (u64)min(row, queries - 1) * WIDTH + 16 * s + 8 * (i / 2));
                qa[s][i] = row < queries ? *from : 0u;
            }
        float sums[MT][OWN / 8][4] = {};
        // of the softmax: a row, and some of its columns
        const int row = threadIdx.x / SHARERS, column = threadIdx.x % SHARERS * SPAN;
        float largest = -INFINITY, total = 0.f;  // the row's largest score; the sum of this thread's weights

#pragma unroll 1
        for (int tile = item.first_tile; tile < stop; tile++) {
            u8* kv = shared.kv[uses % 2];
            mbarrier_wait(&shared.full[uses % 2], uses / 2 & 1);
            if ((tile + 1) * TILE > request.context + request.rows) {
                for (int i = threadIdx.x; i < TILE * (WIDTH / 8); i += THREADS)
                    if (tile * TILE + i / (WIDTH / 8) >= request.context + request.rows)
                        *(uint4*)(kv + i / (WIDTH / 8) * STRIDE + i % (WIDTH / 8) * 16) = make_uint4(0, 0, 0, 0);
                asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the copy engine writes here again
                __syncthreads();
            }
            {
                float acc[COLUMNS / 8][4] = {};
                const u32 at = shared_address(kv) + (half * COLUMNS + lane % 8 + lane / 16 * 8) * STRIDE +
                               k_part * STEPS * 32 + lane / 8 % 2 * 16;
#pragma unroll
                for (int s = 0; s < STEPS; s++)
#pragma unroll
                    for (int n = 0; n < COLUMNS / 16; n++) {
                        const uint4 b = ldmatrix(at + 16 * n * STRIDE + 32 * s);
                        mma_16x8x16(acc[2 * n], qa[s][0], qa[s][1], qa[s][2], qa[s][3], b.x, b.y, acc[2 * n]);
                        mma_16x8x16(acc[2 * n + 1], qa[s][0], qa[s][1], qa[s][2], qa[s][3], b.z, b.w,
                                    acc[2 * n + 1]);
                    }
#pragma unroll
                for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
                    for (int i = 0; i < 2; i++)
                        *(float2*)&shared.scores[k_part][16 * m + g + 8 * i][half * COLUMNS + 8 * n + 2 * t] =
                            make_float2(acc[n][2 * i], acc[n][2 * i + 1]);
            }
            if (threadIdx.x == 0) shared.rescale = 0;
            __syncthreads();
            {
                float score[SPAN], most = largest;
#pragma unroll
                for (int c = 0; c < SPAN; c += 2) {
                    float2 pair = make_float2(0.f, 0.f);
#pragma unroll
                    for (int k = 0; k < KP; k++) {
                        const float2 part = *(const float2*)&shared.scores[k][row][column + c];
                        pair.x += part.x;
                        pair.y += part.y;
                    }
                    score[c] = pair.x * scale;
                    score[c + 1] = pair.y * scale;
                }
#pragma unroll
                for (int c = 0; c < SPAN; c++) {
                    const int own = tile * TILE + column + c - request.context;
                    if (own >= 0) {  // this pass's own rows
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
                const float factor = largest == most ? 1.f : exp2f(largest - most);
                total *= factor;
#pragma unroll
                for (int c = 0; c < SPAN; c += 2) {
                    const bool none = most == -INFINITY;
                    const u32 pair = bf16_pair(none ? 0.f : exp2f(score[c] - most),
                                               none ? 0.f : exp2f(score[c + 1] - most));
                    total += bf16_low(pair) + bf16_high(pair);
                    *(u32*)&shared.weights[row][column + c] = pair;
                }
                largest = most;
                if (threadIdx.x % SHARERS == 0) shared.factor[row] = factor;
                if (__any_sync(~0u, factor != 1.f) && lane == 0) shared.rescale = 1;
            }
            __syncthreads();
            if (shared.rescale) {
#pragma unroll
                for (int i = 0; i < MT; i++) {
                    const float upper = shared.factor[16 * i + g], lower = shared.factor[16 * i + g + 8];
#pragma unroll
                    for (int n = 0; n < OWN / 8; n++) {
                        sums[i][n][0] *= upper;
                        sums[i][n][1] *= upper;
                        sums[i][n][2] *= lower;
                        sums[i][n][3] *= lower;
                    }
                }
            }
            const u32 w_at = shared_address(shared.weights) + 2 * (lane % 16 * P_STRIDE + lane / 16 * 8);
            const u32 v_at = shared_address(kv) + lane % 16 * STRIDE + 2 * (OWN * warp + lane / 16 * 8);
#pragma unroll
            for (int k = 0; k < TILE; k += 16) {
                uint4 a[MT];
#pragma unroll
                for (int i = 0; i < MT; i++) a[i] = ldmatrix(w_at + 2 * (16 * i * P_STRIDE + k));
#pragma unroll
                for (int n = 0; n < OWN / 16; n++) {
                    const uint4 b = ldmatrix_trans(v_at + k * STRIDE + 32 * n);
#pragma unroll
                    for (int i = 0; i < MT; i++) {
                        mma_16x8x16(sums[i][2 * n], a[i].x, a[i].y, a[i].z, a[i].w, b.x, b.y, sums[i][2 * n]);
                        mma_16x8x16(sums[i][2 * n + 1], a[i].x, a[i].y, a[i].z, a[i].w, b.z, b.w,
                                    sums[i][2 * n + 1]);
                    }
                }
            }
            __syncthreads();
            if (warp == 0 && tile + 2 < stop) load(tile + 2, uses % 2);
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
