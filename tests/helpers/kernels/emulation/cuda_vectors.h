/* The vector types of CUDA, aligned as its vector_types.h aligns them, and their make_ functions. */

#pragma once

#define DEFINE_VECTORS(NAME, T, ALIGN2, ALIGN4)                                                        \
    struct alignas(sizeof(T)) NAME##1 { T x; };                                                        \
    struct alignas(ALIGN2) NAME##2 { T x, y; };                                                        \
    struct alignas(sizeof(T)) NAME##3 { T x, y, z; };                                                  \
    struct alignas(ALIGN4) NAME##4 { T x, y, z, w; };                                                  \
    static inline NAME##1 make_##NAME##1(T x) { return {x}; }                                          \
    static inline NAME##2 make_##NAME##2(T x, T y) { return {x, y}; }                                  \
    static inline NAME##3 make_##NAME##3(T x, T y, T z) { return {x, y, z}; }                          \
    static inline NAME##4 make_##NAME##4(T x, T y, T z, T w) { return {x, y, z, w}; }

DEFINE_VECTORS(char, signed char, 2, 4)
DEFINE_VECTORS(uchar, unsigned char, 2, 4)
DEFINE_VECTORS(short, short, 4, 8)
DEFINE_VECTORS(ushort, unsigned short, 4, 8)
DEFINE_VECTORS(int, int, 8, 16)
DEFINE_VECTORS(float, float, 8, 16)
DEFINE_VECTORS(long, long, 16, 16)
DEFINE_VECTORS(ulong, unsigned long, 16, 16)
DEFINE_VECTORS(longlong, long long, 16, 16)
DEFINE_VECTORS(ulonglong, unsigned long long, 16, 16)
DEFINE_VECTORS(double, double, 16, 16)

/* As above, but for uint3, which execution.h needs. */
struct uint1 { unsigned x; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
static inline uint1 make_uint1(unsigned x) { return {x}; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

#undef DEFINE_VECTORS
