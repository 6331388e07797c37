/* Halves as CUDA's cuda_fp16.h has them: rounded to the nearest, halfway cases to the even one. */

#pragma once

#include "cuda_emulation.h"

static inline float emulated_half_to_float(unsigned short half) {
    unsigned magnitude = half & 0x7fff, sign = (unsigned)(half & 0x8000) << 16;
    if (magnitude >= 0x7c00) return emulated_bits<float>(sign | magnitude << 13 | 0x7f800000);
    if (magnitude >= 0x0400) return emulated_bits<float>(sign | ((magnitude << 13) + (112u << 23)));
    return emulated_bits<float>(sign | emulated_bits<unsigned>((float)magnitude * 0x1p-24f));
}

static inline unsigned short emulated_float_to_half(float value) {
    unsigned bits = emulated_bits<unsigned>(value), sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return 0x7fff;
    if (bits >= 0x47800000) return sign | 0x7c00;
    /* The last bit of 0.5 as a float is 2^-24, the step of subnormal halves: the addition rounds to it. */
    float shifted = emulated_bits<float>(bits) + 0.5f;
    if (bits < 0x38800000) return sign | (emulated_bits<unsigned>(shifted) - 0x3f000000);
    return sign | ((bits - (112u << 23) + 0xfff + (bits >> 13 & 1)) >> 13);
}

/* Rounded once, though by way of a float: one that is not exact gets an odd last bit, so that it is never halfway
   between two halves by mistake (S. Boldo and G. Melquiond, "Emulation of a FMA and correctly rounded sums", 2008). */
static inline unsigned short emulated_double_to_half(double value) {
    float rounded = (float)value;
    double error = value - (double)rounded;
    unsigned bits = emulated_bits<unsigned>(rounded);
    if (error != 0 && !isinf(rounded) && bits % 2 == 0) bits += (error > 0) == (rounded > 0) ? 1 : -1;
    return emulated_float_to_half(emulated_bits<float>(bits));
}

struct __half {
    unsigned short bits;

    __half() = default;
    __half(float value) : bits(emulated_float_to_half(value)) {}
    __half(double value) : bits(emulated_double_to_half(value)) {}
    __half(short value) : __half((float)value) {}
    __half(unsigned short value) : __half((float)value) {}
    __half(int value) : __half((double)value) {}
    __half(unsigned value) : __half((double)value) {}
    __half(long value) : __half((double)value) {}
    __half(unsigned long value) : __half((double)value) {}
    __half(long long value) : __half((double)value) {}
    __half(unsigned long long value) : __half((double)value) {}

    operator float() const { return emulated_half_to_float(bits); }
    operator bool() const { return bits & 0x7fff; }
    operator signed char() const { return (signed char)(float)*this; }
    operator unsigned char() const { return (unsigned char)(float)*this; }
    operator short() const { return (short)(float)*this; }
    operator unsigned short() const { return (unsigned short)(float)*this; }
    operator int() const { return (int)(float)*this; }
    operator unsigned() const { return (unsigned)(float)*this; }
    operator long() const { return (long)(float)*this; }
    operator unsigned long() const { return (unsigned long)(float)*this; }
    operator long long() const { return (long long)(float)*this; }
    operator unsigned long long() const { return (unsigned long long)(float)*this; }
};

struct alignas(4) __half2 {
    __half x, y;

    __half2() = default;
    __half2(__half x, __half y) : x(x), y(y) {}
};

typedef __half half;
typedef __half2 half2;

static inline half2 make_half2(half x, half y) { return half2(x, y); }

static inline float __half2float(half x) { return x; }
static inline half __float2half(float x) { return half(x); }
static inline half __float2half_rn(float x) { return half(x); }
static inline half __double2half(double x) { return half(x); }
static inline half __int2half_rn(int x) { return half(x); }
static inline half __uint2half_rn(unsigned x) { return half(x); }
static inline int __half2int_rn(half x) { return __float2int_rn(x); }
static inline int __half2int_rz(half x) { return __float2int_rz(x); }
static inline half __ushort_as_half(unsigned short x) { return emulated_bits<half>(x); }
static inline half __short_as_half(short x) { return emulated_bits<half>(x); }
static inline unsigned short __half_as_ushort(half x) { return x.bits; }
static inline short __half_as_short(half x) { return (short)x.bits; }

static inline half2 __float2half2_rn(float x) { return half2(x, x); }
static inline half2 __floats2half2_rn(float x, float y) { return half2(x, y); }
static inline half2 __float22half2_rn(float2 x) { return half2(x.x, x.y); }
static inline float2 __half22float2(half2 x) { return {x.x, x.y}; }
static inline half2 __half2half2(half x) { return half2(x, x); }
static inline half2 __halves2half2(half x, half y) { return half2(x, y); }
static inline half __low2half(half2 x) { return x.x; }
static inline half __high2half(half2 x) { return x.y; }
static inline float __low2float(half2 x) { return x.x; }
static inline float __high2float(half2 x) { return x.y; }
static inline half2 __low2half2(half2 x) { return half2(x.x, x.x); }
static inline half2 __high2half2(half2 x) { return half2(x.y, x.y); }
static inline half2 __lowhigh2highlow(half2 x) { return half2(x.y, x.x); }
static inline half2 __lows2half2(half2 a, half2 b) { return half2(a.x, b.x); }
static inline half2 __highs2half2(half2 a, half2 b) { return half2(a.y, b.y); }

