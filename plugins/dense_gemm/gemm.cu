// Entry of `dense_gemm`; gemm.cuh has the kernel and its constants.
#include "gemm.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) gemm(const u16* x, const u16* weight, void* y) {
    gemm_block(x, weight, y);
}
