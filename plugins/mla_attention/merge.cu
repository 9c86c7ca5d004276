// mla_attention, expanded, at the end: the splits of each row together, zeros for rows of no request. A warp a row and head.
//
// Constants: those of expanded.cuh. Bytes moved: the sums of all splits, read once, and the output.
#include "expanded.cuh"

constexpr int WARPS = 8;
static_assert(V == 128, "a lane has four values");

extern "C" __global__ __launch_bounds__(32 * WARPS) void merge(EXPANDED_PARAMETERS) {
    const int item = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    wait_for_previous_kernel();
    allow_next_kernel();
    if (item >= TOKENS * HEADS) return;
    const int row = item / HEADS, head = item % HEADS;
    const Request request = find_request(first_row, request_rows, context_len);
    float4 value = {};
    if (row >= request.first && row < request.first + request.rows) {
        float most = -INFINITY, total = 0.f;
#pragma unroll
        for (int s = 0; s < SPLITS; s++) most = fmaxf(most, weights(workspace, place(s, row, head))->x);
#pragma unroll
        for (int s = 0; s < SPLITS; s++) {
            const float2 weight = *weights(workspace, place(s, row, head));
            if (weight.x == -INFINITY) continue;
            const float factor = exp2f(weight.x - most);
            const float4 part = *(const float4*)(sums(workspace, place(s, row, head)) + 4 * lane);
            total += factor * weight.y;
            value.x += factor * part.x;
            value.y += factor * part.y;
            value.z += factor * part.z;
            value.w += factor * part.w;
        }
        const float scale = 1.f / total;  // a row sees itself
        value = make_float4(value.x * scale, value.y * scale, value.z * scale, value.w * scale);
    }
    *(uint2*)(out + (u64)item * V + 4 * lane) = {bf16_pair(value.x, value.y), bf16_pair(value.z, value.w)};
}
