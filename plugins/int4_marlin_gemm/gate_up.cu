// Routed experts, first stage, for few tokens: y[route] = silu(gate x) * (up x), the weights read once.
//
// Constants: EXPERTS, TOP_K, TOKENS; K_TILES, N_TILES (of 32 columns and rows; N_TILES / 2 x 32 outputs);
// WARPS, SLICE (tiles of a warp), DEPTH (tiles a warp has in flight), X_DEPTH, MIN_BLOCKS (per multiprocessor).
//
// A block computes 16 gate rows and the 16 up rows beside them for up to 8 tokens of one expert; its warps split
// K, and their sums meet in shared memory. Weights go from global memory to registers, DEPTH tiles ahead, and the
// stream runs on into the next unit of work while the sums of the last one are added up.
#include "experts.cuh"
#include "tile.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int K = 32 * K_TILES;
constexpr int OUTPUTS = 16 * N_TILES;
constexpr int ROUTES = TOKENS * TOP_K;
constexpr int MOST_BLOCKS = ROUTES < EXPERTS + ROUTES / 8 ? ROUTES : EXPERTS + ROUTES / 8;
constexpr int PARTIAL = 64;  // float4s of a warp's sums: [token][g]
constexpr int UNROLL = DEPTH % X_DEPTH == 0 ? DEPTH : DEPTH * X_DEPTH;
static_assert(K_TILES == WARPS * SLICE && SLICE % UNROLL == 0, "a warp's tiles must fill its ring evenly");

struct Work {
    const u8* weights;  // first tile of the warp
    const u16* x;       // the lane's 8 columns of its token in that tile
    bool has_token;
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    gate_up(const u16* x, const u8* weight, const int* expert_offsets, const int* sorted_routes, const float*,
            const u16*, u16* y) {
    DYNAMIC_SHARED(memory);
    float4* partial = (float4*)memory;  // [2][WARPS][PARTIAL]
    Block* blocks = (Block*)(partial + 2 * WARPS * PARTIAL);
    int* scratch = (int*)(blocks + MOST_BLOCKS);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;

    wait_for_previous_kernel();
    allow_next_kernel();
    const int units = N_TILES * list_blocks<8, THREADS>(expert_offsets, blocks, scratch);

    auto locate = [&](int unit) {
        Work work = {weight, x, false};
        if (unit < units) {
            const Block block = blocks[unit / N_TILES];
            const u64 tile = ((u64)block.expert() * N_TILES + unit % N_TILES) * K_TILES + warp * SLICE;
            work.weights = weight + tile * TILE_BYTES;
            work.has_token = g < block.count();
            const int token = work.has_token ? sorted_routes[block.first + g] / TOP_K : 0;
            work.x = x + (u64)token * K + 32 * warp * SLICE + 8 * t;
        }
        return work;
    };

    int unit = blockIdx.x;
    Work now = locate(unit);
    Tile tiles[DEPTH];
    uint4 activations[X_DEPTH];
    if (unit < units) {
#pragma unroll
        for (int i = 0; i < DEPTH; ++i) tiles[i] = load_tile(now.weights + i * TILE_BYTES, lane);
    }
#pragma unroll
    for (int i = 0; i < X_DEPTH; ++i) activations[i] = load_activations16(now.x + 32 * i, now.has_token);

    for (int parity = 0; unit < units; parity ^= 1) {
        const bool more = unit + gridDim.x < units;
        const Work next = locate(unit + gridDim.x);
        float acc[8] = {};
        for (int start = 0; start < SLICE; start += UNROLL) {
#pragma unroll
            for (int i = 0; i < UNROLL; ++i) {
                multiply_tile(acc, tiles[i % DEPTH], columns_of(activations[i % X_DEPTH]));
                const int ahead = start + i + DEPTH, x_ahead = start + i + X_DEPTH;
                if (ahead < SLICE) {
                    tiles[i % DEPTH] = load_tile(now.weights + ahead * TILE_BYTES, lane);
                } else if (more) {
                    tiles[i % DEPTH] = load_tile(next.weights + (ahead - SLICE) * TILE_BYTES, lane);
                }
                if (x_ahead < SLICE) {
                    activations[i % X_DEPTH] = load_activations16(now.x + 32 * x_ahead, now.has_token);
                } else {
                    activations[i % X_DEPTH] = load_activations16(next.x + 32 * (x_ahead - SLICE), next.has_token);
                }
            }
        }
        // One barrier a unit: whoever writes this half again has passed the next unit's barrier.
        float4* sums = partial + parity * WARPS * PARTIAL;
#pragma unroll
        for (int i = 0; i < 2; ++i) sums[warp * PARTIAL + 8 * (2 * t + i) + g] = rows_of(acc, i);
        __syncthreads();
        const Block block = blocks[unit / N_TILES];
        if (threadIdx.x < 8 * block.count()) {
            float4 sum = sums[threadIdx.x];
#pragma unroll 2
            for (int i = 1; i < WARPS; ++i) sum = add(sum, sums[i * PARTIAL + threadIdx.x]);
            const int route = sorted_routes[block.first + threadIdx.x / 8];
            u16* out = y + (u64)route * OUTPUTS + 16 * (unit % N_TILES) + threadIdx.x % 8;
            out[0] = bf16_bits(silu(sum.x) * sum.z);
            out[8] = bf16_bits(silu(sum.y) * sum.w);
        }
        unit += gridDim.x;
        now = next;
    }
    if (blockIdx.x == gridDim.x - 1) {
        clear_absent_routes<ROUTES, OUTPUTS, THREADS>(sorted_routes, expert_offsets[EXPERTS], y, (u32*)memory);
    }
}
