// The instructions that the kernels use beyond plain C++, one function each.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

#ifndef INFINITY  // NVRTC has no math.h
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fc00000)
#endif

#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) u8 name[]

// --- programmatic dependent launch ---------------------------------------------------------------

// Every kernel calls this before its first access to anything that another kernel writes, reads or frees.
__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next kernel take its place on the chip; it still waits for the end of this one.
__device__ __forceinline__ void allow_next_kernel() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// --- loads ---------------------------------------------------------------------------------------

// Weights: read once, constant for the life of the engine. Volatile, so that they stay where they are issued.
__device__ __forceinline__ uint4 load_weights16(const void* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

__device__ __forceinline__ uint2 load_weights8(const void* p) {
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}

// Weights are read once a pass: they leave the L2 first, so that lists, activations and code stay there.
__device__ __forceinline__ u64 leaves_l2_first() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Bulk copies: 16-byte aligned, done by the copy engine, which reports to an mbarrier in shared memory.
__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// A barrier for so many arrivals a phase: one, of who requests copies, unless told. Whoever initialises it synchronises
// afterwards.
__device__ __forceinline__ void mbarrier_init(u64* barrier, u32 arrivals = 1) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\nfence.mbarrier_init.release.cluster;" ::"r"(
                     shared_address(barrier)),
                 "r"(arrivals)
                 : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// The arrival of who requests copies of so many bytes next, and one of them.
__device__ __forceinline__ void mbarrier_expect(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void bulk_copy(void* to, const void* from, u32 bytes, u64* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

// Expected and copied, past the L2.
__device__ __forceinline__ void bulk_load(void* to, const void* from, u32 bytes, u64* barrier) {
    mbarrier_expect(barrier, bytes);
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
            shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(leaves_l2_first())
        : "memory");
}

// Waits for the end of the phase with this parity: 0 for a barrier's first phase, 1 for the next, ..
__device__ __forceinline__ void mbarrier_wait(u64* barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nwait:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra wait;\n}" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}

// Copies of 16 bytes by the thread itself; `copies_left` waits until at most that many groups are on their way.
__device__ __forceinline__ void copy16_or_zero(void* to, const void* from, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(valid ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void copy16_streamed(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
                 "l"(leaves_l2_first())
                 : "memory");
}

__device__ __forceinline__ void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int groups>
__device__ __forceinline__ void copies_left() {
    asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory");
}

// Four 8 x 8 matrices of 16-bit values from shared memory: lane l gives the address of row l % 8 of matrix l / 8, and
// gets of each matrix the two values 2 (l % 4), 2 (l % 4) + 1 of row l / 4 (of the transposed matrix with `trans`).
__device__ __forceinline__ uint4 ldmatrix(u32 address) {
    uint4 m;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m.x), "=r"(m.y), "=r"(m.z), "=r"(m.w)
                 : "r"(address)
                 : "memory");
    return m;
}

__device__ __forceinline__ uint4 ldmatrix_trans(u32 address) {
    uint4 m;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m.x), "=r"(m.y), "=r"(m.z), "=r"(m.w)
                 : "r"(address)
                 : "memory");
    return m;
}

// Activations: 16 bytes through L1. Volatile like the loads of weights.
__device__ __forceinline__ uint4 load_activations16(const void* p) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}

// The same, or zeros where `valid` is false.
__device__ __forceinline__ uint4 load_activations16(const void* p, bool valid) {
    uint4 v;
    asm volatile(
        "{\n.reg .pred q;\nsetp.ne.u32 q, %5, 0;\n"
        "mov.u32 %0, 0;\nmov.u32 %1, 0;\nmov.u32 %2, 0;\nmov.u32 %3, 0;\n"
        "@q ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
        : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
        : "l"(p), "r"((u32)valid)
        : "memory");
    return v;
}

// Volatile, so that it stays where it is issued.
__device__ __forceinline__ float load_constant(const float* p) {
    float v;
    asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(v) : "l"(p));
    return v;
}

// What another block of this kernel has written, past L1.
__device__ __forceinline__ int load_from_l2(const int* p) {
    int v;
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

// --- arithmetic ----------------------------------------------------------------------------------

__device__ __forceinline__ float bf16_low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float bf16_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ float bf16_value(u16 bits) { return __uint_as_float((u32)bits << 16); }

__device__ __forceinline__ u32 bf16_pair(float low, float high) {
    u32 d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

__device__ __forceinline__ u16 bf16_bits(float v) { return (u16)bf16_pair(v, 0.f); }

// d = a - b in each half, b exact: used where the result is exact too.
__device__ __forceinline__ u32 bf16x2_sub(u32 a, u32 b) {
    u32 d;
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

// (a & b) | c in one instruction, which the compiler does not find where two of the three are constants.
__device__ __forceinline__ u32 and_or(u32 a, u32 b, u32 c) {
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// bytes of (low, high) picked by the nibbles of `selector`; volatile, so that its operands are free for the next load
template <u32 selector>
__device__ __forceinline__ u32 pick_bytes(u32 low, u32 high) {
    u32 d;
    asm volatile("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(low), "r"(high), "n"(selector));
    return d;
}

// d = a b + c: a 16 x 16 (rows), b 16 x 8 (columns), bf16; c, d 16 x 8 float32.
__device__ __forceinline__ void mma_16x8x16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1,
                                            const float (&c)[4]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.f + __expf(-x)); }

// --- clusters ------------------------------------------------------------------------------------

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// 16 bytes of the shared memory of block `rank` of this cluster, at the address that `p` has in this block.
__device__ __forceinline__ float4 load_cluster16(const float4* p, u32 rank) {
    float4 v;
    u32 local = (u32)__cvta_generic_to_shared(p), remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(rank));
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(remote)
                 : "memory");
    return v;
}
