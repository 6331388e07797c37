// Kernels of test_emulation.py that do nothing wrong.
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

// Where each thread of a three-dimensional launch is: its indices and the extents, [thread, 12].
extern "C" __global__ void indices(unsigned *__restrict__ out) {
  unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  unsigned *row = out + (block * blockDim.x * blockDim.y * blockDim.z + thread) * 12;
  row[0] = threadIdx.x; row[1] = threadIdx.y; row[2] = threadIdx.z;
  row[3] = blockIdx.x; row[4] = blockIdx.y; row[5] = blockIdx.z;
  row[6] = blockDim.x; row[7] = blockDim.y; row[8] = blockDim.z;
  row[9] = gridDim.x; row[10] = gridDim.y; row[11] = gridDim.z;
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

// Votes and reductions of a warp, of the even lanes, and of the block: [16, threads].
extern "C" __global__ void votes(const int *__restrict__ x, unsigned *__restrict__ out) {
  unsigned thread = threadIdx.x, count = blockDim.x, all = 0xffffffffu;
  int value = x[thread];
  out[thread] = __ballot_sync(all, value > 0);
  out[count + thread] = (unsigned)__any_sync(all, value > 90);
  out[2 * count + thread] = (unsigned)__all_sync(all, value > -90);
  out[3 * count + thread] = (unsigned)__reduce_add_sync(all, value);
  out[4 * count + thread] = (unsigned)__reduce_min_sync(all, value);
  out[5 * count + thread] = (unsigned)__reduce_max_sync(all, value);
  out[6 * count + thread] = __reduce_min_sync(all, (unsigned)value);
  out[7 * count + thread] = __reduce_max_sync(all, (unsigned)value);
  out[8 * count + thread] = __reduce_and_sync(all, (unsigned)value);
  out[9 * count + thread] = __reduce_or_sync(all, (unsigned)value);
  out[10 * count + thread] = __reduce_xor_sync(all, (unsigned)value);
  out[11 * count + thread] = thread % 2 ? 0 : __ballot_sync(0x55555555u, value > 0);
  out[12 * count + thread] = (unsigned)__syncthreads_or(value > 90);
  out[13 * count + thread] = (unsigned)__syncthreads_and(value > -90);
  out[14 * count + thread] = (unsigned)__syncthreads_count(value > 0);
  out[15 * count + thread] = __activemask() >> (thread % 32) & 1;
}

// The indices of what is positive among *count numbers, in order, and how many there are. One block.
extern "C" __global__ void __launch_bounds__(128) compact(const float *__restrict__ x, const int *__restrict__ count,
                                                          int *__restrict__ found, int *__restrict__ found_count) {
  __shared__ int begins[5];
  int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, total = 0;
  for (int start = 0; start < *count; start += 128) {
    int i = start + (int)threadIdx.x;
    bool keep = i < *count && x[i] > 0.0f;
    unsigned kept = __ballot_sync(0xffffffffu, keep);
    if (lane == 0) begins[warp + 1] = __popc(kept);
    if (threadIdx.x == 0) begins[0] = total;
    __syncthreads();
    if (threadIdx.x == 0)
      for (int w = 0; w < 4; w++) begins[w + 1] += begins[w];
    __syncthreads();
    if (keep) found[begins[warp] + __popc(kept & ((1u << lane) - 1))] = i;
    total = begins[4];
    __syncthreads();
  }
  if (threadIdx.x == 0) *found_count = total;
}

// Everybody's numbers in single places: sums by the four types, the largest, the smallest, and a chain of exchanges.
extern "C" __global__ void atomics(const int *__restrict__ x, int *ints, unsigned *words, unsigned long long *longs,
                                   float *floats) {
  int value = x[blockIdx.x * blockDim.x + threadIdx.x];
  atomicAdd(&ints[0], value);
  atomicMax(&ints[1], value);
  atomicMin(&ints[2], value);
  atomicAdd(&words[0], (unsigned)value);
  atomicMax(&words[1], (unsigned)value);
  words[3 + blockIdx.x * blockDim.x + threadIdx.x] = atomicExch(&words[2], (unsigned)value);
  atomicAdd(&longs[0], (unsigned long long)(long long)value << 20);
  atomicAdd(&floats[0], (float)value);
  unsigned long long seen = 0, before;
  while ((before = atomicCAS(&longs[1], seen, seen + 3)) != seen) seen = before;
}

// The last block to finish adds up what all blocks have found ("Memory Fence Functions" in CUDA's guide).
extern "C" __global__ void grid_sum(const float *__restrict__ x, float *partial, unsigned *done, unsigned *ticket,
                                    float *sum) {
  __shared__ float part[64];
  __shared__ bool last;
  part[threadIdx.x] = x[blockIdx.x * 64 + threadIdx.x];
  __syncthreads();
  if (threadIdx.x == 0) {
    float own = 0.0f;
    for (int i = 0; i < 64; i++) own += part[i];
    partial[blockIdx.x] = own;
    __threadfence();
    atomicExch(&done[blockIdx.x], 1u);
    last = atomicAdd(ticket, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (last && threadIdx.x == 0) {
    *sum = 0.0f;
    for (unsigned i = 0; i < gridDim.x; i++) *sum += (float)done[i] * partial[i];
    *ticket = 0;
  }
}

// Of all blocks, the last one adds up what the others have released with their tickets.
extern "C" __global__ void released_sum(const float *__restrict__ x, float *partial, unsigned *ticket, float *sum) {
  __shared__ bool last;
  partial[blockIdx.x * 64 + threadIdx.x] = 2.0f * x[blockIdx.x * 64 + threadIdx.x];
  __syncthreads();
  if (threadIdx.x == 0) last = pi_inc_acq_rel_gpu(ticket, gridDim.x - 1) == gridDim.x - 1;
  __syncthreads();
  if (!last || threadIdx.x != 0) return;
  *sum = 0.0f;
  for (unsigned i = 0; i < gridDim.x * 64; i++) *sum += partial[i];
}

// Block 0 writes a number and releases it with a flag; every later block acquires it.
extern "C" __global__ void released_number(int *number, int *flag, int *seen) {
  if (threadIdx.x == 0 && blockIdx.x == 0) {
    *number = 5;
    pi_store_release_sys(flag, 1);
  }
  if (threadIdx.x != 0 || blockIdx.x == 0) return;
  int is_set = *(volatile int *)flag;
  pi_fence_acq_rel_sys();
  seen[blockIdx.x] = is_set ? *number : -1;
}

// Groups of 8 lanes hand values around through shared memory; each group meets by itself.
extern "C" __global__ void neighbours(const int *__restrict__ x, int *__restrict__ out) {
  __shared__ int values[64];
  unsigned thread = threadIdx.x, group = 0xffu << (thread % 32 / 8 * 8);
  values[thread] = x[thread];
  __syncwarp(group);
  out[thread] = values[thread ^ 7];
  __syncwarp(group);
  values[thread] = 0;
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
