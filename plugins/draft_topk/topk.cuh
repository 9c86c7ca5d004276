// What the two halves of draft_topk share: per row and segment, K keys in descending order, and a partial logsumexp.
#pragma once

#include "order.cuh"

constexpr int THREADS = 256;

struct Part {
    u64 keys[TOP_K];
    float most, sum;  // logsumexp = most + log(sum); a NaN in the segment makes sum NaN
};
