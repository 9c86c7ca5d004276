// draft_topk, second half: the segments' candidates of a row merged. A block a row.
//
// Constants as in segments.cu, and FIRST, the id of this rank's first column. Each key counts those before it in the other
// segments by bisection. Bytes moved: SEGMENTS * (8 TOP_K + 8) a row.
#include "topk.cuh"

extern "C" __global__ __launch_bounds__(THREADS) void merge(const float* logits, float* candidates, const Part* parts) {
    wait_for_previous_kernel();
    allow_next_kernel();
    parts += blockIdx.x * SEGMENTS;
    float* out = candidates + (i64)blockIdx.x * (2 * TOP_K + 1);
    for (int i = threadIdx.x; i < SEGMENTS * TOP_K; i += THREADS) {
        const int segment = i / TOP_K;
        const u64 key = parts[segment].keys[i % TOP_K];
        if (!key) continue;
        int place = i % TOP_K;
        for (int s = 0; s < SEGMENTS; s++) {
            if (s == segment) continue;
            int low = 0, high = TOP_K;
            while (low < high) {
                const int middle = (low + high) / 2;
                const bool before = parts[s].keys[middle] > key;
                low = before ? middle + 1 : low;
                high = before ? high : middle;
            }
            place += low;
        }
        if (place >= TOP_K) continue;
        out[place] = key_value(key);
        ((int*)out)[TOP_K + place] = FIRST + (int)key_index(key);
    }
    if (threadIdx.x == 0) {
        float most = -INFINITY, sum = 0.f;
        for (int s = 0; s < SEGMENTS; s++) most = fmaxf(most, parts[s].most);
        for (int s = 0; s < SEGMENTS; s++) {
            const float factor = parts[s].most > -INFINITY && most < INFINITY ? expf(parts[s].most - most) : 0.f;
            sum += isnan(parts[s].sum) ? parts[s].sum : parts[s].sum * factor;
        }
        out[2 * TOP_K] = isnan(sum) ? sum : isinf(most) ? most : most + logf(sum);
    }
}
