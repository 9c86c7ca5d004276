// ddtree_build, first half: the best-first tree of every request, one block each, to the workspace.
//
// As plugins/ddtree_build/reference.py: candidates of all ranks merged per depth, weights in float64, nodes taken by
// (weight descending, ranks ascending), their number by budget or by the cost rule. A frontier of one entry for each node
// that may come next lies in shared memory; one warp takes its best, and puts the node's next sibling and first child in.
// What that loop and the cost rule need of slow double functions is computed by many threads at once, before and after it.
//
// Constants: REQUESTS, BLOCKS (draft blocks; 0: roots only), DEPTH, TOP_K, WORLD ranks, NODES (most rows of a pass), COSTS
// (entries of a cost row), PAGES, PAGE_SIZE. Work: NODES steps of some 0.2 us; bytes moved: the candidates, once.
#include "tree.cuh"

constexpr int THREADS = 512;
constexpr int PART = 2 * TOP_K + 1;   // of a rank: logits, ids, logsumexp
constexpr int FRONTIER = NODES + 32;  // an entry more than nodes, rounded up to lanes

__device__ __forceinline__ bool finite(double v) { return fabs(v) <= 1.7976931348623157e308; }

// Larger weights, larger keys.
__device__ __forceinline__ u64 weight_key(double v) {
    const u64 bits = (u64)__double_as_longlong(v + 0.0);
    return bits >> 63 ? ~bits : bits | 1ull << 63;
}

struct Options {  // of every depth, by descending probability
    double weight[DEPTH][TOP_K];
    int token[DEPTH][TOP_K];
    int count[DEPTH];  // up to the first that is not finite
};

// Places before (logit, id) in rank `rank`'s list, which is in the order (logit descending, id ascending).
__device__ __forceinline__ int place(const float* part, float logit, int id) {
    const int* ids = (const int*)(part + TOP_K);
    int low = 0, high = TOP_K;
    while (low < high) {
        const int middle = (low + high) / 2;
        const bool before = part[middle] > logit || (part[middle] == logit && ids[middle] < id);
        low = before ? middle + 1 : low;
        high = before ? high : middle;
    }
    return low;
}

// The logsumexp of all ranks' logits of a depth; `parts`: of all ranks, in shared memory.
__device__ double total_of(const float* parts) {
    double total = parts[PART - 1];
    for (int r = 1; r < WORLD; r++) {  // logaddexp in rank order
        const double next = parts[r * PART + PART - 1], most = fmax(total, next);
        total = total == next ? total + log(2.0) : most + log1p(exp(-fabs(total - next)));
        if (isnan(next)) total = next;
    }
    return total;
}

// Candidate i of a depth to its place among those of all ranks.
__device__ __forceinline__ void merge(const float* parts, int depth, int i, double total, double factor, int width,
                                      Options& options) {
    const int rank = i / TOP_K, own = i % TOP_K;
    const float logit = parts[rank * PART + own];
    const int id = ((const int*)parts)[rank * PART + TOP_K + own];
    int at = own;
    for (int r = 0; r < WORLD; r++)
        if (r != rank) at += place(parts + r * PART, logit, id);
    if (at >= TOP_K) return;
    const double weight = (double)logit - total + factor;
    options.weight[depth][at] = at < width && !isnan(weight) ? fmin(weight, 0.0) : nan("");
    options.token[depth][at] = id;
}

struct Frontier {
    u64 key[FRONTIER];     // of the weight; 0: empty
    u64 high[FRONTIER];    // ranks + 1 of depths 1 to 8, 7 bits each
    u64 low[FRONTIER];     // of depths 9 to 16
    double weight[FRONTIER];
    int parent[FRONTIER], rank[FRONTIER];
};

