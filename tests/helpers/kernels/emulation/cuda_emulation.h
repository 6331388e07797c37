/* CUDA C for g++: emulator.py includes it in front of a source, which becomes C++ for one thread of the machine. */

#pragma once

#include "execution.h"

#include "cuda_math.h"
#include "cuda_threads.h"
#include "cuda_vectors.h"
#include "cuda_matrix.h"

#include <utility>

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

/* Blocks run one after another, so that there is one block's shared memory at a time. It lies in a section of its own,
   which the scheduler fills with ones before each block. */
#define __shared__ static __attribute__((section("emulated_shared")))

/* CUDA sources write `__shared__ alignas(64) float a[32]`. C++ wants alignas in front, GNU's attribute can be here. */
#define alignas(bytes) __attribute__((aligned(bytes)))

/* A kernel for the table of `Kernel`. Where its arguments are stored is no memory of its own, so it is not watched. */
#define UNWATCHED __attribute__((no_sanitize("thread")))

namespace emulated {

template <auto kernel> struct Entry;
template <class... A, void (*kernel)(A...)> struct Entry<kernel> {
    static constexpr int params = sizeof...(A);

    UNWATCHED static void call(void **values) { call_with(values, std::index_sequence_for<A...>()); }

    template <size_t... I> UNWATCHED static void call_with(void **values, std::index_sequence<I...>) {
        (void)values;
        kernel(*(A *)values[I]...);
    }
};

}
