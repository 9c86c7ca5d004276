// Experts and lists of any number of tokens. Constants: TOKENS, EXPERTS, TOP_K, NORMALISE, SCALING.
//
// `choose_experts` gives every token a warp. `list_routes` gives every expert a block: it counts the routes of lower
// experts, which is where its list starts, and then writes its own; each warp reads a stretch of the routes, so the
// lists are sorted.
#include "choose.cuh"

constexpr int ROUTES = TOKENS * TOP_K;
constexpr int WARPS = 8;
constexpr int THREADS = 32 * WARPS;
constexpr int STRETCH = (ROUTES + THREADS - 1) / THREADS * 32;  // routes of a warp

extern "C" __global__ void __launch_bounds__(THREADS)
    choose_experts(const u16*, const u16*, const float* bias, const int* row_request, float* route_weights, int*, int*,
                   int* route_experts, const float* logits) {
    const Biases biases = load_biases(bias);
    wait_for_previous_kernel();
    allow_next_kernel();
    const int token = WARPS * blockIdx.x + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (token >= TOKENS) return;
    const Choice choice = choose(logits + (u64)token * EXPERTS, biases, row_request[token] < 0);
    if (lane < TOP_K) {
        route_weights[(u64)token * TOP_K + lane] = choice.weight;
        route_experts[(u64)token * TOP_K + lane] = choice.expert;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    list_routes(const u16*, const u16*, const float*, const int*, float*, int* expert_offsets, int* sorted_routes,
                const int* route_experts, const float*) {
    DYNAMIC_SHARED(memory);
    int* lower = (int*)memory;   // [WARPS]: routes of lower experts
    int* equal = lower + WARPS;   // [WARPS]: routes of this expert
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, expert = blockIdx.x;
    const int begin = warp * STRETCH, end = begin + STRETCH < ROUTES ? begin + STRETCH : ROUTES;
    wait_for_previous_kernel();
    allow_next_kernel();
    int below = 0, mine = 0;
    for (int route = begin + lane; route < end; route += 32) {
        const int other = route_experts[route];
        below += other >= 0 && other < expert;
        mine += other == expert;
    }
    below = __reduce_add_sync(0xffffffffu, below);
    mine = __reduce_add_sync(0xffffffffu, mine);
    if (lane == 0) lower[warp] = below, equal[warp] = mine;
    __syncthreads();
    int first = 0, last = 0, place = 0;
    for (int i = 0; i < WARPS; ++i) {
        first += lower[i];
        last += lower[i] + equal[i];
        if (i < warp) place += equal[i];
    }
    place += first;
    for (int base = begin; base < end; base += 32) {
        const int route = base + lane;
        const bool found = route < end && route_experts[route] == expert;
        const u32 all = __ballot_sync(0xffffffffu, found);
        if (found) sorted_routes[place + __popc(all & ((1u << lane) - 1))] = route;
        place += __popc(all);
    }
    if (threadIdx.x == 0) {
        expert_offsets[expert + 1] = last;
        if (expert == 0) expert_offsets[0] = 0;
    }
    if (expert == EXPERTS - 1) {
        for (int i = last + threadIdx.x; i < ROUTES; i += THREADS) sorted_routes[i] = -1;
    }
}
