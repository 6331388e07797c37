/* Barriers, collectives of a warp, atomics and fences. */

#pragma once

#include "execution.h"

#include <string.h>

#define threadIdx emulated_thread
#define blockIdx emulated_block
#define blockDim emulated_block_size
#define gridDim emulated_grid_size
#define warpSize 32

/* The line is that of the call: __syncthreads at two places are two barriers. */
#define EMULATED_LINE int line = __builtin_LINE()

#define DEFINE_BARRIER(NAME, OPERATION)                                              \
    static inline int NAME(int value, EMULATED_LINE) {                               \
        return (int)emulated_barrier(emulated::OPERATION, value != 0, line);         \
    }

static inline void __syncthreads(EMULATED_LINE) { emulated_barrier(emulated::SYNCTHREADS, 0, line); }
DEFINE_BARRIER(__syncthreads_or, SYNCTHREADS_OR)
DEFINE_BARRIER(__syncthreads_and, SYNCTHREADS_AND)
DEFINE_BARRIER(__syncthreads_count, SYNCTHREADS_COUNT)

#undef DEFINE_BARRIER

#define DEFINE_VOTE(T, NAME, OPERATION)                                                             \
    static inline T NAME(unsigned mask, int value, EMULATED_LINE) {                                 \
        return (T)emulated_collective(emulated::OPERATION, mask, value != 0, 0, 32, line);          \
    }

static inline void __syncwarp(unsigned mask = 0xffffffff, EMULATED_LINE) {
    emulated_collective(emulated::SYNCWARP, mask, 0, 0, 32, line);
}
DEFINE_VOTE(unsigned, __ballot_sync, BALLOT)
DEFINE_VOTE(int, __any_sync, ANY)
DEFINE_VOTE(int, __all_sync, ALL)

#undef DEFINE_VOTE

static inline unsigned emulated_lane() {
    unsigned row = threadIdx.z * blockDim.y + threadIdx.y;
    return (row * blockDim.x + threadIdx.x) % 32;
}

/* CUDA promises no more than that the thread itself is active, so that code must not rely on others. */
static inline unsigned __activemask() { return 1u << emulated_lane(); }

template <class T>
static inline T emulated_shuffle(int operation, unsigned mask, T value, unsigned operand, int width, int line) {
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    bits = emulated_collective(operation, mask, bits, operand, width, line);
    memcpy(&value, &bits, sizeof value);
    return value;
}

#define DEFINE_SHUFFLES(T)                                                                              \
    static inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32, EMULATED_LINE) {               \
        return emulated_shuffle(emulated::SHFL, mask, value, (unsigned)lane, width, line);                        \
    }                                                                                                   \
    static inline T __shfl_up_sync(unsigned mask, T value, unsigned distance, int width = 32, EMULATED_LINE) {   \
        return emulated_shuffle(emulated::SHFL_UP, mask, value, distance, width, line);                           \
    }                                                                                                   \
    static inline T __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = 32, EMULATED_LINE) { \
        return emulated_shuffle(emulated::SHFL_DOWN, mask, value, distance, width, line);                         \
    }                                                                                                   \
    static inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, EMULATED_LINE) {          \
        return emulated_shuffle(emulated::SHFL_XOR, mask, value, (unsigned)lanes, width, line);                   \
    }

DEFINE_SHUFFLES(int)
DEFINE_SHUFFLES(unsigned)
DEFINE_SHUFFLES(long)
DEFINE_SHUFFLES(unsigned long)
DEFINE_SHUFFLES(long long)
DEFINE_SHUFFLES(unsigned long long)
DEFINE_SHUFFLES(float)
DEFINE_SHUFFLES(double)

#define DEFINE_REDUCTION(NAME, T, OPERATION)                                              \
    static inline T __reduce_##NAME##_sync(unsigned mask, T value, EMULATED_LINE) {           \
        return (T)emulated_collective(emulated::OPERATION, mask, (unsigned)value, 0, 32, line);     \
    }

