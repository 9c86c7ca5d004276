// Routed experts, second stage, for few tokens: y[t] = sum over t's routes of weight * (W2 x[route]) + shared[t].
//
// Constants: EXPERTS, TOP_K, TOKENS; K_TILES, N_TILES; WARPS, DEPTH, X_DEPTH, MIN_BLOCKS; HAS_SHARED.
//
// A block owns 32 output rows for all tokens. Its warps take the experts in turn and add what they find to sums of
// their own in shared memory (float32, [token][row]); these meet at the end, in the order of the warps. So every sum
// has a fixed order, no expert waits for another, and the stream of weights runs on from expert to expert.
#include "experts.cuh"
#include "tile.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int K = 32 * K_TILES;
constexpr int N = 32 * N_TILES;
constexpr int ROUTES = TOKENS * TOP_K;
constexpr int MOST_BLOCKS = ROUTES < EXPERTS + ROUTES / 8 ? ROUTES : EXPERTS + ROUTES / 8;
constexpr int UNROLL = DEPTH % X_DEPTH == 0 ? DEPTH : DEPTH * X_DEPTH;
static_assert(K_TILES % UNROLL == 0, "an expert's tiles must fill the ring evenly");

struct Work {
    const u8* weights;
    const u16* x;  // the lane's 8 columns of its route
    bool has_route;
    int token[2];  // of the lane's two columns of sums, -1 for none
    float factor[2];
};

// Place of the four rows g, g + 8, g + 16, g + 24 of `token`; the order of g keeps lanes off each other's banks.
__device__ __forceinline__ int place(int token, int g) { return 8 * token + (g ^ (token & 7)); }

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    down(const u16* x, const u8* weight, const int* expert_offsets, const int* sorted_routes,
         const float* route_weights, const u16* shared, u16* y) {
    DYNAMIC_SHARED(memory);
    float4* sums = (float4*)memory;  // [WARPS][TOKENS][8]
    Block* blocks = (Block*)(sums + WARPS * TOKENS * 8);
    int* scratch = (int*)(blocks + MOST_BLOCKS);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int tile_row = blockIdx.x;
    float4* own = sums + warp * TOKENS * 8;
    for (int i = lane; i < TOKENS * 8; i += 32) own[i] = make_float4(0.f, 0.f, 0.f, 0.f);

    wait_for_previous_kernel();
    allow_next_kernel();
    const int count = list_blocks<8, THREADS>(expert_offsets, blocks, scratch);

    auto locate = [&](int index) {
        Work work = {weight, x, false, {-1, -1}, {0.f, 0.f}};
        if (index < count) {
            const Block block = blocks[index];
            work.weights = weight + ((u64)block.expert() * N_TILES + tile_row) * K_TILES * TILE_BYTES;
            work.has_route = g < block.count();
            work.x = x + (u64)(work.has_route ? sorted_routes[block.first + g] : 0) * K + 8 * t;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (2 * t + i < block.count()) {
                    const int route = sorted_routes[block.first + 2 * t + i];
                    work.token[i] = route / TOP_K;
                    work.factor[i] = route_weights[route];
                }
            }
        }
        return work;
    };

    int index = warp;
    Work now = locate(index);
    Tile tiles[DEPTH];
    uint4 activations[X_DEPTH];
    if (index < count) {
#pragma unroll
        for (int i = 0; i < DEPTH; ++i) tiles[i] = load_tile(now.weights + i * TILE_BYTES, lane);
    }
#pragma unroll
    for (int i = 0; i < X_DEPTH; ++i) activations[i] = load_activations16(now.x + 32 * i, now.has_route);

    while (index < count) {
        const bool more = index + WARPS < count;
        const Work next = locate(index + WARPS);
        float acc[8] = {};
        for (int start = 0; start < K_TILES; start += UNROLL) {
#pragma unroll
            for (int i = 0; i < UNROLL; ++i) {
                multiply_tile(acc, tiles[i % DEPTH], columns_of(activations[i % X_DEPTH]));
                const int ahead = start + i + DEPTH, x_ahead = start + i + X_DEPTH;
                if (ahead < K_TILES) {
                    tiles[i % DEPTH] = load_tile(now.weights + ahead * TILE_BYTES, lane);
                } else if (more) {
                    tiles[i % DEPTH] = load_tile(next.weights + (ahead - K_TILES) * TILE_BYTES, lane);
                }
                if (x_ahead < K_TILES) {
                    activations[i % X_DEPTH] = load_activations16(now.x + 32 * x_ahead, now.has_route);
                } else {
                    activations[i % X_DEPTH] = load_activations16(next.x + 32 * (x_ahead - K_TILES), next.has_route);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (now.token[i] >= 0) {
                float4* sum = own + place(now.token[i], g);
                const float4 rows = rows_of(acc, i);
                const float f = now.factor[i];
                *sum = add(*sum, make_float4(f * rows.x, f * rows.y, f * rows.z, f * rows.w));
            }
        }
        index += WARPS;
        now = next;
    }
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < TOKENS * 8; i += THREADS) {
        const int token = i / 8, row = i % 8, at = place(token, row);
        float4 sum = sums[at];
#pragma unroll
        for (int j = 1; j < WARPS; ++j) sum = add(sum, sums[j * TOKENS * 8 + at]);
        const u64 out = (u64)token * N + 32 * tile_row + row;
        const float rows[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            y[out + 8 * j] = bf16_bits(rows[j] + (HAS_SHARED ? bf16_value(shared[out + 8 * j]) : 0.f));
        }
    }
}
