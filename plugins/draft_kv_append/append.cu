// draft_kv_append: rope(rms_norm(keys)) and values of A rows to draft_kv[layer] at their slots. A warp a row and head.
//
// Constants: ROWS, HEADS (KV heads of this rank), DIM, SLOTS, EPS and AMPLITUDE (float32 bits), INV_FREQ (a list of float32
// bits). The layer is a scalar. Bytes moved: keys and values, read and written once.
#include "heads.cuh"

constexpr int WARPS = 4;
__constant__ u32 INV_FREQ_BITS[] = {INV_FREQ};

extern "C" __global__ __launch_bounds__(32 * WARPS) void append(const u16* kv, const u16* k_norm, const int* positions,
                                                                const int* slots, u16* draft_kv, const void*,
                                                                i64 layer) {
    wait_for_previous_kernel();
    allow_next_kernel();
    const int i = blockIdx.x * WARPS + threadIdx.x / 32, row = i / HEADS, head = i % HEADS;
    if (row >= ROWS) return;
    const u16* keys = kv + ((u64)row * 2 * HEADS + head) * DIM;
    u16* to = draft_kv + (((u64)layer * 2 * SLOTS + slots[row]) * HEADS + head) * DIM;
    norm_and_rotate<DIM>(keys, k_norm, __uint_as_float(EPS), INV_FREQ_BITS, __uint_as_float(AMPLITUDE), positions[row], to);
    for (int d = threadIdx.x % 32; d < DIM / 2; d += 32)
        ((u32*)(to + (u64)SLOTS * HEADS * DIM))[d] = ((const u32*)(keys + HEADS * DIM))[d];
}
