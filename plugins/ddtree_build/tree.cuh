// The tree of one request as tree.cu leaves it for rows.cu.
#pragma once

#include "ptx.cuh"

struct Plan {
    int count;  // nodes beside the root
    int token[NODES], parent[NODES], depth[NODES];
    int on_spine[NODES];      // 1: root or on the chain of best children
    int spine_before[NODES];  // nodes on the spine, root left out, among those chosen earlier
    double weight[NODES];     // log probability of the path
};
