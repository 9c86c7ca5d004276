// mla_prepare, second part: q = normed q_a times q_b^T, in the workspace; constants in dense_gemm/gemm.cuh and prepare.cuh.
#include "dense_gemm/gemm.cuh"
#include "mla_prepare/prepare.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) q_b_rows(PREPARE_PARAMETERS) {
    gemm_block(normed_q_a(workspace), q_b, q_rows(workspace));
}