/* A float has more than twice a half's bits, so that rounding twice is rounding once: for +, -, *, / and roots. */
static inline half __hadd(half a, half b) { return half((float)a + (float)b); }
static inline half __hsub(half a, half b) { return half((float)a - (float)b); }
static inline half __hmul(half a, half b) { return half((float)a * (float)b); }
static inline half __hdiv(half a, half b) { return half((float)a / (float)b); }
static inline half __hneg(half a) { return __ushort_as_half(a.bits ^ 0x8000); }
static inline half __habs(half a) { return __ushort_as_half(a.bits & 0x7fff); }
static inline half hsqrt(half a) { return half(sqrtf(a)); }
static inline half hexp(half a) { return half(expf(a)); }

/* Exact in a double but for sums of a half c and a product so small that the result is c with any of its roundings: a
   product is 22 bits long, and halves end at 2^-24. */
static inline half __hfma(half a, half b, half c) {
    return half((double)(float)a * (double)(float)b + (double)(float)c);
}

static inline bool __heq(half a, half b) { return (float)a == (float)b; }
static inline bool __hne(half a, half b) { return (float)a < (float)b || (float)a > (float)b; }
static inline bool __hlt(half a, half b) { return (float)a < (float)b; }
static inline bool __hle(half a, half b) { return (float)a <= (float)b; }
static inline bool __hgt(half a, half b) { return (float)a > (float)b; }
static inline bool __hge(half a, half b) { return (float)a >= (float)b; }
static inline bool __hisnan(half a) { return isnan((float)a); }
static inline half __hmax(half a, half b) { return half(fmaxf(a, b)); }
static inline half __hmin(half a, half b) { return half(fminf(a, b)); }

static inline half2 __hadd2(half2 a, half2 b) { return half2(__hadd(a.x, b.x), __hadd(a.y, b.y)); }
static inline half2 __hsub2(half2 a, half2 b) { return half2(__hsub(a.x, b.x), __hsub(a.y, b.y)); }
static inline half2 __hmul2(half2 a, half2 b) { return half2(__hmul(a.x, b.x), __hmul(a.y, b.y)); }
static inline half2 __hneg2(half2 a) { return half2(__hneg(a.x), __hneg(a.y)); }
static inline half2 __habs2(half2 a) { return half2(__habs(a.x), __habs(a.y)); }
static inline half2 __hmax2(half2 a, half2 b) { return half2(__hmax(a.x, b.x), __hmax(a.y, b.y)); }
static inline half2 __hmin2(half2 a, half2 b) { return half2(__hmin(a.x, b.x), __hmin(a.y, b.y)); }
static inline half2 __hfma2(half2 a, half2 b, half2 c) { return half2(__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)); }

/* As in CUDA, an operator of a half and a float is ambiguous: both convert to the other. */
static inline half operator+(const half &a, const half &b) { return __hadd(a, b); }
static inline half operator-(const half &a, const half &b) { return __hsub(a, b); }
static inline half operator*(const half &a, const half &b) { return __hmul(a, b); }
static inline half operator/(const half &a, const half &b) { return __hdiv(a, b); }
static inline half operator-(const half &a) { return __hneg(a); }
static inline half &operator+=(half &a, const half &b) { return a = __hadd(a, b); }
static inline half &operator-=(half &a, const half &b) { return a = __hsub(a, b); }
static inline half &operator*=(half &a, const half &b) { return a = __hmul(a, b); }
static inline half &operator/=(half &a, const half &b) { return a = __hdiv(a, b); }
static inline bool operator==(const half &a, const half &b) { return __heq(a, b); }
static inline bool operator!=(const half &a, const half &b) { return !__heq(a, b); }
static inline bool operator<(const half &a, const half &b) { return __hlt(a, b); }
static inline bool operator<=(const half &a, const half &b) { return __hle(a, b); }
static inline bool operator>(const half &a, const half &b) { return __hgt(a, b); }
static inline bool operator>=(const half &a, const half &b) { return __hge(a, b); }
static inline half2 operator+(const half2 &a, const half2 &b) { return __hadd2(a, b); }
static inline half2 operator-(const half2 &a, const half2 &b) { return __hsub2(a, b); }
static inline half2 operator*(const half2 &a, const half2 &b) { return __hmul2(a, b); }

DEFINE_SHUFFLES(half)
DEFINE_SHUFFLES(half2)
