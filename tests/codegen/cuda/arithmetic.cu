// Kernels of test_emulation_arithmetic.py: each thread computes one element.
#include <cuda_fp16.h>

static __device__ __forceinline__ int index_of_thread() { return (int)(blockIdx.x * blockDim.x + threadIdx.x); }

extern "C" __global__ void half_to_float(const half *__restrict__ x, float *__restrict__ out) {
  int i = index_of_thread();
  out[i] = __half2float(x[i]);
}

extern "C" __global__ void float_to_half(const float *__restrict__ x, half *__restrict__ out) {
  int i = index_of_thread();
  out[i] = __float2half_rn(x[i]);
}

extern "C" __global__ void double_to_half(const double *__restrict__ x, half *__restrict__ out) {
  int i = index_of_thread();
  out[i] = (half)x[i];
}

// [operation, element]
extern "C" __global__ void half_arithmetic(const half *__restrict__ a, const half *__restrict__ b, const int *count,
                                           half *__restrict__ out) {
  int i = index_of_thread(), n = *count;
  out[i] = a[i] + b[i];
  out[n + i] = a[i] - b[i];
  out[2 * n + i] = a[i] * b[i];
  out[3 * n + i] = a[i] / b[i];
  out[4 * n + i] = hsqrt(__habs(a[i]));
  out[5 * n + i] = -a[i];
  out[6 * n + i] = a[i] < b[i] ? a[i] : b[i];
}

extern "C" __global__ void half_pairs(const half2 *__restrict__ a, const half2 *__restrict__ b,
                                      const half2 *__restrict__ c, const int *count, half2 *__restrict__ out) {
  int i = index_of_thread(), n = *count;
  out[i] = __hfma2(a[i], b[i], c[i]);
  out[n + i] = __hadd2(a[i], b[i]);
  out[2 * n + i] = __hmul2(a[i], b[i]);
  out[3 * n + i] = __halves2half2(__high2half(a[i]), __low2half(b[i]));
  float2 both = __half22float2(a[i]);
  out[4 * n + i] = __floats2half2_rn(both.y, both.x);
}

extern "C" __global__ void bits(const int *__restrict__ x, const int *count, int *__restrict__ out) {
  int i = index_of_thread(), n = *count;
  unsigned word = (unsigned)x[i];
  out[i] = __popc(word);
  out[n + i] = __clz(x[i]);
  out[2 * n + i] = __ffs(x[i]);
  out[3 * n + i] = (int)__brev(word);
  out[4 * n + i] = (int)__byte_perm(word, ~word, 0x9360);
  out[5 * n + i] = __float_as_int(__int_as_float(x[i]));
}

extern "C" __global__ void dots(const int *__restrict__ a, const int *__restrict__ b, const int *__restrict__ c,
                                const int *count, int *__restrict__ out) {
  int i = index_of_thread();
  out[i] = __dp4a(a[i], b[i], c[i]);
  out[*count + i] = (int)__dp4a((unsigned)a[i], (unsigned)b[i], (unsigned)c[i]);
}

extern "C" __global__ void functions(const float *__restrict__ x, const int *count, float *__restrict__ out) {
  int i = index_of_thread(), n = *count;
  out[i] = expf(x[i]);
  out[n + i] = exp2f(x[i]);
  out[2 * n + i] = tanhf(x[i]);
  out[3 * n + i] = erff(x[i]);
  out[4 * n + i] = rsqrtf(fabsf(x[i]));
  out[5 * n + i] = powf(fabsf(x[i]), 0.75f);
  out[6 * n + i] = floorf(x[i]);
  out[7 * n + i] = __expf(x[i]);
  out[8 * n + i] = sqrtf(fabsf(x[i]));
  out[9 * n + i] = fmaf(x[i], x[i], -1.0f);
  out[10 * n + i] = max(x[i], 0.5f) + (float)min((int)x[i], 3);
}

// Eight halves times a number, in the words of TVM's code generator.
extern "C" __global__ void vectors(half *__restrict__ x_ptr, float *__restrict__ y_ptr) {
  uint4 v = *(uint4*)(x_ptr + ((((int)blockIdx.x) * 256) + (((int)threadIdx.x) * 8)));
  ulonglong4 __1;
    ((float2*)(&(__1.x)))->x = (float)(((half2*)(&(v.x)))->x);
    ((float2*)(&(__1.x)))->y = (float)(((half2*)(&(v.x)))->y);
    ((float2*)(&(__1.y)))->x = (float)(((half2*)(&(v.y)))->x);
    ((float2*)(&(__1.y)))->y = (float)(((half2*)(&(v.y)))->y);
    ((float2*)(&(__1.z)))->x = (float)(((half2*)(&(v.z)))->x);
    ((float2*)(&(__1.z)))->y = (float)(((half2*)(&(v.z)))->y);
    ((float2*)(&(__1.w)))->x = (float)(((half2*)(&(v.w)))->x);
    ((float2*)(&(__1.w)))->y = (float)(((half2*)(&(v.w)))->y);
  *(ulonglong4*)(y_ptr + ((((int)blockIdx.x) * 256) + (((int)threadIdx.x) * 8))) = __1;
}
