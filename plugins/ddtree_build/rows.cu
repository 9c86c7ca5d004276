// ddtree_build, second half: the trees of all requests as the rows of the next pass. One block.
//
// Row order: per active request its root, its spine, then the other nodes as they were chosen; so a row's number follows
// from counts alone. Constants as in tree.cu, and ROWS (of the row buffers), WORDS of a mask row.
#include "tree.cuh"

constexpr int THREADS = 256;

extern "C" __global__ __launch_bounds__(THREADS) void rows(
    const float* candidates, const int* draft_requests, const int* active, const int* anchor, const int* context_len,
    const int* block_table, const int* tree_budget, const float* tree_cost, const float* calibration,
    const int* tree_width, int* tokens, int* positions, int* row_request, int* row_parent, int* row_slot, u32* mask,
    float* row_log_weight, int* first_row, int* request_rows, int* num_rows, const Plan* plans) {
    __shared__ int first[REQUESTS], counts[REQUESTS], spine[REQUESTS], used;  // spine: nodes on it, root left out
    __shared__ int owner[NODES], node_of[NODES], parent_of[NODES];           // of rows; parent_of: a row, or -1
    wait_for_previous_kernel();
    allow_next_kernel();
    for (int r = threadIdx.x; r < REQUESTS; r += THREADS) counts[r] = active[r] ? plans[r].count : -1;
    __syncthreads();
    if (threadIdx.x == 0) {
        int spare = NODES, at = 0;
        for (int r = 0; r < REQUESTS; r++) spare -= counts[r] >= 0;
        for (int r = 0; r < REQUESTS; r++) {
            first[r] = counts[r] < 0 ? 0 : at;
            if (counts[r] < 0) continue;
            counts[r] = min(counts[r], max(spare, 0));
            spare -= counts[r];
            at += counts[r] + 1;
        }
        used = at;
        num_rows[0] = at;
    }
    __syncthreads();
    for (int r = threadIdx.x; r < REQUESTS; r += THREADS) {
        const int last = counts[r];
        first_row[r] = first[r];
        request_rows[r] = last + 1;
        spine[r] = last > 0 ? plans[r].spine_before[last] + plans[r].on_spine[last] : 0;
    }
    __syncthreads();
    auto row_of = [&](int r, int n) {
        const Plan& plan = plans[r];
        return first[r] + (plan.on_spine[n] ? plan.depth[n] : spine[r] + n - plan.spine_before[n]);
    };
    for (int i = threadIdx.x; i < REQUESTS * NODES; i += THREADS) {
        const int r = i / NODES, n = i % NODES;
        if (n > counts[r]) continue;
        const int row = row_of(r, n), parent = plans[r].parent[n];
        owner[row] = r;
        node_of[row] = n;
        parent_of[row] = parent < 0 ? -1 : row_of(r, parent);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < used; i += THREADS) {
        const int r = owner[i], n = node_of[i], address = context_len[r] + i - first[r];
        const Plan& plan = plans[r];
        u32 words[WORDS] = {};
        for (int row = i; row >= 0; row = parent_of[row]) {
            const int bit = row - first[r];
#pragma unroll
            for (int w = 0; w < WORDS; w++) words[w] |= bit / 32 == w ? 1u << (bit % 32) : 0u;
        }
        tokens[i] = plan.token[n];
        positions[i] = context_len[r] + plan.depth[n];
        row_request[i] = r;
        row_parent[i] = parent_of[i];
        row_slot[i] = block_table[r * PAGES + address / PAGE_SIZE] * PAGE_SIZE + address % PAGE_SIZE;
        row_log_weight[i] = (float)plan.weight[n];
#pragma unroll
        for (int w = 0; w < WORDS; w++) mask[i * WORDS + w] = words[w];
    }
    for (int i = used + threadIdx.x; i < ROWS; i += THREADS) {
        tokens[i] = positions[i] = row_slot[i] = 0;
        row_request[i] = row_parent[i] = -1;
        row_log_weight[i] = 0.f;
    }
    for (int i = used * WORDS + threadIdx.x; i < NODES * WORDS; i += THREADS) mask[i] = 0;
}
