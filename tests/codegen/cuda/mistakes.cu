// Kernels of test_emulation_mistakes.py. Each does one thing wrong, in a line that says MISTAKE.
#include <cuda_fp16.h>

static __device__ int lane() { return (int)threadIdx.x % 32; }

extern "C" __global__ void barrier_that_one_skips(int *out) {
  if (threadIdx.x != 3) __syncthreads();  // MISTAKE
  out[threadIdx.x] = 1;
}

extern "C" __global__ void barriers_of_two_places(int *out) {
  if (threadIdx.x < 2) __syncthreads();  // MISTAKE
  else __syncthreads();
  out[threadIdx.x] = 1;
}

extern "C" __global__ void barrier_and_shuffle(int *out) {
  if (threadIdx.x == 0) __syncthreads();  // MISTAKE
  else out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1, 1);
}

extern "C" __global__ void shuffle_that_some_skip(int *out) {
  if (lane() < 16) out[threadIdx.x] = __shfl_down_sync(0xffffffffu, 1, 1);  // MISTAKE
}

extern "C" __global__ void votes_that_differ(int *out) {
  if (lane() < 7) out[threadIdx.x] = __any_sync(0xffffffffu, 1);  // MISTAKE
  else out[threadIdx.x] = (int)__ballot_sync(0xffffffffu, 1);
}

extern "C" __global__ void masks_that_differ(int *out) {
  out[threadIdx.x] = __any_sync(lane() == 5 ? 0x7fffffffu : 0xffffffffu, 1);  // MISTAKE
}

extern "C" __global__ void mask_without_itself(int *out) {
  out[threadIdx.x] = __shfl_sync(0xfffffffeu, 1, 1);  // MISTAKE
}

extern "C" __global__ void mask_without_threads(int *out) {
  if (threadIdx.x >= 32) out[threadIdx.x] = __shfl_sync(0xffffffffu, 1, 0);  // MISTAKE
}

extern "C" __global__ void width_of_twelve(int *out) {
  out[threadIdx.x] = __shfl_sync(0xffffffffu, 1, 0, 12);  // MISTAKE
}

extern "C" __global__ void shuffle_from_outside(int *out) {
  if (lane() < 8) out[threadIdx.x] = __shfl_sync(0x000000ffu, 1, 9);  // MISTAKE
}

extern "C" __global__ void misaligned_read(int *out) {
  *(int2 *)out = *(int2 *)(out + 3);  // MISTAKE
}

extern "C" __global__ void misaligned_write(int *out) {
  *(uint4 *)(out + 2) = make_uint4(1, 2, 3, 4);  // MISTAKE
}

extern "C" __global__ void misaligned_halves(int *out) {
  half2 both = *(half2 *)((half *)out + 1);  // MISTAKE
  out[8] = both.x > half(0.0f);
}

extern "C" __global__ void misaligned_integer(int *out) {
  out[0] = *(int *)((char *)out + 2);  // MISTAKE
}

extern "C" __global__ void outside_of_shared(int *out) {
  __shared__ int values[4];
  values[out[0] + 4] = 1;  // MISTAKE
  out[1] = values[out[0]];
}

extern "C" __global__ void outside_of_local(int *out) {
  int values[4] = {1, 2, 3, 4};
  out[0] = values[out[0] - 1];  // MISTAKE
}

extern "C" __global__ void read_in_front(int *out) {
  out[0] = out[-1];  // MISTAKE
}

extern "C" __global__ void read_behind(int *out) {
  *(int2 *)out = *(int2 *)(out + 64);  // MISTAKE
}

extern "C" __global__ void write_behind(int *out) {
  out[64] = 1;  // MISTAKE
}

extern "C" __global__ void atomic_behind(int *out) {
  atomicAdd(out + 64, 1);  // MISTAKE
}

extern "C" __global__ void far_away(int *out) {
  *(volatile int *)16 = out[0];  // MISTAKE
}

extern "C" __global__ void shift_by_forty(int *out) {
  out[0] = 1 << (out[0] + 40);  // MISTAKE
}

extern "C" __global__ void divides_by_zero(int *out) {
  out[1] = 7 / out[0];  // MISTAKE
}

extern "C" __global__ void read_of_the_next(int *out) {
  __shared__ int values[64];
  values[threadIdx.x] = 1;
  out[threadIdx.x] = values[threadIdx.x ^ 33];  // MISTAKE
}