extern "C" __global__ __launch_bounds__(THREADS) void tree(
    const float* candidates, const int* draft_requests, const int* active, const int* anchor, const int* context_len,
    const int* block_table, const int* tree_budget, const float* tree_cost, const float* calibration,
    const int* tree_width, int* tokens, int* positions, int* row_request, int* row_parent, int* row_slot, u32* mask,
    float* row_log_weight, int* first_row, int* request_rows, int* num_rows, Plan* plans) {
    __shared__ Options options;
    __shared__ Frontier frontier;
    __shared__ int block, depth_of[NODES];
    __shared__ double weight_of[NODES], totals[DEPTH], factors[DEPTH];
    const int request = blockIdx.x;
    Plan& plan = plans[request];
    wait_for_previous_kernel();
    allow_next_kernel();
    if (threadIdx.x == 0) {
        block = -1;
        for (int b = 0; b < BLOCKS; b++)
            if (draft_requests[b] == request) block = b;  // the last, as a dictionary keeps
        plan.count = 0;
        plan.token[0] = anchor[request];
        plan.parent[0] = -1;
        plan.depth[0] = 0;
        plan.spine_before[0] = 0;
        plan.on_spine[0] = 1;
        plan.weight[0] = weight_of[0] = 0.0;
        depth_of[0] = 0;
    }
    __syncthreads();
    if (!active[request] || block < 0) return;
    const int width = tree_width[request] ? tree_width[request] : TOP_K;
    DYNAMIC_SHARED(memory);
    float* parts = (float*)memory;  // [DEPTH][WORLD][PART]
    for (int i = threadIdx.x; i < DEPTH * WORLD * PART; i += THREADS)
        parts[i] = candidates[(i64)block * DEPTH * WORLD * PART + i];
    for (int i = threadIdx.x; i < FRONTIER; i += THREADS) frontier.key[i] = 0;
    __syncthreads();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp < DEPTH && lane == 0) {
        totals[warp] = total_of(parts + warp * WORLD * PART);
        factors[warp] = log((double)calibration[request * DEPTH + warp]);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < DEPTH * WORLD * TOP_K; i += THREADS) {
        const int d = i / (WORLD * TOP_K);
        merge(parts + d * WORLD * PART, d, i % (WORLD * TOP_K), totals[d], factors[d], width, options);
    }
    __syncthreads();
    if (warp < DEPTH) {
        int count = TOP_K;
        for (int c = 0; c < TOP_K && count == TOP_K; c += 32) {
            const u32 ends = __ballot_sync(~0u, c + lane < TOP_K && !finite(options.weight[warp][c + lane]));
            if (ends) count = c + __ffs(ends) - 1;
        }
        if (lane == 0) options.count[warp] = count;
    }
    __syncthreads();
    if (warp != 0) return;

    const int budget = min(min(tree_budget[request], NODES - 1), PAGES * PAGE_SIZE - context_len[request] - 1);
    int size = 0, count = 0, spine_end = 0, spine = 0, depth = 0;  // of the last node
    u64 high = 0, low = 0;
    double weight = 0.0;
    while (count < budget) {
        if (depth < DEPTH && options.count[depth] > 0) {  // the last node's first child
            if (lane == 0) {
                const double child = weight + options.weight[depth][0];
                frontier.key[size] = weight_key(child);
                frontier.weight[size] = child;
                frontier.high[size] = high | (depth < 8 ? 1ull << (7 * (7 - depth)) : 0);
                frontier.low[size] = low | (depth >= 8 ? 1ull << (7 * (15 - depth)) : 0);
                frontier.parent[size] = count;
                frontier.rank[size] = 0;
            }
            size++;
        }
        __syncwarp();
        u64 best = 0;
        int at = -1;
        for (int i = lane; i < size; i += 32) {
            const u64 key = frontier.key[i];
            const bool tie = at >= 0 && key == best;
            const bool sooner =
                tie && (frontier.high[i] < frontier.high[at] ||
                        (frontier.high[i] == frontier.high[at] && frontier.low[i] < frontier.low[at]));
            if (key && (key > best || sooner)) best = key, at = i;
        }
        const u32 top = __reduce_max_sync(~0u, (u32)(best >> 32));
        if (top == 0) break;  // nothing is left
        const u32 bottom = __reduce_max_sync(~0u, (u32)(best >> 32) == top ? (u32)best : 0u);
        bool mine = best == ((u64)top << 32 | bottom);
        u32 equal = __ballot_sync(~0u, mine);
        int owner = __ffs(equal) - 1;
        for (equal &= equal - 1; equal; equal &= equal - 1) {  // ties: the smaller ranks
            const int a = __shfl_sync(~0u, at, owner), b = __shfl_sync(~0u, at, __ffs(equal) - 1);
            const bool sooner = frontier.high[b] < frontier.high[a] ||
                                (frontier.high[b] == frontier.high[a] && frontier.low[b] < frontier.low[a]);
            owner = sooner ? __ffs(equal) - 1 : owner;
        }
        at = __shfl_sync(~0u, at, owner);
        const int parent = frontier.parent[at], rank = frontier.rank[at];
        weight = frontier.weight[at];
        high = frontier.high[at];
        low = frontier.low[at];
        depth = depth_of[parent] + 1;
        count++;
        const bool on_spine = parent == spine_end && rank == 0;
        __syncwarp();
        if (lane == 0) {
            plan.token[count] = options.token[depth - 1][rank];
            plan.parent[count] = parent;
            plan.depth[count] = depth_of[count] = depth;
            plan.weight[count] = weight_of[count] = weight;
            plan.on_spine[count] = on_spine;
            plan.spine_before[count] = spine;
            if (rank + 1 < options.count[depth - 1]) {  // its next sibling takes its place
                const double next = weight_of[parent] + options.weight[depth - 1][rank + 1];
                frontier.key[at] = weight_key(next);
                frontier.weight[at] = next;
                frontier.rank[at] = rank + 1;
                if (depth <= 8)
                    frontier.high[at] += 1ull << (7 * (8 - depth));
                else
                    frontier.low[at] += 1ull << (7 * (16 - depth));
            } else {
                frontier.key[at] = 0;
            }
        }
        spine += on_spine;
        spine_end = on_spine ? count : spine_end;
        __syncwarp();
    }
    // the cost rule: the first n that maximises (1 + sum of the first n probabilities) / cost[n]
    const float* cost = tree_cost + (i64)request * COSTS;
    bool any = false;
    for (int n = lane; n < COSTS; n += 32) any |= cost[n] != 0.f;
    if (__any_sync(~0u, any)) {
        const int last = min(count, COSTS - 1);
        for (int n = lane + 1; n <= last; n += 32) weight_of[n] = exp(weight_of[n]);
        __syncwarp();
        if (lane == 0) {
            double sum = 0.0;
            for (int n = 1; n <= last; n++) weight_of[n] = sum += weight_of[n];
        }
        __syncwarp();
        double best = -2.0;
        int chosen = NODES;
        for (int n = lane; n <= last; n += 32) {
            const double price = cost[n], value = price > 0.0 ? (1.0 + weight_of[n]) / price : -1.0;  // the root's: 0
            if (value > best) best = value, chosen = n;
        }
#pragma unroll
        for (int d = 1; d < 32; d <<= 1) {
            const double other = __shfl_xor_sync(~0u, best, d);
            const int its = __shfl_xor_sync(~0u, chosen, d);
            if (other > best || (other == best && its < chosen)) best = other, chosen = its;
        }
        count = chosen;
    }
    if (lane == 0) plan.count = count;
}
