// ddtree_accept: the path that the target drew through every tree, and the state of the requests after it. One block.
//
// A warp follows a request: in each step its lanes look for the child of the row that holds the drawn token. As
// plugins/ddtree_accept/reference.py. Constants: REQUESTS, PATH (longest), STOPS, VOCAB. A step of the
// walk is some 0.5 us; a few kilobytes are moved.
#include "ptx.cuh"

constexpr int WARPS = 8;
enum { NONE, STOP, LENGTH, NOT_A_NUMBER, DEAD_END };  // FINISH_* of plugins/core/state.py
constexpr int SAMPLED_NAN = -1;

extern "C" __global__ __launch_bounds__(32 * WARPS) void accept(
    const int* sampled, const int* tokens, const int* row_parent, const int* positions, const int* row_slot,
    const int* first_row, const int* request_rows, const int* stop_ids, const int* penalized, int* context_len,
    int* anchor, int* remaining, int* emitted, int* num_emitted, int* path_rows, int* finish, int* append_rows,
    int* append_positions, int* append_slots, int* token_counts) {
    __shared__ int paths[REQUESTS][PATH], counts[REQUESTS], starts[REQUESTS + 1];
    const int lane = threadIdx.x % 32;
    wait_for_previous_kernel();
    allow_next_kernel();
    for (int r = threadIdx.x / 32; r < REQUESTS; r += WARPS) {
        const int first = first_row[r], rows = request_rows[r], allowed = remaining[r];
        int row = rows ? first : -1, count = 0;
        int ending = rows && allowed <= 0 ? LENGTH : NONE;
        while (row >= 0 && ending == NONE && count < PATH) {
            const int token = sampled[row];
            if (token < 0) {
                ending = token == SAMPLED_NAN ? NOT_A_NUMBER : DEAD_END;
                break;
            }
            if (lane == 0) {
                paths[r][count] = row;
                path_rows[r * PATH + count] = row;
                emitted[r * PATH + count] = token;
                if (penalized[r]) atomicAdd(&token_counts[(i64)r * VOCAB + tokens[row]], 1);
            }
            count++;
            const bool stops = lane < STOPS && stop_ids[r * STOPS + lane] == token;
            if (__any_sync(~0u, stops))
                ending = STOP;
            else if (count == allowed)
                ending = LENGTH;
            int next = -1;
            for (int i = row + 1 + lane; i < first + rows; i += 32)
                if (row_parent[i] == row && tokens[i] == token) next = i;
            next = __reduce_max_sync(~0u, next);
            if (lane == 0) anchor[r] = token;
            row = next;
        }
        for (int i = count + lane; i < PATH; i += 32) emitted[r * PATH + i] = path_rows[r * PATH + i] = -1;
        __syncwarp();
        if (lane == 0) {
            counts[r] = num_emitted[r] = count;
            finish[r] = ending;
            context_len[r] += count;
            remaining[r] = allowed - count;
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        starts[0] = 0;
        for (int r = 0; r < REQUESTS; r++) starts[r + 1] = starts[r] + counts[r];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < REQUESTS * PATH; i += 32 * WARPS) {
        const int r = i / PATH, k = i % PATH;
        if (k >= counts[r]) continue;
        append_rows[starts[r] + k] = paths[r][k];
        append_positions[starts[r] + k] = positions[paths[r][k]];
        append_slots[starts[r] + k] = row_slot[first_row[r] + k];  // where kv_compact leaves it
    }
    for (int i = starts[REQUESTS] + threadIdx.x; i < REQUESTS * PATH; i += 32 * WARPS) {
        append_rows[i] = -1;
        append_positions[i] = append_slots[i] = 0;
    }
}
