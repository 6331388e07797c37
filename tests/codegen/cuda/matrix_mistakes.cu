// Mistakes with instructions for matrices and copies to shared memory, of 64 threads each.

extern "C" __global__ void mma_that_some_skip(const unsigned *__restrict__ x, unsigned *__restrict__ y) {
  unsigned a[4] = {0, 0, 0, 0}, b[2] = {0, 0};
  float d[4] = {0, 0, 0, 0};
  if (threadIdx.x < 40) pi_mma_m16n8k16(d, a, b);
  y[threadIdx.x] = (unsigned)d[0];
}

extern "C" __global__ void misaligned_row(const unsigned *__restrict__ x, unsigned *__restrict__ y) {
  __shared__ alignas(16) unsigned memory[132];
  unsigned own[4];
  memory[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  pi_ldmatrix_x4(own, memory + threadIdx.x % 32);
  y[threadIdx.x] = own[0];
}

extern "C" __global__ void misaligned_copy(const unsigned *__restrict__ x, unsigned *__restrict__ y) {
  __shared__ alignas(16) unsigned memory[256];
  pi_cp_async_16(memory + 4 * threadIdx.x, x + threadIdx.x, 16);
  pi_cp_async_wait_all();
  y[threadIdx.x] = memory[4 * threadIdx.x];
}

extern "C" __global__ void copy_to_global_memory(const unsigned *__restrict__ x, unsigned *__restrict__ y) {
  pi_cp_async_16(y + 4 * threadIdx.x, x + 4 * threadIdx.x, 16);
  pi_cp_async_wait_all();
}

extern "C" __global__ void copy_without_a_wait(const unsigned *__restrict__ x, unsigned *__restrict__ y) {
  __shared__ alignas(16) unsigned memory[256];
  pi_cp_async_16(memory + 4 * threadIdx.x, x + 4 * threadIdx.x, 16);
  y[threadIdx.x] = 0;
}

extern "C" __global__ void copy_without_a_barrier(const unsigned *__restrict__ x, unsigned *__restrict__ y) {
  __shared__ alignas(16) unsigned memory[256];
  pi_cp_async_16(memory + 4 * threadIdx.x, x + 4 * threadIdx.x, 16);
  pi_cp_async_wait_all();
  y[threadIdx.x] = memory[4 * (63 - threadIdx.x)];
}

// The next step is copied where the last one is still read: a barrier is missing in front of the copy.
extern "C" __global__ void copy_over_what_others_read(const unsigned *__restrict__ x, unsigned *__restrict__ y) {
  __shared__ alignas(16) unsigned memory[256];
  unsigned sum = 0;
  for (int step = 0; step < 2; ++step) {
    pi_cp_async_16(memory + 4 * threadIdx.x, x + 4 * threadIdx.x, 16);
    pi_cp_async_wait_all();
    __syncthreads();
    sum += memory[4 * (63 - threadIdx.x)];
  }
  y[threadIdx.x] = sum;
}

extern "C" __global__ void copy_read_before_the_wait(const unsigned *__restrict__ x, unsigned *__restrict__ y) {
  __shared__ alignas(16) unsigned memory[256];
  pi_cp_async_16(memory + 4 * threadIdx.x, x + 4 * threadIdx.x, 16);
  y[threadIdx.x] = memory[4 * threadIdx.x];
  pi_cp_async_wait_all();
}
