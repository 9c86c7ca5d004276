// mla_prepare, last part, absorbed: q[t, h] = [W_UK,h^T q_nope ; RoPE(q_rope)] of all rows.
//
// A block takes 16 TOKEN_TILES rows of one head and 64 columns of the latent: rows are the 16-row operand of mma.sync, the
// weights [NOPE, 64] lie in shared memory before the kernel waits for its predecessor. The last block of a head and row tile
// rotates instead. Constants: those of prepare.cuh, TOKEN_TILES. Bytes moved: W_UK once per row tile, q read and written.
#include "prepare.cuh"

constexpr int THREADS = 128, COLUMNS = 64, ROWS = 16 * TOKEN_TILES;
constexpr int Q_STRIDE = NOPE + 8, W_STRIDE = COLUMNS + 8;  // 16 bytes more than a row: no bank conflicts

extern "C" __global__ __launch_bounds__(THREADS) void absorb(PREPARE_PARAMETERS) {
    DYNAMIC_SHARED(memory);
    u16* weights = (u16*)memory;               // [NOPE][W_STRIDE]
    u16* rows = weights + NOPE * W_STRIDE;     // [ROWS][Q_STRIDE]
    const int chunk = blockIdx.x, head = blockIdx.y, first = ROWS * blockIdx.z;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (chunk == C / COLUMNS) {
        wait_for_previous_kernel();
        allow_next_kernel();
        for (int i = threadIdx.x; i < ROWS * (P / 2); i += THREADS) {
            const int t = first + i / (P / 2), p = i % (P / 2);
            if (t >= TOKENS) break;
            const u32 pair = ((const u32*)(q_rows(workspace) + ((u64)t * HEADS + head) * HEAD + NOPE))[p];
            ((u32*)(q + ((u64)t * HEADS + head) * (C + P) + C))[p] = rotated(pair, turns(workspace)[t * (P / 2) + p]);
        }
        return;
    }
    const u16* from = w_uk + (u64)head * NOPE * C + chunk * COLUMNS;
    for (int i = threadIdx.x; i < NOPE * (COLUMNS / 8); i += THREADS) {
        const int n = i / (COLUMNS / 8), v = i % (COLUMNS / 8);
        copy16_streamed(weights + n * W_STRIDE + 8 * v, from + (u64)n * C + 8 * v);
    }
    wait_for_previous_kernel();
    allow_next_kernel();
    for (int i = threadIdx.x; i < ROWS * (NOPE / 8); i += THREADS) {
        const int t = first + i / (NOPE / 8), v = i % (NOPE / 8);
        const u16* row = q_rows(workspace) + ((u64)min(t, TOKENS - 1) * HEADS + head) * HEAD;
        copy16_or_zero(rows + i / (NOPE / 8) * Q_STRIDE + 8 * v, row + 8 * v, t < TOKENS);
    }
    end_group();
    copies_left<0>();
    __syncthreads();

    float acc[TOKEN_TILES][2][4] = {};
    const u32 w_at = shared_address(weights + lane % 16 * W_STRIDE + 16 * warp + lane / 16 * 8);
    const u32 q_at = shared_address(rows + lane % 16 * Q_STRIDE + lane / 16 * 8);
#pragma unroll
    for (int k = 0; k < NOPE; k += 16) {
        const uint4 w = ldmatrix_trans(w_at + 2 * k * W_STRIDE);
#pragma unroll
        for (int i = 0; i < TOKEN_TILES; i++) {
            const uint4 a = ldmatrix(q_at + 2 * (16 * i * Q_STRIDE + k));
            mma_16x8x16(acc[i][0], a.x, a.y, a.z, a.w, w.x, w.y, acc[i][0]);
            mma_16x8x16(acc[i][1], a.x, a.y, a.z, a.w, w.z, w.w, acc[i][1]);
        }
    }
    const int g = lane / 4, column = chunk * COLUMNS + 16 * warp + 2 * (lane % 4);
#pragma unroll
    for (int i = 0; i < TOKEN_TILES; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int t = first + 16 * i + 8 * half + g;
            if (t >= TOKENS) continue;
            u16* to = q + ((u64)t * HEADS + head) * (C + P) + column;
#pragma unroll
            for (int n = 0; n < 2; n++)
                *(u32*)(to + 8 * n) = bf16_pair(acc[i][n][2 * half], acc[i][n][2 * half + 1]);
        }
}
