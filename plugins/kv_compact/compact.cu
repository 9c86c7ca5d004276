// kv_compact: the KV of row path_rows[r, i] to the slot of row first_row[r] + i, in every layer; a block a request and layer.
//
// All of a request's rows that move are in shared memory before the first is written, since a target may be another's
// source. Constants: PATH, VECTORS (16 bytes) of an entry, SLOTS of the pool, THREADS. Bytes moved: the entries that move,
// read and written once; nothing where the accepted path is the spine.
#include "ptx.cuh"

extern "C" __global__ __launch_bounds__(THREADS) void compact(const int* path_rows, const int* num_emitted,
                                                              const int* first_row, const int* row_slot, uint4* pool) {
    DYNAMIC_SHARED(bytes);
    uint4* staged = (uint4*)bytes;
    __shared__ int from[PATH], to[PATH];
    const int request = blockIdx.x;
    pool += (i64)blockIdx.y * SLOTS * VECTORS;
    wait_for_previous_kernel();
    allow_next_kernel();
    const int count = num_emitted[request], first = first_row[request];
    bool moves = false;
    for (int i = threadIdx.x; i < count; i += THREADS) {
        const int row = path_rows[request * PATH + i];
        moves |= row != first + i;
        from[i] = row == first + i ? -1 : row_slot[row];
        to[i] = row_slot[first + i];
    }
    if (!__syncthreads_or(moves)) return;
    for (int i = threadIdx.x; i < count * VECTORS; i += THREADS) {
        const int slot = from[i / VECTORS];
        if (slot >= 0) staged[i] = load_activations16(pool + (i64)slot * VECTORS + i % VECTORS);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < count * VECTORS; i += THREADS)
        if (from[i / VECTORS] >= 0) pool[(i64)to[i / VECTORS] * VECTORS + i % VECTORS] = staged[i];
}
