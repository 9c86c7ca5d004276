// sample, second part: the token of rows without noise; of those with noise and no limits (top_k, top_p, min_p), the best
// of each split. A block a split and row.
//
// Bytes moved: the logits of rows that are drawn, read once more (from the L2 where they fit).
#include "score.cuh"

constexpr int THREADS = 256;

extern "C" __global__ __launch_bounds__(THREADS) void draw(SAMPLE_PARAMETERS) {
    __shared__ Row row;
    __shared__ u64 parts[THREADS / 32];
    __shared__ Verdict known;
    const int t = blockIdx.y;
    wait_for_previous_kernel();
    allow_next_kernel();
    if (threadIdx.x == 0) {
        FILL_ROW(row, t);
        known = verdict(row, largest_partials(workspace, t));
    }
    __syncthreads();
    const int slot = max(row.request, 0);
    const float heat = temperature[slot];
    if (row.request < 0 || known.token < 0 || !(heat > 0.f)) {
        if (blockIdx.x == 0 && threadIdx.x == 0) out[t] = known.token;
        return;
    }
    const bool limited = (top_k[slot] > 0 && top_k[slot] < VOCAB) || top_p[slot] < 1.f || min_p[slot] > 0.f;
    if (limited) return;
    const u64 noise = noise_key(seed[slot], positions[t] + 1);
    u64 best = 0;
    for (int v = blockIdx.x * THREADS + threadIdx.x; v < VOCAB; v += SPLITS * THREADS) {
        const float s = __fdiv_rn(__fsub_rn(score(row, v, row.logits[v]), known.largest), heat);
        const u64 key = order_key(__fadd_rn(s, gumbel(noise, v)), v);
        best = key > best ? key : best;
    }
    best = block_max<THREADS>(best, parts);
    if (threadIdx.x == 0) noisy_partials(workspace, t)[blockIdx.x].best = best;
}
