/* The threads of one block: who runs next, who waits for whom, and what a launch that failed says. */

#pragma once

#include "execution.h"
#include "fiber.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

using namespace emulated;

enum State { READY, SLEEPING, WAITING, ENDED };

/* What a thread waits in, and what it brings there. */
struct Meeting {
    int operation, width, line;
    unsigned mask, operand;
    uint64_t value;
};

struct Thread {
    Context context;
    uint3 index;
    State state;
    Meeting meeting;
    uint64_t result;
};

struct Launch {
    const Kernel *kernel;
    void **params;
    int order;
    uint64_t random;         /* state of a generator, never 0 */
    unsigned count;          /* threads of a block */
    unsigned ready, ended;   /* how many of them */
    unsigned last;           /* the thread that runs, or ran last */
    uint64_t first_block;    /* of orders that begin anywhere */
    bool failed;
    Context scheduler;
};

enum { MOST_THREADS = 1024 };

static Thread threads[MOST_THREADS];
static Stacks stacks;
static Launch launch;
static char failure[1024];
static bool inside_thread;

static const char *const operation_names[] = {
    "__syncthreads", "__syncthreads_or", "__syncthreads_and", "__syncthreads_count",
    "__syncwarp", "__shfl_sync", "__shfl_up_sync", "__shfl_down_sync", "__shfl_xor_sync",
    "__ballot_sync", "__any_sync", "__all_sync",
    "__reduce_add_sync", "__reduce_min_sync", "__reduce_max_sync", "__reduce_min_sync", "__reduce_max_sync",
    "__reduce_and_sync", "__reduce_or_sync", "__reduce_xor_sync",
    "mma.m16n8k8", "mma.m16n8k16", "ldmatrix", "ldmatrix.trans",
};

#define INDEX "(%u, %u, %u)"
#define INDEX_OF(index) (index).x, (index).y, (index).z

/* Notes what a thread did wrong, after where it is. The first note counts. */
static void note_arguments(const Thread *thread, const char *format, va_list arguments) {
    if (launch.failed) return;
    launch.failed = true;
    int length = snprintf(failure, sizeof failure, "%s: block " INDEX ", thread " INDEX " ", launch.kernel->name,
                          INDEX_OF(emulated_block), INDEX_OF(thread->index));
    vsnprintf(failure + length, sizeof failure - length, format, arguments);
}

static void note_failure(const Thread *thread, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    note_arguments(thread, format, arguments);
    va_end(arguments);
}

static inline Thread *running() { return &threads[launch.last]; }

/* Where the linker puts the library's first byte. */
extern "C" char __ehdr_start[] __attribute__((visibility("hidden")));

/* Notes what the running thread does wrong, just before the instruction at `code`; emulator.py makes that a line. */
static void note_fault(const void *code, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    note_arguments(running(), format, arguments);
    va_end(arguments);
    size_t length = strlen(failure);
    snprintf(failure + length, sizeof failure - length, " [code %#tx]", (char *)code - 1 - __ehdr_start);
}

static inline void back_to_scheduler() { switch_context(&running()->context, &launch.scheduler); }

/* For the running thread, after note_failure: it never comes back. */
[[noreturn]] static void abandon() {
    back_to_scheduler();
    __builtin_unreachable();
}

static uint64_t random_number() {
    launch.random ^= launch.random << 13;
    launch.random ^= launch.random >> 7;
    launch.random ^= launch.random << 17;
    return launch.random;
}

/* Of the `count` threads from `begin` on, one that is ready, or -1. The search begins at the `start`-th, up or down. */
static int first_ready(unsigned begin, unsigned count, unsigned start, int step) {
    for (unsigned i = 0; i < count; i++) {
        unsigned offset = step > 0 ? start + i : start + count - i;
        unsigned thread = begin + offset % count;
        if (threads[thread].state == READY) return (int)thread;
    }
    return -1;
}

/* The last warp first; a warp runs until all of its threads wait for another one. */
static int next_by_warp() {
    unsigned warp = launch.last / 32, warps = (launch.count + 31) / 32;
    for (unsigned i = 0; i < warps; i++) {
        unsigned begin = (warp + warps - i) % warps * 32;
        unsigned lanes = launch.count - begin < 32 ? launch.count - begin : 32;
        int thread = first_ready(begin, lanes, i ? 0 : launch.last - begin + 1, 1);
        if (thread >= 0) return thread;
    }
    return -1;
}

/* One of the threads that are ready; there is one. See ORDERS in emulator.py. */
static unsigned next_thread() {
    switch (launch.order) {
    case 0: return (unsigned)first_ready(0, launch.count, launch.last + 1, 1);
    case 1: return (unsigned)first_ready(0, launch.count, launch.last + launch.count - 1, -1);
    case 3: return (unsigned)next_by_warp();
    default: return (unsigned)first_ready(0, launch.count, random_number() % launch.count, 1);
    }
}
