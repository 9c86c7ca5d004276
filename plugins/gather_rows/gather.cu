// gather_rows: y[a] = x0[rows[a]] | x1[rows[a]] | .., zeros where rows[a] is -1; one block a row and source.
//
// Constants: VECTORS of 8 bfloat16 a row of a source, THREADS, COUNT of sources. Bytes moved: what is gathered, read and
// written once.
#include "ptx.cuh"

extern "C" __global__ __launch_bounds__(THREADS) void gather(const int* rows, const uint4* x0, const uint4* x1,
                                                             const uint4* x2, const uint4* x3, const uint4* x4,
                                                             const uint4* x5, const uint4* x6, const uint4* x7,
                                                             uint4* y) {
    const int s = blockIdx.y;
    const uint4* low = s < 2 ? (s == 0 ? x0 : x1) : (s == 2 ? x2 : x3);
    const uint4* high = s < 6 ? (s == 4 ? x4 : x5) : (s == 6 ? x6 : x7);
    const uint4* from = s < 4 ? low : high;
    wait_for_previous_kernel();
    allow_next_kernel();
    const int row = rows[blockIdx.x];
    from += (i64)max(row, 0) * VECTORS;
    uint4* to = y + ((i64)blockIdx.x * COUNT + blockIdx.y) * VECTORS;
    for (int v = threadIdx.x; v < VECTORS; v += THREADS) to[v] = load_activations16(from + v, row >= 0);
}
