// Experts and lists of up to 128 tokens. Constants: TOKENS, EXPERTS, TOP_K, NORMALISE, SCALING.
//
// A warp chooses the experts of a token; the block that finishes last makes the lists. There each expert gets a bit
// mask of its tokens, and the place of a route in its expert's list is the number of bits below its token. So the lists
// come out sorted whatever the order in which the warps finish.
#include "choose.cuh"

constexpr int WARPS = 8;
constexpr int THREADS = 32 * WARPS;
constexpr int ROUTES = TOKENS * TOP_K;
constexpr int WORDS = (TOKENS + 31) / 32;
constexpr int PER_THREAD = (EXPERTS + THREADS - 1) / THREADS;
constexpr int ROUTES_EACH = (ROUTES + THREADS - 1) / THREADS;

extern "C" __global__ void __launch_bounds__(THREADS)
    select_experts(const u16*, const u16*, const float* bias, const int* row_request, float* route_weights,
                   int* expert_offsets, int* sorted_routes, int* route_experts, float* workspace) {
    DYNAMIC_SHARED(memory);
    u32* mask = (u32*)memory;                   // [EXPERTS][WORDS]
    int* sums = (int*)(mask + EXPERTS * WORDS);  // [WARPS]
    int* finished = sums + WARPS;
    int* chosen = finished + 1;                 // [WARPS * TOP_K], of this block's tokens
    int* first = chosen + WARPS * TOP_K;        // [EXPERTS + 1]; not beside `sums`, which is read as it is written
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = threadIdx.x; i < EXPERTS * WORDS; i += THREADS) mask[i] = 0;
    const Biases biases = load_biases(bias);

    wait_for_previous_kernel();
    allow_next_kernel();
    const int token = WARPS * blockIdx.x + warp;
    if (token < TOKENS) {
        const Choice choice = choose(workspace + token * EXPERTS, biases, row_request[token] < 0);
        if (lane < TOP_K) {
            route_weights[token * TOP_K + lane] = choice.weight;
            route_experts[token * TOP_K + lane] = choice.expert;
            chosen[warp * TOP_K + lane] = choice.expert;
        }
    }
    if (gridDim.x > 1) {
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) *finished = atomicAdd((int*)(workspace + (u64)TOKENS * EXPERTS), 1);
        __syncthreads();
        if (*finished != gridDim.x - 1) return;
        __threadfence();
    } else {
        __syncthreads();
    }

    int experts[ROUTES_EACH];
#pragma unroll
    for (int i = 0; i < ROUTES_EACH; ++i) {
        const int route = THREADS * i + threadIdx.x;
        experts[i] = -1;
        if (route < ROUTES) experts[i] = TOKENS <= WARPS ? chosen[route] : load_from_l2(route_experts + route);
    }
#pragma unroll
    for (int i = 0; i < ROUTES_EACH; ++i) {
        const int token = (THREADS * i + threadIdx.x) / TOP_K;
        if (experts[i] >= 0) atomicOr(mask + experts[i] * WORDS + token / 32, 1u << token % 32);
    }
    __syncthreads();

    int counts[PER_THREAD], count = 0;
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
        const int expert = threadIdx.x * PER_THREAD + i;
        counts[i] = 0;
        for (int word = 0; expert < EXPERTS && word < WORDS; ++word) counts[i] += __popc(mask[expert * WORDS + word]);
        count += counts[i];
    }
    int end = count;
    for (int step = 1; step < 32; step *= 2) {
        const int before = __shfl_up_sync(0xffffffffu, end, step);
        if (lane >= step) end += before;
    }
    if (lane == 31) sums[warp] = end;
    __syncthreads();
    for (int i = 0; i < warp; ++i) end += sums[i];
    int next = end - count;
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
        const int expert = threadIdx.x * PER_THREAD + i;
        if (expert >= EXPERTS) break;
        next += counts[i];
        first[expert + 1] = next;
        expert_offsets[expert + 1] = next;
    }
    if (threadIdx.x == 0) first[0] = expert_offsets[0] = 0;
    __syncthreads();

#pragma unroll
    for (int i = 0; i < ROUTES_EACH; ++i) {
        const int route = THREADS * i + threadIdx.x, token = route / TOP_K, expert = experts[i];
        if (route < ROUTES && route >= first[EXPERTS]) sorted_routes[route] = -1;
        if (expert < 0) continue;
        const u32* bits = mask + expert * WORDS;
        int place = first[expert] + __popc(bits[token / 32] & ((1u << token % 32) - 1));
        for (int word = 0; word < token / 32; ++word) place += __popc(bits[word]);
        sorted_routes[place] = route;
    }
}
