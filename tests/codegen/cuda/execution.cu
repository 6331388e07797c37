// Kernels of test_emulation.py that do nothing wrong. Those of numbers have a thread for each.
#include <cuda_fp16.h>

// sums[block] = the sum of the block's part of x, of which there are *count.
extern "C" __global__ void __launch_bounds__(256) block_sum(const float *__restrict__ x, const int *__restrict__ count,
                                                            float *__restrict__ sums) {
  __shared__ alignas(64) float part[256];
  int thread = (int)threadIdx.x, i = (int)(blockIdx.x * blockDim.x) + thread;
  part[thread] = i < *count ? x[i] : 0.0f;
  for (int width = 128; width > 0; width >>= 1) {
    __syncthreads();
    if (thread < width && thread + width < (int)blockDim.x) part[thread] = part[thread] + part[thread + width];
  }
  if (thread == 0) sums[blockIdx.x] = part[0];
}

static __device__ __forceinline__ unsigned lanes_of_warp() {
  unsigned left = blockDim.x - threadIdx.x / 32 * 32;
  return left < 32 ? (1u << left) - 1 : 0xffffffffu;
}

// The four shuffles of x, as floats, and of -x as integers: [8, threads]. `choice` is the operand and the width.
extern "C" __global__ void __launch_bounds__(96) shuffles(const int *__restrict__ x, const int *__restrict__ choice,
                                                          int *__restrict__ out) {
  unsigned mask = lanes_of_warp(), count = blockDim.x, thread = threadIdx.x;
  int operand = choice[0], width = choice[1];
  float value = (float)x[thread];
  out[thread] = (int)__shfl_sync(mask, value, operand, width);
  out[count + thread] = (int)__shfl_up_sync(mask, value, (unsigned)operand, width);
  out[2 * count + thread] = (int)__shfl_down_sync(mask, value, (unsigned)operand, width);
  out[3 * count + thread] = (int)__shfl_xor_sync(mask, value, operand, width);
  out[4 * count + thread] = -__shfl_sync(mask, -x[thread], operand, width);
  out[5 * count + thread] = -__shfl_up_sync(mask, -x[thread], (unsigned)operand, width);
  out[6 * count + thread] = (int)-__shfl_down_sync(mask, -(long long)x[thread], (unsigned)operand, width);
  out[7 * count + thread] = (int)__shfl_xor_sync(mask, (unsigned)x[thread], operand, width);
}

// Ballots of a warp and of the even lanes, and what a vote says: [4, threads].
extern "C" __global__ void votes(const int *__restrict__ x, unsigned *__restrict__ out) {
  unsigned thread = threadIdx.x, count = blockDim.x, all = 0xffffffffu;
  int value = x[thread];
  out[thread] = __ballot_sync(all, value > 0);
  out[count + thread] = (unsigned)__any_sync(all, value > 90);
  out[2 * count + thread] = (unsigned)__all_sync(all, value > -90);
  out[3 * count + thread] = thread % 2 ? 0 : __ballot_sync(0x55555555u, value > 0);
}

// When each thread of each block had its turn.
extern "C" __global__ void turns(int *next, int *__restrict__ turn) {
  turn[blockIdx.x * blockDim.x + threadIdx.x] = atomicAdd(next, 1);
}

// What nobody has written: a shared and a local number, from every block.
extern "C" __global__ void unwritten(const int *__restrict__ which, float *__restrict__ out) {
  __shared__ float shared[8];
  float local[8];
  if (*which > 8) local[*which - 9] = shared[*which - 9] = 1.0f;
  out[blockIdx.x * 2] = shared[*which];
  out[blockIdx.x * 2 + 1] = local[*which];
  __syncthreads();
  shared[*which] = 1.0f;
}

// Thread 0 waits for the last thread of the block, and both for the host.
extern "C" __global__ void meet(const int *flag, int *seen) {
  __shared__ int ready;
  if (threadIdx.x == 0) *(volatile int *)&ready = 0;
  __syncthreads();
  if (threadIdx.x == 0)
    while (*(volatile int *)&ready == 0) __nanosleep(100);
  if (threadIdx.x == blockDim.x - 1) {
    while (*(const volatile int *)flag != 7) __nanosleep(100);
    *(volatile int *)&ready = 1;
  }
  __syncthreads();
  seen[threadIdx.x] = *(const volatile int *)flag;
}

static __device__ __forceinline__ int index_of_thread() { return (int)(blockIdx.x * blockDim.x + threadIdx.x); }

extern "C" __global__ void half_to_float(const half *__restrict__ x, float *__restrict__ out) {
  int i = index_of_thread();
  out[i] = __half2float(x[i]);
}

extern "C" __global__ void float_to_half(const float *__restrict__ x, half *__restrict__ out) {
  int i = index_of_thread();
  out[i] = __float2half_rn(x[i]);
}
