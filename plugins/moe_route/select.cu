// Experts and lists of up to 128 tokens, in one block. Constants: TOKENS, EXPERTS, TOP_K, NORMALISE, SCALING.
//
// Each expert gets a bit mask of its tokens; the place of a route in its expert's list is the number of bits below its
// token. So the lists come out sorted whatever the order in which the warps finish.
#include "choose.cuh"

constexpr int WARPS = 32;
constexpr int THREADS = 32 * WARPS;
constexpr int ROUTES = TOKENS * TOP_K;
constexpr int WORDS = (TOKENS + 31) / 32;
static_assert(EXPERTS <= THREADS, "a thread counts one expert");

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    select_experts(const u16*, const u16*, const float* bias, const int* row_request, float* route_weights,
           int* expert_offsets, int* sorted_routes, int* route_experts, const float* logits) {
    DYNAMIC_SHARED(memory);
    u32* mask = (u32*)memory;                  // [EXPERTS][WORDS]
    int* first = (int*)(mask + EXPERTS * WORDS);  // [EXPERTS + 1]
    int* chosen = first + EXPERTS + 1;         // [ROUTES]
    int* sums = chosen + ROUTES;               // [WARPS]
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = threadIdx.x; i < EXPERTS * WORDS; i += THREADS) mask[i] = 0;
    __syncthreads();

    wait_for_previous_kernel();
    allow_next_kernel();
    for (int token = warp; token < TOKENS; token += WARPS) {
        const Choice choice = choose(logits + token * EXPERTS, bias, row_request[token] < 0);
        if (lane < TOP_K) {
            route_weights[token * TOP_K + lane] = choice.weight;
            route_experts[token * TOP_K + lane] = choice.expert;
            chosen[token * TOP_K + lane] = choice.expert;
            if (choice.expert >= 0) atomicOr(mask + choice.expert * WORDS + token / 32, 1u << token % 32);
        }
    }
    __syncthreads();

    int count = 0;
    if (threadIdx.x < EXPERTS) {
        for (int i = 0; i < WORDS; ++i) count += __popc(mask[threadIdx.x * WORDS + i]);
    }
    int end = count;
    for (int step = 1; step < 32; step *= 2) {
        const int before = __shfl_up_sync(0xffffffffu, end, step);
        if (lane >= step) end += before;
    }
    if (lane == 31) sums[warp] = end;
    __syncthreads();
    for (int i = 0; i < warp; ++i) end += sums[i];
    if (threadIdx.x < EXPERTS) {
        first[threadIdx.x + 1] = end;
        expert_offsets[threadIdx.x + 1] = end;
    }
    if (threadIdx.x == 0) first[0] = expert_offsets[0] = 0;
    __syncthreads();

    for (int route = threadIdx.x; route < ROUTES; route += THREADS) {
        const int expert = chosen[route], token = route / TOP_K;
        if (route >= first[EXPERTS]) sorted_routes[route] = -1;
        if (expert < 0) continue;
        const u32* bits = mask + expert * WORDS;
        int place = first[expert] + __popc(bits[token / 32] & ((1u << token % 32) - 1));
        for (int i = 0; i < token / 32; ++i) place += __popc(bits[i]);
        sorted_routes[place] = route;
    }
}
