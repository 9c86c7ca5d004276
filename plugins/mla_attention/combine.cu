// mla_attention, absorbed, second part: the partial results of every row together, then W_UV: out[t, h V + v].
//
// A cluster of 8 blocks takes up to TOKEN_TILE tokens of one head: block j adds the partials of latent columns 64 j .. 64 j + 63,
// the blocks exchange them through shared memory, and each multiplies all 512 columns by V / 8 rows of W_UV, which lie in
// its shared memory before the kernel waits for its predecessor. Constants: those of verify.cuh; TOKEN_TILE (1, 2, 4 or 8).
// Bytes moved: the partials, read once; W_UV, once per token tile. Rows that no request has get zeros.
#include "verify.cuh"

constexpr int THREADS = 256, WARPS = 8, CLUSTER = 8;
constexpr int SLICE = C / CLUSTER, OUT = V / CLUSTER;  // columns added, and rows of W_UV, of a block
constexpr int GROUPS = WARPS / TOKEN_TILE;             // warps that share a token's partials
constexpr int U_STRIDE = C + 8;
static_assert(SLICE == 64 && OUT == 16, "a lane two columns, a warp tile 16 rows");

struct Shared {
    u16 w[OUT][U_STRIDE];
    u16 u[8][U_STRIDE];
    u16 slice[TOKEN_TILE][SLICE];
    float parts[WARPS][SLICE];
    float products[WARPS][OUT][8];
    Work work;
    float factors[TOKEN_TILE][BLOCKS];
};

extern "C" __global__ __launch_bounds__(THREADS) void combine(ATTENTION_PARAMETERS) {
    DYNAMIC_SHARED(memory);
    Shared& shared = *(Shared*)memory;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int rank = blockIdx.x, head = blockIdx.y, first_token = blockIdx.z * TOKEN_TILE;
    const u16* w = w_uv + ((u64)head * V + rank * OUT) * C;
    for (int i = threadIdx.x; i < OUT * (C / 8); i += THREADS)
        copy16_streamed(&shared.w[i / (C / 8)][i % (C / 8) * 8], w + (u64)i * 8);
    end_group();
    wait_for_previous_kernel();
    allow_next_kernel();
    if (warp == 0) plan_work(shared.work, first_row, request_rows, context_len);
    __syncthreads();
    const Work& work = shared.work;

    const int local = warp / GROUPS, group = warp % GROUPS, token = first_token + local;
    const int owner = token < TOKENS ? row_request[token] : -1;
    float2 sum = make_float2(0.f, 0.f);
    bool exists = false;
    if (owner >= 0) {
        const Request& request = work.requests[owner];
        exists = token >= request.first && token < request.first + request.rows;
        if (exists) {
            const int query = (token - request.first) * HEADS + head, index = query / QUERIES, row = query % QUERIES;
            const int start = request.unit + index * request.tiles(), stop = start + request.tiles();
            const int from = start / work.chunk, to = (stop - 1) / work.chunk;  // blocks that worked on it
            const int base = request.item + index;
            float most = -INFINITY, total = 0.f;
            for (int b = from + lane; b <= to; b += 32)
                most = fmaxf(most, partial_weights(workspace, base + b)[row].x);
#pragma unroll
            for (int d = 16; d > 0; d >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, d));
            for (int b = from + lane; b <= to; b += 32) {
                const float2 part = partial_weights(workspace, base + b)[row];
                const float factor = part.x == -INFINITY ? 0.f : exp2f(part.x - most);
                if (group == 0) shared.factors[local][b - from] = factor;
                total += factor * part.y;
            }
#pragma unroll
            for (int d = 16; d > 0; d >>= 1) total += __shfl_xor_sync(~0u, total, d);
            const float inverse = total > 0.f ? 1.f / total : total == 0.f ? 0.f : total;  // a NaN stays one
            if (GROUPS > 1)
                __syncthreads();
            else
                __syncwarp();
            const float* column = partial_sums(workspace, base + from) + (u64)row * C + rank * SLICE + 2 * lane;
            const int count = to - from + 1;
#pragma unroll 4
            for (int b = group; b < count; b += GROUPS) {
                const float2 part = *(const float2*)(column + (u64)b * QUERIES * C);
                const float factor = shared.factors[local][b];
                sum.x += factor * part.x;
                sum.y += factor * part.y;
            }
            sum.x *= inverse;
            sum.y *= inverse;
        }
    }
    if (GROUPS > 1) {
        if (!exists) __syncthreads();  // the one inside
        shared.parts[warp][2 * lane] = sum.x;
        shared.parts[warp][2 * lane + 1] = sum.y;
        __syncthreads();
        if (group == 0) {
#pragma unroll
            for (int i = 1; i < GROUPS; i++) {
                sum.x += shared.parts[warp + i][2 * lane];
                sum.y += shared.parts[warp + i][2 * lane + 1];
            }
        }
    }
    if (group == 0) *(u32*)&shared.slice[local][2 * lane] = bf16_pair(sum.x, sum.y);
    cluster_sync();
    for (int i = threadIdx.x; i < TOKEN_TILE * (C / 8); i += THREADS) {
        const int row = i / (C / 8), v = i % (C / 8);
        const float4 piece = load_cluster16((const float4*)&shared.slice[row][v % (SLICE / 8) * 8], v / (SLICE / 8));
        *(float4*)&shared.u[row][8 * v] = piece;
    }
    copies_left<0>();
    cluster_sync();  // also: nobody leaves while others read its slice

    // 16 rows of W_UV by 8 tokens; a warp an eighth of the 512 columns
    float acc[4] = {};
    const int g = lane / 4, t = lane % 4;
    const u32 a_at = shared_address(&shared.w[lane % 16][C / WARPS * warp + lane / 16 * 8]);
#pragma unroll
    for (int k = 0; k < C / WARPS; k += 16) {
        const uint4 a = ldmatrix(a_at + 2 * k);
        const u16* b = &shared.u[g][C / WARPS * warp + k + 2 * t];
        const u32 b0 = g < TOKEN_TILE ? *(const u32*)b : 0u, b1 = g < TOKEN_TILE ? *(const u32*)(b + 8) : 0u;
        mma_16x8x16(acc, a.x, a.y, a.z, a.w, b0, b1, acc);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) shared.products[warp][g + i / 2 * 8][2 * t + i % 2] = acc[i];
    __syncthreads();
    if (threadIdx.x < OUT * TOKEN_TILE) {
        const int v = threadIdx.x % OUT, n = threadIdx.x / OUT;
        float value = 0.f;
#pragma unroll
        for (int i = 0; i < WARPS; i++) value += shared.products[i][v][n];
        if (first_token + n < TOKENS)
            out[((u64)(first_token + n) * HEADS + head) * V + rank * OUT + v] = bf16_bits(value);
    }
}
