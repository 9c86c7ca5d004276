// Routed experts, first stage, for few tokens: y[route] = silu(gate x) * (up x), the weights read once.
//
// Constants: EXPERTS, TOP_K, TOKENS; K_TILES, N_TILES (of 32 columns and rows; N_TILES / 2 x 32 outputs);
// WARPS, SLICE (tiles of a warp), STAGES, STAGE_TILES (see ring.cuh), MIN_BLOCKS (per multiprocessor).
//
// A block computes 16 gate rows and the 16 up rows beside them for up to 8 tokens of one expert; its warps split
// K, and their sums meet in shared memory. The stream of weights runs on into the next units of work while the sums
// of the last one are added up.
#include "experts.cuh"
#include "ring.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int K = 32 * K_TILES;
constexpr int OUTPUTS = 16 * N_TILES;
constexpr int ROUTES = TOKENS * TOP_K;
constexpr int MOST_BLOCKS = ROUTES < EXPERTS + ROUTES / 8 ? ROUTES : EXPERTS + ROUTES / 8;
constexpr int PARTIAL = 64;  // float4s of a warp's sums: [token][g]
constexpr int PIECES = SLICE / STAGE_TILES;
static_assert(K_TILES == WARPS * SLICE && SLICE % STAGE_TILES == 0, "the warps' pieces must be equal");

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    gate_up(const u16* x, const u8* weight, const int* expert_offsets, const int* sorted_routes, const float*,
            const u16*, u16* y) {
    DYNAMIC_SHARED(memory);
    float4* partial = (float4*)(memory + RING_BYTES);  // [2][WARPS][PARTIAL]
    Block* blocks = (Block*)(partial + 2 * WARPS * PARTIAL);
    int* scratch = (int*)(blocks + MOST_BLOCKS);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    Ring ring(memory, warp, lane);

    wait_for_previous_kernel();
    allow_next_kernel();
    const int units = N_TILES * list_blocks<8, THREADS>(expert_offsets, blocks, scratch);

    // what the ring asks for next: the warp's pieces of unit after unit
    int ahead = blockIdx.x, pieces_left = PIECES;
    auto first_piece = [&](int unit) {
        const u64 tile_row = (u64)blocks[unit / N_TILES].expert() * N_TILES + unit % N_TILES;
        return weight + (tile_row * K_TILES + warp * SLICE) * TILE_BYTES;
    };
    const u8* from = ahead < units ? first_piece(ahead) : weight;
    auto request = [&] {
        if (ahead >= units) return;
        ring.request(from, lane);
        from += STAGE_BYTES;
        if (--pieces_left == 0) {
            pieces_left = PIECES;
            ahead += gridDim.x;
            if (ahead < units) from = first_piece(ahead);
        }
    };
    // the lane's 8 columns of its token in the warp's first tile; past the last token those of the last: its column of
    // the product is not used
    auto columns_for = [&](int unit) {
        if (unit >= units) return x;
        const Block block = blocks[unit / N_TILES];
        const int token = sorted_routes[block.first + min(g, block.count() - 1)] / TOP_K;
        return x + (u64)token * K + 32 * warp * SLICE + 8 * t;
    };

    int unit = blockIdx.x;
#pragma unroll 1
    for (int i = 0; i < STAGES; ++i) {
        request();
        ring.advance();
    }
    ring.parity = 0;  // back at the first piece, to read it
    const u16* columns_from = columns_for(unit);
    uint4 fetched[X_TILES];
#pragma unroll
    for (int i = 0; i < X_TILES; ++i) fetched[i] = load_activations16(columns_from + 32 * i);

    for (int parity = 0; unit < units; parity ^= 1) {
        const u16* next_columns = columns_for(unit + gridDim.x);
        float acc[8] = {};
#pragma unroll 1
        for (int piece = 0; piece < PIECES; ++piece) {
            const u8* tiles = nullptr;
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                const bool last = piece + 1 == PIECES && part + 1 == PARTS;
                columns_from = last ? next_columns : columns_from + 32 * X_TILES;
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
        // One barrier a unit: whoever writes this half again has passed the next unit's barrier.
        float4* sums = partial + parity * WARPS * PARTIAL;
#pragma unroll
        for (int i = 0; i < 2; ++i) sums[warp * PARTIAL + 8 * (2 * t + i) + g] = rows_of(acc, i);
        __syncthreads();
        const Block block = blocks[unit / N_TILES];
        if (threadIdx.x < 8 * block.count()) {
            float4 sum = sums[threadIdx.x];
#pragma unroll 4
            for (int i = 1; i < WARPS; ++i) sum = add(sum, sums[i * PARTIAL + threadIdx.x]);
            const int route = sorted_routes[block.first + threadIdx.x / 8];
            u16* out = y + (u64)route * OUTPUTS + 16 * (unit % N_TILES) + threadIdx.x % 8;
            out[0] = bf16_bits(silu(sum.x) * sum.z);
            out[8] = bf16_bits(silu(sum.y) * sum.w);
        }
        unit += gridDim.x;
    }
    if (blockIdx.x == gridDim.x - 1) {
        clear_absent_routes<ROUTES, OUTPUTS, THREADS>(sorted_routes, expert_offsets[EXPERTS], y, (u32*)memory);
    }
}
