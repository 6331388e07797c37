/* What an artifact's host.so holds beside the kernels: a thread pool, an error sink and the loop that runs a program.
 *
 * Kernels compiled by TVM reach threads through one function pointer, `__TVMBackendParallelLaunch`, and report failures
 * through one function, `TVMFFIErrorSetRaisedFromCStrParts`. Both are defined here, so that an artifact needs no TVM
 * library where it runs, and so that the number of threads is chosen for each run instead of once for each process.
 *
 * The pool spins for a while between parallel regions, because a decode step has hundreds of them a few microseconds
 * apart, and then sleeps on a futex, because a server waits for seconds between requests. Workers that the current run
 * has no use for sleep on a futex of their own, so that its regions do not wake them.
 */
#define _GNU_SOURCE
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define PI_EXPORT __attribute__((visibility("default")))
#define PI_MAX_THREADS 256
#define PI_SPINS 4000       /* about 30-100 us of `pause`: longer than any gap inside a decode step */
#define PI_SPINS_MAIN 2000  /* the launching thread then yields its core to whoever keeps a worker from running */

/* ---- the two structures of TVM's ABI that are used here (c_api.h, c_backend_api.h) ---- */
typedef struct {
  int32_t type_index;
  uint32_t padding;
  union {
    int64_t v_int64;
    void *v_ptr;
  };
} PiAny;

typedef struct {
  void *sync_handle;
  int32_t num_task;
} PiParallelEnv;

typedef int (*PiLambda)(int task_id, PiParallelEnv *env, void *data);
typedef int (*PiKernel)(void *self, const PiAny *args, int32_t num_args, PiAny *result);

/* ---- errors ---- */
static char last_error[1024];
static pthread_mutex_t error_lock = PTHREAD_MUTEX_INITIALIZER; /* several tasks of one region may fail */

PI_EXPORT void TVMFFIErrorSetRaisedFromCStrParts(const char *kind, const char **parts, int32_t count) {
  pthread_mutex_lock(&error_lock);
  size_t used = (size_t)snprintf(last_error, sizeof last_error, "%s: ", kind);
  for (int32_t i = 0; i < count && used < sizeof last_error - 1; ++i) {
    int written = snprintf(last_error + used, sizeof last_error - used, "%s", parts[i]);
    if (written < 0) break;
    used += (size_t)written;
  }
  pthread_mutex_unlock(&error_lock);
}

PI_EXPORT void TVMFFIErrorSetRaisedFromCStr(const char *kind, const char *message) {
  TVMFFIErrorSetRaisedFromCStrParts(kind, &message, 1);
}

PI_EXPORT const char *pi_last_error(void) { return last_error; }

/* ---- thread pool ---- */
static struct {
  pthread_mutex_t run_lock;      /* one program at a time */
  int started;                   /* workers alive */
  _Atomic int threads;           /* threads of the current run, the launching one included; unused workers wait on it */
  _Atomic int64_t region;        /* number of the parallel region << 8 | its tasks - 1; the others wait on its low half */
  _Atomic int sleepers;          /* workers inside futex_wait */
  _Atomic int64_t claims;        /* number of the parallel region << 8 | its next task that nobody has taken */
  _Atomic int finished;          /* tasks of this region that are done */
  _Atomic int failed;            /* a task of this region returned an error */
  PiLambda lambda;
  void *data;
} pool = {.run_lock = PTHREAD_MUTEX_INITIALIZER, .threads = 1};

static void relax(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("yield");
#endif
}

/* The word that the kernel compares has 32 bits; of a region it is the half that changes, the first on these machines. */
static void futex(void *word, int operation, int value) {
  syscall(SYS_futex, word, operation | FUTEX_PRIVATE_FLAG, value, NULL, NULL, 0);
}

static void await_use(int index) {
  int threads;
  while ((threads = atomic_load(&pool.threads)) <= index) futex(&pool.threads, FUTEX_WAIT, threads);
}

/* Waits until the region differs from `seen`; returns the new one. The number of a region has 56 bits, so that it never
 * comes again, however long a worker slept. */
static int64_t await_region(int64_t seen) {
  for (int spin = 0; spin < PI_SPINS; ++spin) {
    int64_t now = atomic_load_explicit(&pool.region, memory_order_acquire);
    if (now != seen) return now;
    relax();
  }
  atomic_fetch_add(&pool.sleepers, 1);
  int64_t now;
  while ((now = atomic_load(&pool.region)) == seen) futex(&pool.region, FUTEX_WAIT, (int)seen);
  atomic_fetch_sub(&pool.sleepers, 1);
  return now;
}

typedef struct {
  int index;
  int64_t region;
} PiWorkerStart;

static PiWorkerStart worker_start[PI_MAX_THREADS];

/* Takes the tasks of a region, one by one, until none is left. Any thread may run any task: a worker whose core another
 * process has taken never wakes for its share, and whoever is awake does it instead. What a task computes does not
 * depend on who runs it.
 *
 * The region's number is in the claim itself: a worker that comes late fails to claim in the next region, and one that
 * succeeds keeps its region open, and `lambda` and `data` valid, until it is done. */
