/* What PTX instructions do that C++ has no operator for. translate.py puts this text in front of each translated source;
   the emulation's headers come before it. Sections named below are those of the PTX ISA 8.7. */

#include "cuda_fp16.h"

/* The low bytes of a register as another type; a register that is wider than the instruction's type is cut. */
template <class To, class From> static inline To ptx_as(From from) {
  static_assert(sizeof(To) <= sizeof(From), "");
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

template <class T> struct __attribute__((aligned(2 * sizeof(T)))) PtxVector2 { T e[2]; };
template <class T> struct __attribute__((aligned(4 * sizeof(T)))) PtxVector4 { T e[4]; };

/* An address of shared memory: those of a block begin at 0. Outside of it there is no memory. */
static inline char *ptx_shared(char *window, uint64_t bytes, uint64_t offset) {
  return offset < bytes ? window + offset : (char *)(offset & 4095);
}

/* "shl", "shr": shifts by more than the register's width give what shifts by the width do. */
template <class T> static inline T ptx_shift_left(T x, uint32_t n) { return n >= 8 * sizeof(T) ? 0 : (T)(x << n); }
template <class T> static inline T ptx_shift_right(T x, uint32_t n) {
  return n >= 8 * sizeof(T) ? (x < 0 ? (T)-1 : 0) : (T)(x >> n);
}

/* "bfi": the low `length` bits of a, at `place` of b. Both numbers are bytes. Bits beyond the last one are lost. */
static inline uint32_t ptx_insert(uint32_t a, uint32_t b, uint32_t place, uint32_t length) {
  place &= 255, length &= 255;
  if (place > 31) return b;
  uint32_t mask = (length > 31 ? ~0u : (1u << length) - 1) << place;
  return (a << place & mask) | (b & ~mask);
}

/* "dp2a.lo": the halves of a times the low two bytes of b. */
static inline uint32_t ptx_dot_low(uint32_t a, uint32_t b, uint32_t c) {
  return c + (a & 0xffff) * (b & 255) + (a >> 16) * (b >> 8 & 255);
}

/* "max", "min": of a number and NaN the number, of two NaNs the one NaN; +0 is larger than -0. */
static inline float ptx_max(float a, float b) {
  if (a != a && b != b) return ptx_as<float>(0x7fffffffu);
  if (a == 0 && b == 0) return __builtin_signbit(a) ? b : a;
  return a != a || a < b ? b : a;
}
static inline float ptx_min(float a, float b) {
  if (a != a && b != b) return ptx_as<float>(0x7fffffffu);
  if (a == 0 && b == 0) return __builtin_signbit(a) ? a : b;
  return a != a || b < a ? b : a;
}

/* "cvt.sat": NaN becomes 0. */
static inline float ptx_saturated(float x) { return x > 0 ? (x < 1 ? x : 1.0f) : 0.0f; }

/* "cvt" to integers: NaN becomes 0, and what is too large the largest one. `x` is rounded already. */
template <class T> static inline T ptx_to_integer(float x) {
  const T lowest = (T)-1 < 0 ? (T)((T)1 << (8 * sizeof(T) - 1)) : 0, highest = (T)~lowest;
  if (x != x) return 0;
  if (x >= (float)highest) return highest;  /* the float above, where it is none itself: its integer is too large */
  return x <= (float)lowest ? lowest : (T)x;
}

/* "fma.rm": rounded down. A product of floats is exact in a double; of the sum, TwoSum (D. Knuth, The Art
   of Computer Programming 2, 4.2.2) gives the error. */
static inline float ptx_fma_down(float a, float b, float c) {
  double product = (double)a * b, sum = product + c, part = sum - product;
  double error = (product - (sum - part)) + (c - part);
  if (sum == 0 && error == 0) return __builtin_signbit(product) || __builtin_signbit(c) ? -0.0f : 0.0f;
  float rounded = (float)sum;
  if (rounded > sum || (rounded == sum && error < 0)) rounded = nextafterf(rounded, -INFINITY);
  return rounded;
}

/* "ex2.approx.ftz": subnormal numbers count as zeros, before and after. A GPU is right to 22 bits. */
static inline float ptx_exp2(float x) {
  float power = exp2f(__builtin_fabsf(x) < 0x1p-126f ? 0.0f : x);
  return power < 0x1p-126f ? 0.0f : power;
}

/* Pairs of halves, the first in the low bits. */
template <class F> static inline uint32_t ptx_pairs(F f, uint32_t a, uint32_t b, uint32_t c = 0) {
  half low = f(__ushort_as_half(a), __ushort_as_half(b), __ushort_as_half(c));
  half high = f(__ushort_as_half(a >> 16), __ushort_as_half(b >> 16), __ushort_as_half(c >> 16));
  return (uint32_t)high.bits << 16 | low.bits;
}
static inline uint32_t ptx_add_pairs(uint32_t a, uint32_t b) {
  return ptx_pairs([](half x, half y, half) { return __hadd(x, y); }, a, b);
}
static inline uint32_t ptx_subtract_pairs(uint32_t a, uint32_t b) {
  return ptx_pairs([](half x, half y, half) { return __hsub(x, y); }, a, b);
}
static inline uint32_t ptx_multiply_pairs(uint32_t a, uint32_t b) {
  return ptx_pairs([](half x, half y, half) { return __hmul(x, y); }, a, b);
}
static inline uint32_t ptx_fma_pairs(uint32_t a, uint32_t b, uint32_t c) {
  return ptx_pairs([](half x, half y, half z) { return __hfma(x, y, z); }, a, b, c);
}

/* "shfl.sync.bfly": `c` has 31 in its low bits, and in those from 8 on how many lanes a segment has less than 32. A width
   of 0 is a fault of the emulation. */
static inline int ptx_width(uint32_t c) { return (c & 31) == 31 && !(c & ~0x1f1fu) ? 32 - (int)(c >> 8) : 0; }
static inline bool ptx_in_segment(uint32_t lanes, uint32_t c) {
  return (emulated_lane() ^ (lanes & 31)) <= (emulated_lane() | (31 & ~(c >> 8)));
}
