// draft_attention, first part: norm and RoPE of the block's own queries and keys, to the workspace. A warp a row and head.
//
// Constants: those of block.cuh, EPS and AMPLITUDE (float32 bits), INV_FREQ (a list of float32 bits). Bytes moved: queries
// and keys of the block, read and written once.
#include "block.cuh"
#include "heads.cuh"

constexpr int WARPS = 4;
__constant__ u32 INV_FREQ_BITS[] = {INV_FREQ};

extern "C" __global__ __launch_bounds__(32 * WARPS) void heads(BLOCK_PARAMETERS) {
    wait_for_previous_kernel();
    allow_next_kernel();
    const int i = blockIdx.x * WARPS + threadIdx.x / 32, row = i / (HEADS + GROUPS), head = i % (HEADS + GROUPS);
    if (row >= BLOCKS * BLOCK) return;
    const int request = draft_requests[row / BLOCK];
    const int position = (request < 0 ? 0 : context_len[request]) + row % BLOCK;
    const u16* from = qkv + ((u64)row * (HEADS + 2 * GROUPS) + head) * DIM;
    u16* to = head < HEADS ? queries(workspace) + ((u64)row * HEADS + head) * DIM
                           : own_keys(workspace) + ((u64)row * GROUPS + head - HEADS) * DIM;
    norm_and_rotate<DIM>(from, head < HEADS ? q_norm : k_norm, __uint_as_float(EPS), INV_FREQ_BITS,
                         __uint_as_float(AMPLITUDE), position, to);
}