extern "C" __global__ void read_of_the_next_byte(int *out) {
  __shared__ signed char values[64];
  values[threadIdx.x] = 1;
  out[threadIdx.x] = values[threadIdx.x ^ 1];  // MISTAKE
}

extern "C" __global__ void write_after_read(int *out) {
  __shared__ int values[64];
  values[threadIdx.x] = 1;
  __syncthreads();
  int next = values[threadIdx.x ^ 33];
  values[threadIdx.x] = next + 1;  // MISTAKE
  out[threadIdx.x] = next;
}

extern "C" __global__ void writes_of_one_place(int *out) {
  __shared__ int value;
  value = 1;  // MISTAKE
  __syncthreads();
  out[threadIdx.x] = value;
}

extern "C" __global__ void sum_without_atomics(int *out) {
  out[0] += 1;  // MISTAKE
}

extern "C" __global__ void read_of_a_counter(int *out) {
  int before = atomicAdd(&out[0], 1);
  if (before > 1) out[threadIdx.x] = out[0];  // MISTAKE
}

extern "C" __global__ void shuffle_as_a_fence(int *out) {
  __shared__ int values[64];
  values[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1, 1);
  int all = __all_sync(0xffffffffu, 1);
  out[threadIdx.x] = values[threadIdx.x ^ 1] + all;  // MISTAKE
}

extern "C" __global__ void warps_that_meet_alone(int *out) {
  __shared__ int values[64];
  values[threadIdx.x] = 1;
  __syncwarp();
  out[threadIdx.x] = values[threadIdx.x ^ 33];  // MISTAKE
}

extern "C" __global__ void halves_of_a_warp_that_meet_alone(int *out) {
  __shared__ int values[64];
  values[threadIdx.x] = 1;
  __syncwarp(lane() < 16 ? 0x0000ffffu : 0xffff0000u);
  out[threadIdx.x] = values[threadIdx.x ^ 17];  // MISTAKE
}

extern "C" __global__ void blocks_that_share(int *out) {
  if (threadIdx.x == 0) out[blockIdx.x] = out[1 - blockIdx.x];  // MISTAKE
}

extern "C" __global__ void read_of_the_other_counter(int *out) {
  if (threadIdx.x != 0) return;
  atomicAdd(&out[blockIdx.x], 1);
  if (blockIdx.x == 1) out[2] = out[0];  // MISTAKE
}

extern "C" __global__ void read_without_a_ticket(int *out) {
  if (threadIdx.x != 0) return;
  if (blockIdx.x == 0) {
    out[0] = 1;
    __threadfence();
    atomicAdd(&out[1], 1);
  } else {
    out[2] = out[0];  // MISTAKE
  }
}

extern "C" __global__ void ticket_without_fence(int *out) {
  if (threadIdx.x != 0) return;
  out[blockIdx.x] = 1;
  if (atomicAdd(&out[2], 1) == 1) out[3] = out[0] + out[1];  // MISTAKE
}

extern "C" __global__ void ticket_with_a_late_write(int *out) {
  if (threadIdx.x != 0) return;
  __threadfence();
  out[blockIdx.x] = 1;
  if (atomicAdd(&out[2], 1) == 1) out[3] = out[0] + out[1];  // MISTAKE
}

extern "C" __global__ void write_behind_a_releasing_ticket(int *out) {
  if (threadIdx.x != 0) return;
  unsigned before = pi_inc_acq_rel_gpu((unsigned *)&out[2], 1);
  out[blockIdx.x] = 1;
  if (before == 1) out[3] = out[0] + out[1];  // MISTAKE
}

extern "C" __global__ void write_behind_a_releasing_flag(int *out) {
  if (threadIdx.x != 0) return;
  if (blockIdx.x == 0) {
    pi_store_release_sys(&out[1], 1);
    out[0] = 1;
  } else {
    int set = *(volatile int *)&out[1];
    pi_fence_acq_rel_sys();
    out[2] = out[0] + set;  // MISTAKE
  }
}

static __device__ __noinline__ int deep(int *out, int depth) {
  int kept[256];
  for (int i = 0; i < 256; i++) kept[i] = out[i % 64] + depth;
  return depth == 0 ? kept[out[0]] : deep(out, depth - 1) + kept[out[1]];
}

extern "C" __global__ void deep_stack(int *out) {
  out[2] = deep(out, 10000);
}

extern "C" __global__ void __launch_bounds__(48, 2) bounded(int *out) {
  out[threadIdx.x] = 1;
}
