// Routed experts, second stage, for few tokens: y[t] = sum over t's routes of weight * (W2 x[route]) + shared[t].
//
// Constants: EXPERTS, TOP_K, TOKENS; K_TILES, N_TILES; WARPS, STAGES, STAGE_TILES (see ring.cuh), MIN_BLOCKS; SUM, HAS_SHARED.
//
// SUM 1, for very few tokens: a block owns 32 output rows for all tokens. Its warps take the experts in turn and add
// what they find to sums of their own in shared memory (float32, [token][row]), which meet at the end in the order of
// the warps: every sum has a fixed order. SUM 0: all warps of the chip share all tile rows of all experts evenly; each
// route's result goes to `workspace` (float32 [route, N]), and combine.cu adds them up. Either way no expert waits for
// another, and the stream of weights runs on from expert to expert.
#include "experts.cuh"
#include "ring.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int K = 32 * K_TILES;
constexpr int N = 32 * N_TILES;
constexpr int ROUTES = TOKENS * TOP_K;
constexpr int MOST_BLOCKS = ROUTES < EXPERTS + ROUTES / 8 ? ROUTES : EXPERTS + ROUTES / 8;
constexpr int PIECES = K_TILES / STAGE_TILES;
static_assert(K_TILES % STAGE_TILES == 0, "an expert's pieces must be equal");

struct Work {
    const u16* x;   // the lane's 8 columns of its route
    int route[2];   // of the lane's two columns of sums, -1 for none
};

// Place of the four rows g, g + 8, g + 16, g + 24 of `token`; the order of g keeps lanes off each other's banks.
__device__ __forceinline__ int place(int token, int g) { return 8 * token + (g ^ (token & 7)); }

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    down(const u16* x, const u8* weight, const int* expert_offsets, const int* sorted_routes,
         const float* route_weights, const u16* shared, u16* y, float* workspace) {
    DYNAMIC_SHARED(memory);
    float4* sums = (float4*)(memory + RING_BYTES);  // [WARPS][TOKENS][8]
    Block* blocks = (Block*)(sums + (SUM ? WARPS * TOKENS * 8 : 0));
    int* scratch = (int*)(blocks + MOST_BLOCKS);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float4* own = sums + warp * TOKENS * 8;
    Ring ring(memory, warp, lane);
    for (int i = lane; SUM && i < TOKENS * 8; i += 32) own[i] = make_float4(0.f, 0.f, 0.f, 0.f);

    wait_for_previous_kernel();
    allow_next_kernel();
    const int count = list_blocks<8, THREADS>(expert_offsets, blocks, scratch);

    // A unit of work is a tile row of a block of routes: with SUM those of this block's row, else all.
    const int first = SUM ? warp : blockIdx.x * WARPS + warp, stride = SUM ? WARPS : gridDim.x * WARPS;
    const int units = SUM ? count : count * N_TILES;
    auto block_of = [&](int unit) { return blocks[SUM ? unit : unit / N_TILES]; };
    auto tile_row_of = [&](int unit) { return SUM ? (int)blockIdx.x : unit % N_TILES; };

    // what the ring asks for next: the pieces of unit after unit
    int ahead = first, pieces_left = PIECES;
    auto first_piece = [&](int unit) {
        return weight + ((u64)block_of(unit).expert() * N_TILES + tile_row_of(unit)) * K_TILES * TILE_BYTES;
    };
    const u8* from = ahead < units ? first_piece(ahead) : weight;
    auto request = [&] {
        if (ahead >= units) return;
        ring.request(from, lane);
        from += STAGE_BYTES;
        if (--pieces_left == 0) {
            pieces_left = PIECES;
            ahead += stride;
            if (ahead < units) from = first_piece(ahead);
        }
    };
    auto locate = [&](int unit) {
        Work work = {x, {-1, -1}};
        if (unit < units) {
            const Block block = block_of(unit);
            const int* routes = sorted_routes + block.first;
            // past the last route the columns of the last: that column of the product is not used
            work.x = x + (u64)routes[min(g, block.count() - 1)] * K + 8 * t;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (2 * t + i < block.count()) work.route[i] = routes[2 * t + i];
            }
        }
        return work;
    };

    int unit = first;
#pragma unroll 1
    for (int i = 0; i < STAGES; ++i) {
        request();
        ring.advance();
    }
    ring.parity = 0;  // back at the first piece, to read it
    Work now = locate(unit);
    uint4 fetched[X_TILES];
#pragma unroll
    for (int i = 0; i < X_TILES; ++i) fetched[i] = load_activations16(now.x + 32 * i);

    while (unit < units) {
        const Work next = locate(unit + stride);
        const u16* columns_from = now.x;
        float acc[8] = {};
#pragma unroll 1
        for (int piece = 0; piece < PIECES; ++piece) {
            const u8* tiles = nullptr;
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                const bool last = piece + 1 == PIECES && part + 1 == PARTS;
                columns_from = last ? next.x : columns_from + 32 * X_TILES;
                Columns columns[X_TILES];
#pragma unroll
                for (int i = 0; i < X_TILES; ++i) {
                    columns[i] = columns_of(fetched[i]);
                    fetched[i] = load_activations16(columns_from + 32 * i);
                }
                if (part == 0) tiles = ring.wait();
#pragma unroll
                for (int i = 0; i < X_TILES; ++i) {
                    multiply_tile(acc, read_tile(tiles + (part * X_TILES + i) * TILE_BYTES, lane), columns[i]);
                }
            }
            __syncwarp();  // all lanes have read the piece
            request();
            ring.advance();
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int route = now.route[i];
            if (route < 0) continue;
            const float4 rows = rows_of(acc, i);
            if (SUM) {
                const float f = route_weights[route];
                float4* sum = own + place(route / TOP_K, g);
                *sum = add(*sum, make_float4(f * rows.x, f * rows.y, f * rows.z, f * rows.w));
            } else {
                float* out = workspace + (u64)route * N + 32 * tile_row_of(unit) + g;
                out[0] = rows.x, out[8] = rows.y, out[16] = rows.z, out[24] = rows.w;
            }
        }
        unit += stride;
        now = next;
    }
    if (!SUM) return;
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < TOKENS * 8; i += THREADS) {
        const int token = i / 8, row = i % 8, at = place(token, row);
        float4 sum = sums[at];
#pragma unroll
        for (int j = 1; j < WARPS; ++j) sum = add(sum, sums[j * TOKENS * 8 + at]);
        const u64 out = (u64)token * N + 32 * blockIdx.x + row;
        const float rows[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            y[out + 8 * j] = bf16_bits(rows[j] + (HAS_SHARED ? bf16_value(shared[out + 8 * j]) : 0.f));
        }
    }
}
