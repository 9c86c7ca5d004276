// draft_attention, last part: the splits of every row together. A warp a row and head; zeros for padding blocks.
//
// Constants: those of block.cuh. Bytes moved: the splits' sums, read once, and the result.
#include "block.cuh"

constexpr int WARPS = 4;

extern "C" __global__ __launch_bounds__(32 * WARPS) void merge(BLOCK_PARAMETERS) {
    wait_for_previous_kernel();
    allow_next_kernel();
    const int i = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32, row = i / HEADS, head = i % HEADS;
    if (row >= BLOCKS * BLOCK) return;
    const int block = row / BLOCK, group = head / (HEADS / GROUPS);
    const int query = row % BLOCK * (HEADS / GROUPS) + head % (HEADS / GROUPS);
    u32* to = (u32*)(out + ((u64)row * HEADS + head) * DIM);
    if (draft_requests[block] < 0) {
        for (int d = lane; d < DIM / 2; d += 32) to[d] = 0;
        return;
    }
    const int place = (block * GROUPS + group) * SPLITS;
    float most = -INFINITY, total = 0.f;
    for (int s = 0; s < SPLITS; s++) most = fmaxf(most, weights(workspace, place + s)[query].x);
    float2 sum[(DIM / 2 + 31) / 32] = {};
#pragma unroll 4
    for (int s = 0; s < SPLITS; s++) {
        const float2 weight = weights(workspace, place + s)[query];
        const float factor = weight.x == -INFINITY ? 0.f : exp2f(weight.x - most);
        total += factor * weight.y;
        const float2* from = (const float2*)(sums(workspace, place + s) + (u64)query * DIM);
#pragma unroll
        for (int j = 0; j < (DIM / 2 + 31) / 32; j++) {
            if (lane + 32 * j >= DIM / 2) continue;
            const float2 part = from[lane + 32 * j];
            sum[j].x += factor * part.x;
            sum[j].y += factor * part.y;
        }
    }
#pragma unroll
    for (int j = 0; j < (DIM / 2 + 31) / 32; j++)
        if (lane + 32 * j < DIM / 2) to[lane + 32 * j] = bf16_pair(sum[j].x / total, sum[j].y / total);
}
