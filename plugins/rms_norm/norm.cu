// rms_norm: y[t] = weight * bf16(x[t] / sqrt(mean(x[t]^2) + eps)), one block a row.
//
// Constants: VECTORS of 8 values a row, PER of them a thread, THREADS, EPS (float32 bits). Bytes moved: the rows, read and
// written once; the weight, once a block (from the L2).
#include "rows.cuh"

extern "C" __global__ __launch_bounds__(THREADS) void rms_norm(const uint4* x, const uint4* weight, uint4* y) {
    uint4 w[PER], raw[PER];
    float row[PER][8];
#pragma unroll
    for (int p = 0; p < PER; p++) w[p] = load_weights16(weight + min((int)threadIdx.x + p * THREADS, VECTORS - 1));
    wait_for_previous_kernel();
    allow_next_kernel();
    const i64 start = (i64)blockIdx.x * VECTORS;
#pragma unroll
    for (int p = 0; p < PER; p++) {
        const int v = threadIdx.x + p * THREADS;
        raw[p] = load_activations16(x + start + v, v < VECTORS);
    }
#pragma unroll
    for (int p = 0; p < PER; p++) widen(raw[p], row[p]);
    store_normed<VECTORS, PER, THREADS>(row, w, __uint_as_float(EPS), y + start);
}