DEFINE_REDUCTION(add, unsigned, REDUCE_ADD)
DEFINE_REDUCTION(add, int, REDUCE_ADD)
DEFINE_REDUCTION(min, unsigned, REDUCE_MIN)
DEFINE_REDUCTION(min, int, REDUCE_MIN_SIGNED)
DEFINE_REDUCTION(max, unsigned, REDUCE_MAX)
DEFINE_REDUCTION(max, int, REDUCE_MAX_SIGNED)
DEFINE_REDUCTION(and, unsigned, REDUCE_AND)
DEFINE_REDUCTION(or, unsigned, REDUCE_OR)
DEFINE_REDUCTION(xor, unsigned, REDUCE_XOR)

#undef DEFINE_REDUCTION

static inline void __nanosleep(unsigned) { emulated_sleep(); }
static inline void __prof_trigger(int) {}
static inline unsigned long long pi_now_ns() { return emulated_now_ns(); }
static inline void __threadfence_block() { asm volatile("" ::: "memory"); }
static inline void __threadfence() { emulated_fence(); }
static inline void __threadfence_system() { emulated_fence(); }

/* The threads of a launch take turns on one thread of the machine, but the host may change memory meanwhile. */
template <class T, class F>
__attribute__((noinline, no_sanitize("thread"))) static T emulated_exchange(T *address, F changed) {
    T before, after;
    __atomic_load(address, &before, __ATOMIC_RELAXED);
    do after = changed(before);
    while (!__atomic_compare_exchange(address, &before, &after, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return before;
}

/* Inlined, so that an error has the line of the source. */
#define DEFINE_ATOMIC_OF(T, NAME, CHANGED, ...)                                              \
    __attribute__((always_inline)) static inline T NAME(T *address, __VA_ARGS__) {           \
        emulated_atomic_access(address, sizeof(T));                                          \
        return emulated_exchange(address, [=](T old) -> T { return CHANGED; });              \
    }
#define DEFINE_ATOMIC(NAME, T, CHANGED) DEFINE_ATOMIC_OF(T, NAME, CHANGED, T value)

#define DEFINE_INTEGER_ATOMICS(T)                                                            \
    DEFINE_ATOMIC(atomicMin, T, old < value ? old : value)                                   \
    DEFINE_ATOMIC(atomicMax, T, old > value ? old : value)                                   \
    DEFINE_ATOMIC(atomicAnd, T, old & value)                                                 \
    DEFINE_ATOMIC(atomicOr, T, old | value)                                                  \
    DEFINE_ATOMIC(atomicXor, T, old ^ value)                                                 \
    DEFINE_ATOMIC(atomicExch, T, value)                                                      \
    DEFINE_ATOMIC_OF(T, atomicCAS, old == compare ? value : old, T compare, T value)

DEFINE_INTEGER_ATOMICS(int)
DEFINE_INTEGER_ATOMICS(unsigned)
DEFINE_INTEGER_ATOMICS(unsigned long long)
DEFINE_ATOMIC(atomicAdd, int, (int)((unsigned)old + (unsigned)value))
DEFINE_ATOMIC(atomicAdd, unsigned, old + value)
DEFINE_ATOMIC(atomicAdd, unsigned long long, old + value)
DEFINE_ATOMIC(atomicAdd, float, old + value)
DEFINE_ATOMIC(atomicAdd, double, old + value)
DEFINE_ATOMIC(atomicInc, unsigned, old >= value ? 0 : old + 1)
DEFINE_ATOMIC(atomicSub, int, (int)((unsigned)old - (unsigned)value))
DEFINE_ATOMIC(atomicSub, unsigned, old - value)
DEFINE_ATOMIC(atomicExch, float, value)

/* Instructions that order memory, of instructions.cuh. Inlined, so that an error has the line of the source. */
__attribute__((always_inline)) static inline unsigned pi_inc_acq_rel_gpu(unsigned *at, unsigned last) {
    emulated_fence_acq_rel();
    unsigned before = atomicInc(at, last);
    emulated_fence_acq_rel();
    return before;
}

__attribute__((always_inline)) static inline void pi_store_release_sys(int *at, int value) {
    emulated_fence_acq_rel();
    *(volatile int *)at = value;
}

static inline void pi_fence_acq_rel_sys() { emulated_fence_acq_rel(); }

#undef DEFINE_INTEGER_ATOMICS
#undef DEFINE_ATOMIC
#undef DEFINE_ATOMIC_OF
