// all_gather: y[t, r N + n] = part r's [t, n], from the blocks that the transport has put one after the other.
//
// Constants: WORLD ranks, ROWS, UNITS of a row of one rank (of 16 bytes with VECTOR, else of 4). Bytes moved: the result,
// read and written once. One block a row and rank.
#include "ptx.cuh"

#if VECTOR
using Unit = uint4;
#else
using Unit = u32;
#endif

extern "C" __global__ __launch_bounds__(256) void interleave(const void* x, Unit* y, const Unit* workspace) {
    wait_for_previous_kernel();
    allow_next_kernel();
    const i64 row = blockIdx.x, rank = blockIdx.y;
    const Unit* from = workspace + (rank * ROWS + row) * UNITS;
    Unit* to = y + (row * WORLD + rank) * UNITS;
    for (int u = threadIdx.x; u < UNITS; u += blockDim.x) to[u] = from[u];
}
