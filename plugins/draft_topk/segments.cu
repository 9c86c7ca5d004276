// draft_topk, first half: the K largest logits and the logsumexp of a segment of a row. A block a row and segment.
//
// The K-th largest of the threads' own maxima bounds the K-th largest from below, and at most K threads have anything
// above it: what is not under that bound fits in shared memory, where every key counts those before it. Constants: BLOCK
// (rows of a DFlash block, the first of which predicts nothing), VOCAB, TOP_K, SEGMENTS, PER values a thread. Bytes moved:
// the logits, read once.
#include "topk.cuh"

extern "C" __global__ __launch_bounds__(THREADS) void segments(const float* logits, float* candidates, Part* parts) {
    __shared__ u64 maxima[THREADS];
    __shared__ u64 above[TOP_K * PER];
    __shared__ u64 bound;
    __shared__ int count;
    __shared__ float sums[THREADS / 32];
    const int row = blockIdx.x / (BLOCK - 1) * BLOCK + blockIdx.x % (BLOCK - 1) + 1;
    const int start = blockIdx.y * THREADS * PER;
    Part& part = parts[blockIdx.x * SEGMENTS + blockIdx.y];
    wait_for_previous_kernel();
    allow_next_kernel();
    const float* from = logits + (i64)row * VOCAB;
    float values[PER];
    bool nan = false;
#pragma unroll
    for (int p = 0; p < PER; p++) {
        const int column = start + p * THREADS + threadIdx.x;
        values[p] = column < VOCAB ? from[column] : -INFINITY;
        nan |= isnan(values[p]);
        if (isnan(values[p])) values[p] = -INFINITY;
    }
    u64 own = 0;
#pragma unroll
    for (int p = 0; p < PER; p++) {
        const int column = start + p * THREADS + threadIdx.x;
        const u64 key = column < VOCAB ? order_key(values[p], column) : 0;
        own = key > own ? key : own;
    }
    maxima[threadIdx.x] = own;
    if (threadIdx.x == 0) count = 0, bound = 0;
    for (int k = threadIdx.x; k < TOP_K; k += THREADS) part.keys[k] = 0;
    __syncthreads();
    int before = 0;
    u64 most_key = 0;
    for (int t = 0; t < THREADS; t++) {
        before += maxima[t] > own;
        most_key = maxima[t] > most_key ? maxima[t] : most_key;
    }
    if (before == TOP_K - 1 && own) bound = own;
    const float most = key_value(most_key);
    float sum = most < INFINITY ? 0.f : 1.f;  // of an infinite logit, itself alone
    if (most > -INFINITY && most < INFINITY) {
#pragma unroll
        for (int p = 0; p < PER; p++) sum += expf(values[p] - most);
    }
    if (nan) sum = NAN;
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) sum += __shfl_xor_sync(~0u, sum, d);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
#pragma unroll
    for (int p = 0; p < PER; p++) {
        const int column = start + p * THREADS + threadIdx.x;
        const u64 key = column < VOCAB ? order_key(values[p], column) : 0;
        if (key && key >= bound) above[atomicAdd(&count, 1)] = key;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += THREADS) {
        const u64 key = above[i];
        int place = 0;
        for (int j = 0; j < count; j++) place += above[j] > key;
        if (place < TOP_K) part.keys[place] = key;
    }
    if (threadIdx.x == 0) {
        float total = 0.f;
        for (int w = 0; w < THREADS / 32; w++) total += sums[w];
        part.most = most;
        part.sum = total;
    }
}
