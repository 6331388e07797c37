/* Functions of numbers that CUDA has and C++ has not. */

#pragma once

#include "cuda_vectors.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define DEFINE_EXTREMES(A, B, T)                                                      \
    static inline T min(A a, B b) { return (T)a < (T)b ? (T)a : (T)b; }               \
    static inline T max(A a, B b) { return (T)a > (T)b ? (T)a : (T)b; }

DEFINE_EXTREMES(int, int, int)
DEFINE_EXTREMES(unsigned, unsigned, unsigned)
DEFINE_EXTREMES(int, unsigned, unsigned)
DEFINE_EXTREMES(unsigned, int, unsigned)
DEFINE_EXTREMES(long, long, long)
DEFINE_EXTREMES(unsigned long, unsigned long, unsigned long)
DEFINE_EXTREMES(long, unsigned long, unsigned long)
DEFINE_EXTREMES(unsigned long, long, unsigned long)
DEFINE_EXTREMES(long long, long long, long long)
DEFINE_EXTREMES(unsigned long long, unsigned long long, unsigned long long)
DEFINE_EXTREMES(long long, unsigned long long, unsigned long long)
DEFINE_EXTREMES(unsigned long long, long long, unsigned long long)

#undef DEFINE_EXTREMES

/* Of a number and NaN, the number. */
static inline float min(float a, float b) { return fminf(a, b); }
static inline float max(float a, float b) { return fmaxf(a, b); }
static inline double min(double a, double b) { return fmin(a, b); }
static inline double max(double a, double b) { return fmax(a, b); }
static inline double min(float a, double b) { return fmin(a, b); }
static inline double max(float a, double b) { return fmax(a, b); }
static inline double min(double a, float b) { return fmin(a, b); }
static inline double max(double a, float b) { return fmax(a, b); }

static inline float rsqrtf(float x) { return (float)(1 / sqrt((double)x)); }
static inline double rsqrt(double x) { return 1 / sqrt(x); }

/* Approximations on a GPU. glibc has names of its own like these, so that they cannot be functions here. */
#define __expf(x) expf(x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __powf(x, y) powf(x, y)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
static inline float __fdividef(float x, float y) { return x / y; }
static inline float __saturatef(float x) { return fminf(fmaxf(x, 0), 1); }

static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return sqrtf(a); }
static inline float __frsqrt_rn(float a) { return rsqrtf(a); }
static inline float __frcp_rn(float a) { return 1 / a; }

/* On a GPU what is too large becomes the largest integer, and NaN becomes 0. */
static inline int __float2int_rn(float x) {
    return isnan(x) ? 0 : x >= 2147483648.0f ? 2147483647 : x < -2147483648.0f ? -2147483647 - 1 : (int)rintf(x);
}
static inline int __float2int_rz(float x) { return __float2int_rn(truncf(x)); }
static inline int __float2int_rd(float x) { return __float2int_rn(floorf(x)); }
static inline int __float2int_ru(float x) { return __float2int_rn(ceilf(x)); }
static inline float __int2float_rn(int x) { return (float)x; }
static inline float __uint2float_rn(unsigned x) { return (float)x; }

template <class To, class From> static inline To emulated_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
static inline int __float_as_int(float x) { return emulated_bits<int>(x); }
static inline unsigned __float_as_uint(float x) { return emulated_bits<unsigned>(x); }
static inline float __int_as_float(int x) { return emulated_bits<float>(x); }
static inline float __uint_as_float(unsigned x) { return emulated_bits<float>(x); }

static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
static inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __ffsll(long long x) { return __builtin_ffsll(x); }

static inline unsigned __brev(unsigned x) {
    unsigned reversed = 0;
    for (int bit = 0; bit < 32; bit++) reversed |= (x >> bit & 1) << (31 - bit);
    return reversed;
}

/* Each of the result's bytes is one of the 8 of x and y; bit 3 of a selector repeats that byte's sign instead. */
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selectors) {
    uint64_t bytes = (uint64_t)y << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) {
        unsigned selector = selectors >> 4 * i & 15;
        unsigned byte = bytes >> 8 * (selector & 7) & 255;
        if (selector & 8) byte = byte & 128 ? 255 : 0;
        result |= byte << 8 * i;
    }
    return result;
}

template <class Bytes, class T> static inline T emulated_dot(Bytes a, Bytes b, T c) {
    unsigned sum = (unsigned)c + (unsigned)(a.x * b.x) + (unsigned)(a.y * b.y);
    return (T)(sum + (unsigned)(a.z * b.z) + (unsigned)(a.w * b.w));
}
static inline int __dp4a(int a, int b, int c) {
    return emulated_dot(emulated_bits<char4>(a), emulated_bits<char4>(b), c);
}
static inline int __dp4a(char4 a, char4 b, int c) { return emulated_dot(a, b, c); }
static inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
    return emulated_dot(emulated_bits<uchar4>(a), emulated_bits<uchar4>(b), c);
}
static inline unsigned __dp4a(uchar4 a, uchar4 b, unsigned c) { return emulated_dot(a, b, c); }

template <class T> static inline T __ldg(const T *address) { return *address; }
