// mla_prepare, last part, expanded: q[t, h] = [q_nope ; RoPE(q_rope)]. A thread four bytes.
//
// Constants: those of prepare.cuh. Bytes moved: q, read and written once.
#include "prepare.cuh"

constexpr int THREADS = 256;

extern "C" __global__ __launch_bounds__(THREADS) void rotate(PREPARE_PARAMETERS) {
    wait_for_previous_kernel();
    allow_next_kernel();
    const u64 i = (u64)blockIdx.x * THREADS + threadIdx.x;
    if (i >= (u64)TOKENS * HEADS * (HEAD / 2)) return;
    const int t = i / (HEADS * (HEAD / 2)), p = (int)(i % (HEAD / 2)) - NOPE / 2;
    const u32 pair = ((const u32*)q_rows(workspace))[i];
    ((u32*)q)[i] = p < 0 ? pair : rotated(pair, turns(workspace)[t * (P / 2) + p]);
}
