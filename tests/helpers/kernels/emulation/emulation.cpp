/* Runs the kernels of a library, block by block, the threads of a block as fibers on the calling thread. */

#define EMULATION_SCHEDULER
#include "collectives.h"
#include "faults.h"

#include <sched.h>
#include <time.h>

uint3 emulated_thread, emulated_block;
dim3 emulated_block_size, emulated_grid_size;

/* A block that has waited for longer than this for memory to change ends the launch. */
#ifndef MOST_ASLEEP_S
#define MOST_ASLEEP_S 60
#endif

extern "C" unsigned long long emulated_now_ns() {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return 1000000000ull * (unsigned long long)time.tv_sec + (unsigned long long)time.tv_nsec;
}

static double now_s() { return 1e-9 * (double)emulated_now_ns(); }

static void run_thread() {
    launch.kernel->call(launch.params);
    if (copies[launch.last].count) note_failure(running(), "ends while copies to shared memory are under way");
    running()->state = ENDED;
    launch.ready--;
    launch.ended++;
    abandon();
}

static void prepare_block() {
    dim3 size = emulated_block_size;
    memset(__start_emulated_shared, 0xff, __stop_emulated_shared - __start_emulated_shared);
    launch.ready = launch.count;
    launch.ended = 0;
    launch.last = launch.order == 1 ? 0 : launch.count - 1;
    begin_block_accesses();
    for (unsigned i = 0; i < launch.count; i++) {
        threads[i].index = {i % size.x, i / size.x % size.y, i / (size.x * size.y)};
        threads[i].state = READY;
        copies[i].count = 0;
        make_context(&threads[i].context, stack_of(&stacks, i), STACK_BYTES, run_thread);
    }
}

/* Nobody is ready. Those who sleep are woken; returns false if there are none, or if they have slept for too long. */
static bool wake(double *asleep_since_s) {
    unsigned sleeper = 0;
    for (unsigned i = 0; i < launch.count; i++) {
        if (threads[i].state != SLEEPING) continue;
        threads[i].state = READY;
        launch.ready++;
        sleeper = i;
    }
    if (!launch.ready) {
        note_deadlock();
        return false;
    }
    sched_yield();
    if (*asleep_since_s == 0) *asleep_since_s = now_s();
    if (now_s() - *asleep_since_s < MOST_ASLEEP_S) return true;
    note_failure(&threads[sleeper], "still calls __nanosleep after %g s", (double)MOST_ASLEEP_S);
    return false;
}

static void run_block() {
    double asleep_since_s = 0;
    prepare_block();
    while (launch.ended < launch.count && !launch.failed) {
        if (!launch.ready && !wake(&asleep_since_s)) return;
        launch.last = next_thread();
        emulated_thread = running()->index;
        inside_thread = true;
        switch_context(&launch.scheduler, &running()->context);
        inside_thread = false;
    }
}

/* The first block first or last, or any: a kernel must not rely on which. */
static uint64_t block_at(uint64_t i, uint64_t blocks) {
    if (launch.order == 0) return i;
    if (launch.order == 1 || launch.order == 3) return blocks - 1 - i;
    return (i + launch.first_block) % blocks;
}

static void run_blocks() {
    dim3 grid = emulated_grid_size;
    uint64_t blocks = (uint64_t)grid.x * grid.y * grid.z;
    forget_accesses();
    launch.first_block = random_number() % blocks;
    for (uint64_t i = 0; i < blocks && !launch.failed; i++) {
        uint64_t block = block_at(i, blocks);
        emulated_block = {(unsigned)(block % grid.x), (unsigned)(block / grid.x % grid.y),
                          (unsigned)(block / ((uint64_t)grid.x * grid.y))};
        run_block();
    }
}

static const Kernel *kernel_of(const char *symbol) {
    for (int i = 0; i < emulated_kernel_count; i++)
        if (strcmp(emulated_kernels[i].name, symbol) == 0) return &emulated_kernels[i];
    return nullptr;
}

/* The limits of "Technical Specifications per Compute Capability" in the CUDA C++ Programming Guide. */
static bool extents_fit(const unsigned grid[3], const unsigned block[3]) {
    for (int i = 0; i < 3; i++)
        if (grid[i] == 0 || block[i] == 0) return false;
    if (grid[0] > 0x7fffffff || grid[1] > 65535 || grid[2] > 65535) return false;
    return block[0] <= 1024 && block[1] <= 1024 && block[2] <= 64;
}

/* False, with a text in `failure`, if a driver would refuse the launch. */
static bool prepare_launch(const char *symbol, const unsigned grid[3], const unsigned block[3], void **params,
                           int order) {
    const Kernel *kernel = kernel_of(symbol);
    uint64_t count = (uint64_t)block[0] * block[1] * block[2];
    *failure = 0;
    if (!kernel)
        snprintf(failure, sizeof failure, "%s: no kernel of this name", symbol);
    else if (!extents_fit(grid, block))
        snprintf(failure, sizeof failure, "%s: grid " INDEX ", block " INDEX ": no GPU takes that", symbol, grid[0],
                 grid[1], grid[2], block[0], block[1], block[2]);
    else if (count > kernel->most_threads)
        snprintf(failure, sizeof failure, "%s: %lu threads in a block, but __launch_bounds__ says %u", symbol,
                 (unsigned long)count, kernel->most_threads);
    else if (order < 0)
        snprintf(failure, sizeof failure, "%s: no thread order %d", symbol, order);
    else if (!reserve_stacks(&stacks, (unsigned)count))
        snprintf(failure, sizeof failure, "%s: no memory for the stacks of %lu threads", symbol, (unsigned long)count);
    if (*failure) return false;
    launch = {kernel, params, order, (uint64_t)order * 0x9e3779b97f4a7c15 + 1, (unsigned)count};
    allowed = &chosen_spans;
    emulated_grid_size = dim3(grid[0], grid[1], grid[2]);
    emulated_block_size = dim3(block[0], block[1], block[2]);
    return true;
}

/* When the library is unloaded. */
__attribute__((destructor)) static void release_memory() {
    release_stacks(&stacks);
    forget_pages();
}

#define EXPORTED extern "C" __attribute__((visibility("default")))

/* Launches kernel `symbol`; `params` are as for cuLaunchKernel. NULL, or a text, valid until the calling thread's next
   call, that says what the kernel did wrong. Calls of several threads wait for each other. */
EXPORTED const char *pi_emulate(const char *symbol, const unsigned grid[3], const unsigned block[3], void **params,
                                int order) {
    static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;
    static thread_local char answer[sizeof failure];
    pthread_mutex_lock(&one_at_a_time);
    if (prepare_launch(symbol, grid, block, params, order)) {
        stack_t outer;
        catch_signals(&outer);
        run_blocks();
        restore_signals(&outer);
    }
    memcpy(answer, failure, sizeof answer);
    pthread_mutex_unlock(&one_at_a_time);
    return *answer ? answer : nullptr;
}

/* How many parameters kernel `symbol` has; -1 if there is none of that name. */
EXPORTED int pi_params(const char *symbol) {
    const Kernel *kernel = kernel_of(symbol);
    return kernel ? kernel->params : -1;
}

/* Launches of the calling thread may from now on use `count` pieces of memory; any if it is 0. False for too many. */
EXPORTED int pi_memory(const void *const *starts, const size_t *bytes, int count) {
    if (count > MOST_SPANS) return false;
    for (int i = 0; i < count; i++) chosen_spans.spans[i] = {(const char *)starts[i], bytes[i]};
    chosen_spans.count = count;
    return true;
}
