// Router logits float32 [TOKENS, N] in the workspace of the step, and behind them the zero from which select.cu counts;
// constants in dense_gemm/gemm.cuh.
#include "dense_gemm/gemm.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    logits(const u16* x, const u16* weight, const float*, const int*, float*, int*, int*, int*, float* workspace) {
    gemm_block(x, weight, workspace);
    if (blockIdx.x + blockIdx.y + blockIdx.z + threadIdx.x == 0) ((int*)workspace)[(u64)TOKENS * N] = 0;
}
