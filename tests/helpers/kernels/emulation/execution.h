/* What a compiled kernel and the scheduler of its threads know of each other. */

#pragma once

#include <stdint.h>

struct uint3 { unsigned x, y, z; };

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

namespace emulated {

/* The places where a thread waits for others. The order is that of `operation_names` in scheduler.h. */
enum Operation : int {
    SYNCTHREADS, SYNCTHREADS_OR, SYNCTHREADS_AND, SYNCTHREADS_COUNT,
    SYNCWARP, SHFL, SHFL_UP, SHFL_DOWN, SHFL_XOR, BALLOT, ANY, ALL,
    REDUCE_ADD, REDUCE_MIN, REDUCE_MAX, REDUCE_MIN_SIGNED, REDUCE_MAX_SIGNED, REDUCE_AND, REDUCE_OR, REDUCE_XOR,
    MMA_K8, MMA_K16, LDMATRIX, LDMATRIX_TRANS,
};

/* What a lane brings to an instruction for matrices, and takes from it. It lies on the stack of the thread. */
struct MmaOperands { unsigned a[4], b[2]; float d[4]; };
struct MatrixRow { unsigned row[4], loaded[4]; };

struct Kernel {
    const char *name;
    unsigned most_threads;  /* of a block: its __launch_bounds__ */
    int params;
    void (*call)(void **params);
};

}

#ifdef EMULATION_SCHEDULER
#define THREAD_CONST
#else
#define THREAD_CONST const
#endif

extern "C" {

/* Of the thread that runs now, and of its launch. For a thread they never change. */
extern THREAD_CONST uint3 emulated_thread, emulated_block;
extern THREAD_CONST dim3 emulated_block_size, emulated_grid_size;

/* The kernels of a library; emulator.py writes the table. */
extern const emulated::Kernel emulated_kernels[];
extern const int emulated_kernel_count;

/* `operation` with all threads of the block. `line` is where it stands in the source. */
unsigned emulated_barrier(int operation, unsigned value, int line);

/* `operation` with the threads of the warp that `mask` names. `operand` is a lane, a distance or a lane mask. */
uint64_t emulated_collective(int operation, unsigned mask, uint64_t value, unsigned operand, int width, int line);

/* A copy of 16 bytes to shared memory, `bytes` of them from `source` and zeros behind these, and the end of all such
   copies of the thread. In orders 0, 2, 4 … they arrive at the end, and until then what was there before is gone; in
   the others they arrive at once. */
void emulated_copy_async(void *shared, const void *source, unsigned bytes);
void emulated_copies_arrive(void);

/* Other threads of the block run first, then other threads of the machine. */
void emulated_sleep(void);

/* Of a clock that never goes back. */
unsigned long long emulated_now_ns(void);

/* What orders memory, for races.h: a fence for all threads of the machine, one that lets loads pass earlier stores, and
   an atomic operation in front of it. */
void emulated_fence(void);
void emulated_fence_acq_rel(void);
void emulated_atomic_access(void *address, unsigned bytes);
}
