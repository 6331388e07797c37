// Instructions that CUDA C has no functions for, each a function of one line of PTX. Where there is no GPU, the emulation
// of the tests has functions of these names.
//
// Fragments of `mma`, as "Matrix Fragments for mma.m16n8k16" and "... m16n8k8" of the PTX ISA have them, with g = lane / 4
// and t = lane % 4; a register has two halves, the one of the lower column in its low bits:
//   a[0], a[1]  rows g and g + 8 of A [16, 8], columns 2t and 2t + 1;  a[2], a[3]  the same of its columns 8 to 15
//   b[0]        rows 2t and 2t + 1 of B [8, 8], column g;              b[1]        the same of its rows 8 to 15
//   d[0], d[1]  row g of D [16, 8], columns 2t and 2t + 1;             d[2], d[3]  the same of row g + 8
#ifdef __CUDA_ARCH__
#define PI_SM (__CUDA_ARCH__ / 10)

// D += A B, with A [16, 8], B [8, 8].
static __device__ __forceinline__ void pi_mma_m16n8k8(float *d, const unsigned *a, const unsigned *b) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b[0]));
}

#if __CUDA_ARCH__ >= 800
// D += A B, with A [16, 16], B [16, 8].
static __device__ __forceinline__ void pi_mma_m16n8k16(float *d, const unsigned *a, const unsigned *b) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Copies 16 bytes to shared memory, `bytes` of them from `source` and zeros behind these. They may arrive at any time
// before `pi_cp_async_wait_all`.
static __device__ __forceinline__ void pi_cp_async_16(void *shared, const void *source, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((unsigned)__cvta_generic_to_shared(shared)),
               "l"(source), "r"(bytes)
               : "memory");
}

static __device__ __forceinline__ void pi_cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }
#endif

// Loads four matrices [8, 8] of halves: lane 8 m + r has the address of row r of matrix m, 16 bytes. Register m gets the
// elements of matrix m in row g, columns 2t and 2t + 1.
static __device__ __forceinline__ void pi_ldmatrix_x4(unsigned *to, const void *row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"((unsigned)__cvta_generic_to_shared(row))
               : "memory");
}

// As above, of the transposed matrices: register m gets the elements in rows 2t and 2t + 1, column g.
static __device__ __forceinline__ void pi_ldmatrix_x4_trans(unsigned *to, const void *row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"((unsigned)__cvta_generic_to_shared(row))
               : "memory");
}

// Instructions that order memory, with the least order that kernels here need. A release is ordered after all that came
// before it, an acquire before all that comes after it. CUDA's `__threadfence` orders stores before later loads of other
// places as well (`fence.sc`), which takes longer. Nothing here needs that: no two threads each write a place and then
// read the other's. A barrier before a release and one after an acquire extend the order to the other threads of both
// blocks ("Causality order" of the PTX ISA).

// Returns what was at `at`, and counts it on, from `last` to 0. Both a release and an acquire, for all of the GPU.
static __device__ __forceinline__ unsigned pi_inc_acq_rel_gpu(unsigned *at, unsigned last) {
  unsigned before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(__cvta_generic_to_global(at)), "r"(last)
               : "memory");
  return before;
}

// Writes `value` as a release, for the GPU and the host.
static __device__ __forceinline__ void pi_store_release_sys(int *at, int value) {
  asm volatile("st.release.sys.global.s32 [%0], %1;" ::"l"(__cvta_generic_to_global(at)), "r"(value) : "memory");
}

// Makes volatile reads before it acquires, for the GPU and the host.
static __device__ __forceinline__ void pi_fence_acq_rel_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
#endif
#ifndef PI_SM  // the emulation of the tests is of this architecture, unless they name another one
#define PI_SM 80
#endif
