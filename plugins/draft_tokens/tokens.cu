// draft_tokens: the ids of every DFlash block: the request's anchor, then mask ids; mask ids only for padding blocks.
//
// Constants: BLOCKS, BLOCK_SIZE, MASK_ID. One thread an id.
#include "ptx.cuh"

extern "C" __global__ __launch_bounds__(128) void tokens(const int* requests, const int* anchor, int* ids) {
    wait_for_previous_kernel();
    allow_next_kernel();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= BLOCKS * BLOCK_SIZE) return;
    const int request = requests[i / BLOCK_SIZE];
    ids[i] = i % BLOCK_SIZE == 0 && request >= 0 ? anchor[request] : MASK_ID;
}
