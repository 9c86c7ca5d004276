// sample, last part: the token of every row that is drawn with noise. A block a row; rows without noise are done.
//
// With limits: keys of all tokens that could be kept go to a list (those under a bound that needs one pass to find cannot
// be), then bit by bit the smallest key that top_k keeps, and the smallest that top_p keeps of those, by counting and by
// adding probabilities as integers, whose sum does not depend on the order. Bytes moved: the logits of the row, up to four
// times (from the L2), and the list, some 30 times (from L1 or L2).
#include "score.cuh"

constexpr int THREADS = 1024;
constexpr int WARPS = THREADS / 32;

struct Sum {
    u64 mass;
    int count;
};

// Sums over the block, in every thread.
__device__ Sum block_sum(Sum own, Sum* parts) {
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) {
        own.mass += __shfl_xor_sync(~0u, own.mass, d);
        own.count += __shfl_xor_sync(~0u, own.count, d);
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = own;
    __syncthreads();
    Sum sum = parts[threadIdx.x % 32];
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) {
        sum.mass += __shfl_xor_sync(~0u, sum.mass, d);
        sum.count += __shfl_xor_sync(~0u, sum.count, d);
    }
    return sum;
}

__device__ __forceinline__ u64 fixed(float v, float unit) { return (u64)(v * unit); }

// The probability of a score, as softmax of float32 gives it, in units of 2^-52.
__device__ __forceinline__ u64 chance(u64 key, float total) {
    return (u64)((double)__fdiv_rn(expf(key_value(key)), total) * 0x1p52);
}

// The smallest key of the list such that those from it on satisfy `enough`; `enough` holds for all of them together.
template <typename Enough>
__device__ u64 threshold(const u64* list, int size, u64 from, float total, Sum* parts, Enough enough) {
    u64 low = from, high = ~0ull;  // enough from low on, not from high on
    while (true) {
        u64 least = ~0ull, most = 0;  // of the keys in [low, high)
        for (int i = threadIdx.x; i < size; i += THREADS) {
            const u64 key = list[i];
            if (key < low || key >= high) continue;
            least = key < least ? key : least;
            most = key > most ? key : most;
        }
        __shared__ u64 ends[2 * WARPS];
        const u64 up = warp_max(most), down = ~warp_max(~least);
        __syncthreads();
        if (threadIdx.x % 32 == 0) ends[threadIdx.x / 32] = up, ends[WARPS + threadIdx.x / 32] = down;
        __syncthreads();
        most = warp_max(ends[threadIdx.x % 32]);
        least = ~warp_max(~ends[WARPS + threadIdx.x % 32]);
        if (least >= most) return least;  // one key is left
        const int bit = 63 - __clzll((long long)(least ^ most));
        const u64 middle = most >> bit << bit;  // least is below it, most is not
        Sum own = {0, 0};
        for (int i = threadIdx.x; i < size; i += THREADS)
            if (list[i] >= middle) own.mass += total > 0.f ? chance(list[i], total) : 0, own.count++;
        if (enough(block_sum(own, parts)))
            low = middle;
        else
            high = middle;
    }
}

extern "C" __global__ __launch_bounds__(THREADS) void finish(SAMPLE_PARAMETERS) {
    __shared__ Row row;
    __shared__ Verdict known;
    __shared__ Sum parts[WARPS];
    __shared__ u64 keys[THREADS], bound;
    __shared__ int size;
    const int t = blockIdx.x;
    wait_for_previous_kernel();
    allow_next_kernel();
    if (threadIdx.x == 0) {
        FILL_ROW(row, t);
        known = verdict(row, largest_partials(workspace, t));
        size = 0;
        bound = 0;
    }
    __syncthreads();
    const int slot = max(row.request, 0);
    const float heat = temperature[slot];
    if (row.request < 0 || known.token < 0 || !(heat > 0.f)) return;
    const int limit = top_k[slot] < VOCAB ? top_k[slot] : 0;
    const float mass = top_p[slot], share = min_p[slot];
    if (limit <= 0 && !(mass < 1.f) && !(share > 0.f)) {
        u64 best = threadIdx.x < SPLITS ? noisy_partials(workspace, t)[threadIdx.x].best : 0;
        best = block_max<THREADS>(best, keys);
        if (threadIdx.x == 0) out[t] = (int)key_index(best);
        return;
    }
    auto scaled = [&](int v) { return __fdiv_rn(__fsub_rn(score(row, v, row.logits[v]), known.largest), heat); };

    // what cannot be kept: under the limit-th largest of the threads' maxima; or with less than (1 - top_p) / VOCAB
    u64 own = 0;
    Sum all = {0, 0};
    for (int v = threadIdx.x; v < VOCAB; v += THREADS) {
        const float s = scaled(v);
        const u64 key = order_key(s, v);
        own = key > own ? key : own;
        all.mass += fixed(expf(s), 0x1p40f);
    }
    keys[threadIdx.x] = own;
    all = block_sum(all, parts);  // synchronises
    float total = (float)((double)all.mass * 0x1p-40);
    u64 least = 0;
    if (limit > 0 && limit <= THREADS) {
        int before = 0;
        for (int i = 0; i < THREADS; i++) before += keys[i] > own;
        if (before == limit - 1) bound = own;
        __syncthreads();
        least = bound;
    } else if (limit <= 0 && mass < 1.f) {
        const float floor = logf(total * (1.f - mass) / VOCAB) - 0.01f;  // the margin is more than the logarithm's error
        least = order_key(floor, 0xffffffffu);
    }
    u64* list = candidates(workspace, t);
    for (int v = threadIdx.x; v < VOCAB; v += THREADS) {
        const u64 key = order_key(scaled(v), v);
        if (key >= least && key_value(key) > -INFINITY) list[atomicAdd(&size, 1)] = key;
    }
    __syncthreads();
    const int count = size;

    u64 kept = 0;
    if (limit > 0) {
        if (limit < count) kept = threshold(list, count, 0, 0.f, parts, [&](Sum sum) { return sum.count >= limit; });
        Sum rest = {0, 0};
        for (int i = threadIdx.x; i < count; i += THREADS)
            if (list[i] >= kept) rest.mass += fixed(expf(key_value(list[i])), 0x1p40f);
        total = (float)((double)block_sum(rest, parts).mass * 0x1p-40);
    }
    if (mass < 1.f) {
        const double wanted = (double)mass;
        Sum rest = {0, 0};
        for (int i = threadIdx.x; i < count; i += THREADS)
            if (list[i] >= kept) rest.mass += chance(list[i], total);
        // rounding may leave all of them together short of top_p: then all are kept
        if ((double)block_sum(rest, parts).mass * 0x1p-52 >= wanted)
            kept = threshold(list, count, kept, total, parts,
                             [&](Sum sum) { return (double)sum.mass * 0x1p-52 >= wanted; });
    }
    const float fewest = fminf(share, 1.f);
    const u64 noise = noise_key(seed[slot], positions[t] + 1);
    u64 best = 0;
    for (int i = threadIdx.x; i < count; i += THREADS) {
        const u64 key = list[i];
        const float s = key_value(key);
        if (key < kept || (share > 0.f && !(expf(s) >= fewest))) continue;
        const u64 noisy = order_key(__fadd_rn(s, gumbel(noise, key_index(key))), key_index(key));
        best = noisy > best ? noisy : best;
    }
    best = block_max<THREADS>(best, keys);
    if (threadIdx.x == 0) out[t] = (int)key_index(best);
}
