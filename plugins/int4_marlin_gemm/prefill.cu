// Routed experts for many tokens, either stage; the same packed weights as for few.
//
// Constants: EXPERTS, TOP_K, TOKENS; K_TILES, N_TILES; DOWN (0: gate/up with SiLU into y, 1: W2 x[route] into
// workspace [route, N], weighted and added up by combine.cu); STEP_TILES (between two barriers), MIN_BLOCKS.
//
// A block multiplies 8 tile rows, one a warp, by up to 64 tokens of one expert. Activations pass through shared
// memory, in the pair order of tile.cuh; weights go to registers, a step ahead. Both streams run on into the
// next unit of work.
#include "experts.cuh"
#include "tile.cuh"

constexpr int WARPS = 8;
constexpr int THREADS = 32 * WARPS;
constexpr int MOST_TOKENS = 64;
constexpr int K = 32 * K_TILES;
constexpr int TILE_OUTPUTS = DOWN ? 32 : 16;  // columns of the result that a warp computes
constexpr int N = TILE_OUTPUTS * N_TILES;
constexpr int ROUTES = TOKENS * TOP_K;
constexpr int MOST_BLOCKS = EXPERTS + ROUTES / MOST_TOKENS;
constexpr int GROUPS = (N_TILES + WARPS - 1) / WARPS;
constexpr int TILE_WORDS = MOST_TOKENS * 4;  // uint4s of activations of one tile of columns: [token][8 columns]
constexpr int PITCH = WARPS * TILE_OUTPUTS + 8;  // bf16s of a row of results in shared memory
static_assert(K_TILES % STEP_TILES == 0 && K_TILES >= 2 * STEP_TILES, "two steps are on their way");
static_assert(THREADS == TILE_WORDS, "a thread fetches one uint4 a tile");

struct Work {
    u32 tile;      // first tile of the warp's tile row
    u32 row;       // of x: the row that this thread fetches from for all
    bool fetches;
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    prefill(const u16* x, const u8* weight, const int* expert_offsets, const int* sorted_routes, const float*,
            const u16*, u16* y, u16* workspace) {
    DYNAMIC_SHARED(memory);
    uint4* steps = (uint4*)memory;  // [2][STEP_TILES][TILE_WORDS]
    u16* results = (u16*)(steps + 2 * STEP_TILES * TILE_WORDS);  // [MOST_TOKENS][PITCH]
    Block* blocks = (Block*)(results + MOST_TOKENS * PITCH);
    int* scratch = (int*)(blocks + MOST_BLOCKS);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    u16* out = DOWN ? workspace : y;

    wait_for_previous_kernel();
    allow_next_kernel();
    const int units = GROUPS * list_blocks<MOST_TOKENS, THREADS>(expert_offsets, blocks, scratch);

    auto locate = [&](int unit) {
        Work work = {0, 0, false};
        if (unit < units) {
            const Block block = blocks[unit / GROUPS];
            const int tile_row = min(unit % GROUPS * WARPS + warp, N_TILES - 1);  // past the end: not stored
            work.tile = ((u32)block.expert() * N_TILES + tile_row) * K_TILES;
            const int token = threadIdx.x / 4;
            work.fetches = token < block.count();
            const int route = work.fetches ? sorted_routes[block.first + token] : 0;
            work.row = DOWN ? route : route / TOP_K;
        }
        return work;
    };
    auto tile_of = [&](const Work& work, int i) {
        return load_tile(weight + (u64)(work.tile + i) * TILE_BYTES, lane);
    };
    auto columns = [&](const Work& work, int i) {
        return load_activations16(x + (u64)work.row * K + 8 * (threadIdx.x % 4) + 32 * i, work.fetches);
    };
    uint4 fetched[STEP_TILES];
    auto fetch = [&](const Work& work, int tile) {
#pragma unroll
        for (int i = 0; i < STEP_TILES; ++i) fetched[i] = columns(work, tile + i);
    };
    auto put = [&](int step) {
#pragma unroll
        for (int i = 0; i < STEP_TILES; ++i) {
            const Columns ordered = columns_of(fetched[i]);
            steps[(step % 2 * STEP_TILES + i) * TILE_WORDS + threadIdx.x] =
                make_uint4(ordered.pair[0], ordered.pair[1], ordered.pair[2], ordered.pair[3]);
        }
    };

    int unit = blockIdx.x;
    Work now = locate(unit);
    Tile tiles[STEP_TILES];
    if (unit < units) {
#pragma unroll
        for (int i = 0; i < STEP_TILES; ++i) tiles[i] = tile_of(now, i);
    }
    // one step ahead in shared memory, another in registers
    fetch(now, 0);
    put(0);
    fetch(now, STEP_TILES);

    for (int step = 0; unit < units; unit += gridDim.x) {
        const bool more = unit + gridDim.x < units;
        const Work next = locate(unit + gridDim.x);
        const Block block = blocks[unit / GROUPS];
        float acc[MOST_TOKENS / 8][8] = {};
#if K_TILES > STEP_TILES
#pragma unroll 1
#endif
        for (int start = 0; start < K_TILES; start += STEP_TILES, ++step) {
            __syncthreads();  // this step's activations are there, and nobody reads those of the last step
            put(step + 1);
            const int two_ahead = start + 2 * STEP_TILES;
            if (two_ahead < K_TILES) {
                fetch(now, two_ahead);
            } else {
                fetch(next, two_ahead - K_TILES);
            }
#pragma unroll
            for (int i = 0; i < STEP_TILES; ++i) {
                const uint4* activations = steps + (step % 2 * STEP_TILES + i) * TILE_WORDS;
                multiply_many(acc, tiles[i], activations, block.count(), g, t);
                const int ahead = start + i + STEP_TILES;
                if (ahead < K_TILES) {
                    tiles[i] = tile_of(now, ahead);
                } else if (more) {
                    tiles[i] = tile_of(next, ahead - K_TILES);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < MOST_TOKENS / 8; ++i) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                u16* row = results + (8 * i + 2 * t + j) * PITCH + warp * TILE_OUTPUTS + g;
                const float4 rows = rows_of(acc[i], j);
                if (DOWN) {
                    row[0] = bf16_bits(rows.x), row[8] = bf16_bits(rows.y);
                    row[16] = bf16_bits(rows.z), row[24] = bf16_bits(rows.w);
                } else {
                    row[0] = bf16_bits(silu(rows.x) * rows.z), row[8] = bf16_bits(silu(rows.y) * rows.w);
                }
            }
        }
        __syncthreads();
        const int first = unit % GROUPS * WARPS * TILE_OUTPUTS;
        const int pieces = min(WARPS * TILE_OUTPUTS, N - first) / 8;  // of 16 bytes, in a row
        for (int i = threadIdx.x; i < pieces * block.count(); i += THREADS) {
            const int token = i / pieces, piece = i % pieces;
            const u64 route = sorted_routes[block.first + token];
            *(uint4*)(out + route * N + first + 8 * piece) = *(const uint4*)(results + token * PITCH + 8 * piece);
        }
        now = next;
    }
    if (!DOWN && blockIdx.x == gridDim.x - 1) {
        clear_absent_routes<ROUTES, N, THREADS>(sorted_routes, expert_offsets[EXPERTS], y, (u32*)memory);
    }
}
