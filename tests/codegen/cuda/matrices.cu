// Instructions for matrices, called by one warp each: what lanes give and get is in arrays of 32 bits, [register, lane].

static __device__ __forceinline__ void load(unsigned *to, const unsigned *from, int count) {
  for (int i = 0; i < count; ++i) to[i] = from[32 * i + threadIdx.x];
}

extern "C" __global__ void multiply_k16(const unsigned *__restrict__ a, const unsigned *__restrict__ b,
                                        float *__restrict__ d) {
  unsigned own_a[4], own_b[2];
  float own_d[4];
  load(own_a, a, 4), load(own_b, b, 2), load((unsigned *)own_d, (const unsigned *)d, 4);
  pi_mma_m16n8k16(own_d, own_a, own_b);
  for (int i = 0; i < 4; ++i) d[32 * i + threadIdx.x] = own_d[i];
}

extern "C" __global__ void multiply_k8(const unsigned *__restrict__ a, const unsigned *__restrict__ b,
                                       float *__restrict__ d) {
  unsigned own_a[2], own_b[1];
  float own_d[4];
  load(own_a, a, 2), load(own_b, b, 1), load((unsigned *)own_d, (const unsigned *)d, 4);
  pi_mma_m16n8k8(own_d, own_a, own_b);
  for (int i = 0; i < 4; ++i) d[32 * i + threadIdx.x] = own_d[i];
}

// Row r of four matrices is at x + 8 r halves; the transposed ones are behind the others in `loaded`.
extern "C" __global__ void load_matrices(const unsigned *__restrict__ x, unsigned *__restrict__ loaded) {
  __shared__ alignas(16) unsigned memory[128];
  unsigned own[4];
  for (int i = 0; i < 4; ++i) memory[32 * i + threadIdx.x] = x[32 * i + threadIdx.x];
  __syncthreads();
  pi_ldmatrix_x4(own, memory + 4 * threadIdx.x);
  for (int i = 0; i < 4; ++i) loaded[32 * i + threadIdx.x] = own[i];
  pi_ldmatrix_x4_trans(own, memory + 4 * threadIdx.x);
  for (int i = 0; i < 4; ++i) loaded[128 + 32 * i + threadIdx.x] = own[i];
}

// Each of 64 threads copies 16 bytes, or as many as `bytes` says of it, and writes what another thread has copied.
extern "C" __global__ void copy(const unsigned *__restrict__ x, const int *__restrict__ bytes, unsigned *__restrict__ y) {
  __shared__ alignas(16) unsigned memory[256];
  int thread = (int)threadIdx.x, other = 63 - thread;
  pi_cp_async_16(memory + 4 * thread, x + 4 * thread, bytes[thread]);
  pi_cp_async_wait_all();
  __syncthreads();
  for (int i = 0; i < 4; ++i) y[4 * other + i] = memory[4 * other + i];
}
