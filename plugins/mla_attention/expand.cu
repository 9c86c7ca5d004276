// mla_attention, expanded, a segment's keys and values: k[h, p] = [W_UK,h c_p ; k_rope_p], v[h, p] = W_UV,h c_p.
//
// A block computes 128 positions of the keys or of the values of one head: a product [128, 512] x [128, 512]^T in steps of
// 64 columns through two stages of shared memory, a warp 32 positions by 64 outputs. Rows past the request's end are zeros.
// Constants: those of expanded.cuh. Bytes moved: the latents (from L2 for all heads but the first) and what is written, 672 B
// a head and position. Shared memory: 73,728 B.
#include "expanded.cuh"

constexpr int THREADS = 256, ROWS = 128, OUTPUTS = 128, STEP = 64, STRIDE = STEP + 8;
static_assert(NOPE == OUTPUTS && V == OUTPUTS && SEGMENT % ROWS == 0, "a block has whole heads");

struct Stage {
    u16 latents[ROWS][STRIDE], weight[OUTPUTS][STRIDE];
};

extern "C" __global__ __launch_bounds__(THREADS) void expand(EXPANDED_PARAMETERS) {
    DYNAMIC_SHARED(memory);
    Stage* stages = (Stage*)memory;
    const int head = blockIdx.x / 2, is_value = blockIdx.x % 2, first = blockIdx.y * ROWS;  // of the segment
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int m = warp / 2, n = warp % 2;
    wait_for_previous_kernel();
    allow_next_kernel();
    const Request request = find_request(first_row, request_rows, context_len);
    const int start = (int)segment * SEGMENT + first;  // position
    const int count = request.rows ? min(request.context + request.rows - start, ROWS) : 0;
    if (count <= 0) return;

    const int vector = threadIdx.x % 8, row = threadIdx.x / 8;
    const u16* weight = (is_value ? w_uv : w_uk) + (u64)head * OUTPUTS * C + 8 * vector;
    const u16* latents[ROWS / 32];
#pragma unroll
    for (int i = 0; i < ROWS / 32; i++) {
        const int position = start + min(row + 32 * i, count - 1);
        const u64 slot = (u64)block_table[request.index * PAGES + position / PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE;
        latents[i] = kv_pool + (layer * SLOTS + slot) * (C + P) + 8 * vector;
    }
    auto load = [&](int step) {
        Stage& stage = stages[step % 2];
#pragma unroll
        for (int i = 0; i < ROWS / 32; i++) {
            copy16_or_zero(&stage.latents[row + 32 * i][8 * vector], latents[i] + step * STEP, row + 32 * i < count);
            copy16_or_zero(&stage.weight[row + 32 * i][8 * vector], weight + (row + 32 * i) * C + step * STEP, true);
        }
        end_group();
    };
    load(0);
    float acc[2][8][4] = {};
#pragma unroll 1
    for (int step = 0; step < C / STEP; step++) {
        if (step + 1 < C / STEP) {
            load(step + 1);
            copies_left<1>();
        } else {
            copies_left<0>();
        }
        __syncthreads();
        const Stage& stage = stages[step % 2];
        const u32 a_at = shared_address(&stage.latents[32 * m + lane % 16][lane / 16 * 8]);
        const u32 b_at = shared_address(&stage.weight[64 * n + lane % 8 + lane / 16 * 8][lane / 8 % 2 * 8]);
#pragma unroll
        for (int k = 0; k < STEP; k += 16) {
            uint4 a[2];
#pragma unroll
            for (int i = 0; i < 2; i++) a[i] = ldmatrix(a_at + 2 * (16 * i * STRIDE + k));
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const uint4 b = ldmatrix(b_at + 2 * (16 * j * STRIDE + k));
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    mma_16x8x16(acc[i][2 * j], a[i].x, a[i].y, a[i].z, a[i].w, b.x, b.y, acc[i][2 * j]);
                    mma_16x8x16(acc[i][2 * j + 1], a[i].x, a[i].y, a[i].z, a[i].w, b.z, b.w, acc[i][2 * j + 1]);
                }
            }
        }
        __syncthreads();
    }
    const int stride = is_value ? V_STRIDE : K_STRIDE;
    u16* to = (is_value ? values(workspace, head) : keys(workspace, head)) + (u64)first * stride;
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int j = 0; j < 8; j++)
                *(u32*)(to + (u64)(32 * m + 16 * i + 8 * h + g) * stride + 64 * n + 8 * j + 2 * t) =
                    bf16_pair(acc[i][j][2 * h], acc[i][j][2 * h + 1]);
    if (is_value) return;
#pragma unroll
    for (int i = 0; i < ROWS / 32; i++) {
        const int r = row + 32 * i;
        const uint4 rope = load_activations16(latents[i] + C, r < count);
        *(uint4*)(to + (u64)r * K_STRIDE + NOPE + 8 * vector) = rope;
    }
}
