// sample, first part: the largest score of each split of a row, with its token. A block a split and row.
//
// Bytes moved: the logits, read once (and mask, bias and counts where a row has them).
#include "score.cuh"

constexpr int THREADS = 256;

extern "C" __global__ __launch_bounds__(THREADS) void largest(SAMPLE_PARAMETERS) {
    __shared__ Row row;
    __shared__ u64 parts[THREADS / 32];
    const int t = blockIdx.y;
    wait_for_previous_kernel();
    allow_next_kernel();
    if (threadIdx.x == 0) FILL_ROW(row, t);
    __syncthreads();
    Partial& partial = largest_partials(workspace, t)[blockIdx.x];
    const bool plain = !row.masked && !row.changed;
    u64 best = 0;
    int seen = 0;
    if (row.request >= 0) {
#pragma unroll 8
        for (int v = blockIdx.x * THREADS + threadIdx.x; v < VOCAB; v += SPLITS * THREADS) {
            const float logit = row.logits[v];
            const float s = plain ? logit : score(row, v, logit);
            seen |= logit < INFINITY ? (logit > -INFINITY ? REAL_LOGIT : 0) : BAD_LOGIT;
            seen |= s < INFINITY ? 0 : BAD_SCORE;
            const u64 key = order_key(s, v);
            best = key > best ? key : best;
        }
    }
    best = block_max<THREADS>(best, parts);
    seen = (__syncthreads_or(seen & BAD_LOGIT) ? BAD_LOGIT : 0) | (__syncthreads_or(seen & BAD_SCORE) ? BAD_SCORE : 0) |
           (__syncthreads_or(seen & REAL_LOGIT) ? REAL_LOGIT : 0);
    if (threadIdx.x == 0) partial.best = best, partial.seen = seen;
}
