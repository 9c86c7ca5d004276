// Router logits [TOKENS, N] in float32, in the workspace of the step; constants in dense_gemm/gemm.cuh.
#include "dense_gemm/gemm.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    logits(const u16* x, const u16* weight, const float*, const int*, float*, int*, int*, int*, float* workspace) {
    gemm_block(x, weight, workspace);
}
