// all_reduce: what follows the sum over ranks: h = bf16(residual + sum), normed = RMSNorm(h); one block a row.
//
// With REDUCED the sum lies in the workspace, where the transport has put it, else it is `x`, this being the only rank.
// Without FUSED the sum is copied to the output. Constants: VECTORS of 8 bfloat16 a row, PER of them a thread, THREADS,
// EPS (float32 bits), REDUCED, FUSED. Bytes moved: two rows read, two written; the weight, once a block (from the L2).
#include "rows.cuh"

extern "C" __global__ __launch_bounds__(THREADS) void add_norm(const uint4* x, const uint4* residual,
                                                               const uint4* weight, uint4* sum, uint4* normed,
                                                               const uint4* workspace) {
    const i64 start = (i64)blockIdx.x * VECTORS;
    const uint4* part = REDUCED ? workspace : x;
    uint4 w[PER], a[PER], b[PER];
    float row[PER][8];
    if (FUSED) {
#pragma unroll
        for (int p = 0; p < PER; p++)
            w[p] = load_weights16(weight + min((int)threadIdx.x + p * THREADS, VECTORS - 1));
    }
    wait_for_previous_kernel();
    allow_next_kernel();
#pragma unroll
    for (int p = 0; p < PER; p++) {
        const int v = threadIdx.x + p * THREADS;
        a[p] = load_activations16(part + start + v, v < VECTORS);
        if (FUSED) b[p] = load_activations16(residual + start + v, v < VECTORS);
    }
#pragma unroll
    for (int p = 0; p < PER; p++) {
        const int v = threadIdx.x + p * THREADS;
        if (FUSED) {
            float other[8];
            widen(a[p], row[p]);
            widen(b[p], other);
#pragma unroll
            for (int i = 0; i < 8; i++) row[p][i] += other[i];
            a[p] = narrow(row[p]);
            widen(a[p], row[p]);  // the norm sees what was rounded
        }
        if (v < VECTORS) sum[start + v] = a[p];
    }
    if (FUSED) store_normed<VECTORS, PER, THREADS>(row, w, __uint_as_float(EPS), normed + start);
}
