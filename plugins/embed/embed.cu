// embed: x[t] = table[tokens[t] - FIRST], zeros for ids that this rank does not hold; one block a row.
//
// Constants: VECTORS of 8 bfloat16 a row, THREADS, ROWS of the table and FIRST, the id of its first row. Bytes moved: the
// rows that are looked up, read and written once.
#include "ptx.cuh"

extern "C" __global__ __launch_bounds__(THREADS) void embed(const int* tokens, const uint4* table, uint4* x) {
    wait_for_previous_kernel();
    allow_next_kernel();
    const int id = tokens[blockIdx.x] - FIRST;
    const bool held = id >= 0 && id < ROWS;
    const uint4* from = table + (i64)(held ? id : 0) * VECTORS;
    uint4* to = x + (i64)blockIdx.x * VECTORS;
    for (int v = threadIdx.x; v < VECTORS; v += THREADS) to[v] = load_activations16(from + v, held);
}