static void run_tasks(int64_t region) {
  int tasks = (int)(region & 0xff) + 1;
  int64_t claim = atomic_load_explicit(&pool.claims, memory_order_acquire);
  while (claim >> 8 == region >> 8 && (int)(claim & 0xff) < tasks) {
    if (!atomic_compare_exchange_weak(&pool.claims, &claim, claim + 1)) continue;
    PiParallelEnv env = {NULL, tasks};
    if (pool.lambda((int)(claim & 0xff), &env, pool.data) != 0) atomic_store(&pool.failed, 1);
    atomic_fetch_add_explicit(&pool.finished, 1, memory_order_release);
    claim = atomic_load_explicit(&pool.claims, memory_order_acquire);
  }
}

static void *worker_main(void *argument) {
  PiWorkerStart *start = argument;
  int index = start->index;
  int64_t seen = start->region;
  for (;;) {
    await_use(index);
    seen = await_region(seen);
    run_tasks(seen);
  }
  return NULL;
}

static int start_workers(int threads) {
  while (pool.started < threads - 1) {
    pthread_t thread;
    PiWorkerStart *start = &worker_start[pool.started];
    start->index = pool.started + 1;
    start->region = atomic_load(&pool.region);
    if (pthread_create(&thread, NULL, worker_main, start) != 0) {
      snprintf(last_error, sizeof last_error, "cannot start thread %d of %d", pool.started + 2, threads);
      return -1;
    }
    pthread_detach(thread);
    ++pool.started;
  }
  return 0;
}

/* A forked process has none of its parent's workers. */
static void forget_workers(void) {
  pthread_mutex_init(&pool.run_lock, NULL);
  pthread_mutex_init(&error_lock, NULL);
  pool.started = 0;
  atomic_store(&pool.sleepers, 0);
}

__attribute__((constructor)) static void set_up(void) { pthread_atfork(NULL, NULL, forget_workers); }

static void use_threads(int threads) {
  if (atomic_exchange(&pool.threads, threads) != threads) futex(&pool.threads, FUTEX_WAKE, INT_MAX);
}

static int parallel_launch(PiLambda lambda, void *data, int num_task) {
  int threads = atomic_load_explicit(&pool.threads, memory_order_relaxed);
  int tasks = num_task > 0 && num_task < threads ? num_task : threads;
  if (tasks <= 1) {
    PiParallelEnv env = {NULL, 1};
    return lambda(0, &env, data);
  }
  pool.lambda = lambda;
  pool.data = data;
  atomic_store(&pool.failed, 0);
  atomic_store(&pool.finished, 0);
  int64_t number = (atomic_load_explicit(&pool.region, memory_order_relaxed) >> 8) + 1;
  atomic_store(&pool.claims, number << 8);
  atomic_store(&pool.region, number << 8 | (tasks - 1));
  if (atomic_load(&pool.sleepers) > 0) futex(&pool.region, FUTEX_WAKE, INT_MAX);
  run_tasks(number << 8 | (tasks - 1));
  for (int spin = 0; atomic_load_explicit(&pool.finished, memory_order_acquire) < tasks; ++spin) {
    if (spin < PI_SPINS_MAIN) relax();
    else sched_yield();
  }
  return atomic_load(&pool.failed) ? -1 : 0;
}

/* TVM's objects define this pointer as a weak, empty symbol; this definition is the one that is linked. */
PI_EXPORT int (*__TVMBackendParallelLaunch)(PiLambda, void *, int) = parallel_launch;

/* ---- the program ---- */
typedef struct {
  PiKernel kernel;
  const PiAny *args;
  int32_t num_args;
  int32_t padding;
} PiCall;

static double now_seconds(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* Runs `count` calls in order on `threads` threads. Adds the time of call i to seconds[i] unless seconds is NULL.
 * Returns -1 when all succeeded, else the index of the call that failed, or -2 when threads could not be started;
 * `pi_last_error` says why. */
PI_EXPORT int pi_run(const PiCall *calls, int count, int threads, double *seconds) {
  if (threads < 1) threads = 1;
  if (threads > PI_MAX_THREADS) threads = PI_MAX_THREADS;
  pthread_mutex_lock(&pool.run_lock);
  last_error[0] = '\0';
  int failed_call = start_workers(threads) == 0 ? -1 : -2;
  use_threads(threads);
  for (int i = 0; i < count && failed_call == -1; ++i) {
    PiAny result = {0, 0, {0}};
    double start = seconds ? now_seconds() : 0.0;
    if (calls[i].kernel(NULL, calls[i].args, calls[i].num_args, &result) != 0) failed_call = i;
    if (seconds) seconds[i] += now_seconds() - start;
  }
  pthread_mutex_unlock(&pool.run_lock);
  return failed_call;
}
