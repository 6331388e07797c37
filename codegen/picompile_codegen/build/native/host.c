/* What an artifact's host.so holds beside the kernels: a thread pool, an error sink and the loop that runs a program.
 *
 * Kernels compiled by TVM reach threads through one function pointer, `__TVMBackendParallelLaunch`, and report failures
 * through one function, `TVMFFIErrorSetRaisedFromCStrParts`. Both are defined here, so that an artifact needs no TVM
 * library where it runs, and so that the number of threads is chosen for each run instead of once for each process.
 *
 * A decode step has hundreds of parallel regions, a few microseconds apart, and other processes may want the cores:
 *
 *   - A region is cut into several tasks a thread. Each thread has a run of them that lie side by side in memory, and
 *     takes the last ones of others when its own are done: nobody waits for long, and a worker that another process has
 *     displaced, or that sleeps, is not waited for at all unless it was amid a task.
 *   - That it is amid a task is made rare: a worker offers its core to others between two regions before the kernel
 *     takes it.
 *   - Workers spin for a while between regions, and so does the launching thread for the last tasks of a region. Then
 *     they sleep: an idle core fetches a thread that waits for a busy one.
 *   - While a program has waits for the other device to come, which are long, workers yield instead of sleeping.
 *   - Threads are not pinned. A thread that is bound to a core that another process takes holds up all the others.
 *
 * Results do not depend on any of this: which thread runs a task, and how many tasks there are, has no influence on
 * what is computed.
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

#include "abi.h"

#define PI_MAX_THREADS 256
#define PI_LINE 128 /* cache lines come in pairs */

/* Decoding with a model of 1.3 billion weights, 2 threads waited 14 us for each other at the end of a region with one
 * task each, 11 us with 4, 7 us with 8 and 3 us with 16. A task more costs 5 ns. */
#define PI_TASKS_A_THREAD 16
/* Of a worker, about 30-100 us of `pause`: longer than most gaps inside a decode step. */
#define PI_SPINS 4000
/* Of the launching thread, at the end of a region. */
#define PI_SPINS_MAIN 2000
/* Of a worker between two yields, while waits are to come. */
#define PI_SPINS_A_YIELD 32
/* Even then a worker sleeps that had nothing to do for the first time, beside which waking it takes little, or that got
 * its core back from a yield after the second: somebody who computes needs it. */
#ifndef PI_ALERT_NS /* tests have others */
#define PI_ALERT_NS 5000000
#define PI_TAKEN_NS 1000000
#endif
/* A worker offers its core to others after this time; left alone, schedulers take it away after 3 to 4 ms. */
#define PI_TURN_NS 1000000
/* Longer than any step of a device takes. */
#ifndef PI_PATIENCE_NS /* tests have less */
#define PI_PATIENCE_NS 30000000000
#endif

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

/* ---- waiting ---- */

static void relax(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("yield");
#endif
}

static void futex(void *word, int operation, uint32_t value) {
  syscall(SYS_futex, word, operation | FUTEX_PRIVATE_FLAG, value, NULL, NULL, 0);
}

static int64_t now_ns(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* ---- flags ---- */

/* Host and device meet at flags in memory that both see: a flag holds the number of the step in which it was last set.
 * What was written before a flag is set is there for whoever has seen it. Kernels promise LLVM that their arguments do
 * not overlap: they name what this is about, so that no access to it is moved across these calls. */
static void set(int32_t *flag, int32_t step) {
  atomic_store_explicit((_Atomic int32_t *)flag, step, memory_order_release);
}

PI_EXPORT void pi_signal(int32_t *flag, int32_t step, const void *written, const void *also_written) {
  (void)written, (void)also_written;
  set(flag, step);
}

static int is_set(const int32_t *flag, int32_t step) {
  return atomic_load_explicit((const _Atomic int32_t *)flag, memory_order_acquire) == step;
}

/* Whoever gives up says in `abandoned` for which flag it waited, as a distance in bytes, and what that held: words 1 and
 * 2 are the host's, or an accelerator's that is a partition of the CPU, 3 and 4 a GPU's. */
static void give_up(const int32_t *flag, int32_t *abandoned) {
  abandoned[1] = (int32_t)((intptr_t)flag - (intptr_t)abandoned);
  abandoned[2] = atomic_load_explicit((const _Atomic int32_t *)flag, memory_order_relaxed);
  set(abandoned, 1);
}

/* Waits until `flag` holds `step`, or until either side gives up, which sets `abandoned`. Whoever waits for half a
 * minute gives up: a device that has failed sets no flag. Spins at first, since most waits are short, and then lets
 * others have the core: where the device is a partition of the same CPU, it may need it. */
PI_EXPORT void pi_wait(const int32_t *flag, int32_t *abandoned, int32_t step, const void *awaited) {
  (void)awaited;
  for (int spin = 0; spin < PI_SPINS; ++spin) {
    if (is_set(flag, step)) return;
    relax();
  }
  int64_t end = now_ns() + PI_PATIENCE_NS;
  while (!is_set(flag, step) && is_set(abandoned, 0)) {
    sched_yield();
    if (now_ns() > end) give_up(flag, abandoned);
  }
}

/* Sends 32 words and a flag to a GPU, `rounds` times, and waits for its answer each time: `pi_ping_pong` of
 * cuda/prelude.cuh. round_ns[i] is how long round i + 1 takes. Returns 0; round r < 0 if its answer was wrong; or round
 * r > 0 if none came within `patience_ns`, and then the GPU is told to give up. */
PI_EXPORT int pi_ping_pong(int32_t *ping, const int32_t *pong, int32_t *abandoned, int32_t *sent,
                           const int32_t *echoed, int rounds, int64_t patience_ns, int64_t *round_ns) {
  for (int round = 1; round <= rounds; ++round) {
    int at = round * 32 & 1023;
    for (int i = 0; i < 32; ++i) sent[at + i] = (int32_t)((uint32_t)round * 0x9E3779B1u + (uint32_t)i);
    int64_t begin = now_ns(), end = begin + patience_ns;
    set(ping, round);
    for (int spin = 1; !is_set(pong, round); ++spin) {
      relax();
      if (spin % PI_SPINS) continue;
      sched_yield(); /* where the GPU is an emulation on this CPU */
      if (now_ns() > end || !is_set(abandoned, 0)) return set(abandoned, 1), round;
    }
    round_ns[round - 1] = now_ns() - begin;
    for (int i = 0; i < 32; ++i)
      if (((const volatile int32_t *)echoed)[at + i] != sent[at + i]) return set(abandoned, 1), -round;
  }
  return 0;
}

/* ---- copies for a GPU ---- */

/* `CopyPart` of devices/cuda/bounce.py. */
typedef struct {
  void *target;
  const void *source;
  uint64_t size_bytes;
} PiCopyPart;

/* Copies a part of the host's memory, which a GPU cannot copy by itself, to a buffer from which it can. The GPU's
 * driver calls it amid a graph, in a thread of its own; it must not call the driver, and it cannot fail. */
PI_EXPORT void pi_copy_part(const PiCopyPart *part) { memcpy(part->target, part->source, part->size_bytes); }

/* ---- thread pool ---- */

/* A thread's tasks of the current region, in a cache line of their own with all that it takes to run them. */
typedef struct {
  _Alignas(PI_LINE) _Atomic uint32_t range; /* end << 16 | next: tasks that nobody has taken */
  int32_t tasks;                            /* of all threads together */
  PiLambda lambda;
  void *data;
} PiShare;

static PiShare shares[PI_MAX_THREADS];

static struct {
  _Alignas(PI_LINE) _Atomic uint32_t done; /* 2 · tasks that workers did, ever; + 1: the launching thread sleeps */
  _Atomic int failed;                     /* a task of this region returned an error */
  /* Of the run, the launching one included; workers that it has no use for wait on it, and 0 ends all of them. */
  _Alignas(PI_LINE) _Atomic int threads;
  _Atomic int asleep;                     /* a worker sleeps or is about to; whoever wakes them clears it */
  _Atomic uint32_t wakeups;               /* 2 · how often they were woken, + PI_ALERT; they wait on it */
  _Alignas(PI_LINE) uint32_t expected;    /* of `done`, when the regions so far are over */
  int started;                            /* workers alive */
  pthread_t workers[PI_MAX_THREADS];
  pthread_mutex_t run_lock;               /* one program at a time */
} pool = {.run_lock = PTHREAD_MUTEX_INITIALIZER, .threads = 1};

/* A bit of `wakeups`: waits are to come, and workers do not sleep. In the same word, so that none falls asleep over it. */
#define PI_ALERT 1

static int first_of(uint32_t range) { return (int)(range & 0xffff); }
static int end_of(uint32_t range) { return (int)(range >> 16); }

static int remaining(PiShare *share) {
  uint32_t range = atomic_load_explicit(&share->range, memory_order_relaxed);
  return end_of(range) - first_of(range);
}

/* Takes tasks of a share, from its front or its back, until none is left. Returns how many.
 *
 * A word that was read a region ago does no harm: where the exchange finds the same word, these tasks are there to be
 * taken. They keep their region open, and `lambda` and `data` valid, until `done` has them. */
static int take(PiShare *share, int from_back) {
  int taken = 0;
  uint32_t range = atomic_load_explicit(&share->range, memory_order_relaxed);
  for (int left; (left = end_of(range) - first_of(range)) > 0;) {
    int count = from_back ? (left + 1) / 2 : left > 4 ? left / 4 : 1;
    uint32_t rest = from_back ? range - ((uint32_t)count << 16) : range + (uint32_t)count;
    if (!atomic_compare_exchange_weak_explicit(&share->range, &range, rest, memory_order_acquire, memory_order_relaxed))
      continue;
    int first = from_back ? end_of(rest) : first_of(range);
    PiEnv env = {NULL, share->tasks};
    for (int task = first; task < first + count; ++task)
      if (share->lambda(task, &env, share->data) != 0) atomic_store_explicit(&pool.failed, 1, memory_order_relaxed);
    taken += count;
    range = atomic_load_explicit(&share->range, memory_order_relaxed);
  }
  return taken;
}

static int take_own_then_others(int index, int threads) {
  int taken = take(&shares[index], 0);
  for (int i = 1; i < threads; ++i) taken += take(&shares[(index + i) % threads], 1);
  return taken;
}

/* ---- workers ---- */

/* Returns the threads of the run once that has a use for worker `index`, or 0 when the worker shall end. */
static int await_use(int index) {
  int threads;
  while ((threads = atomic_load(&pool.threads)) <= index && threads > 0)
    futex(&pool.threads, FUTEX_WAIT, (uint32_t)threads);
  return threads;
}

static int spin_for_tasks(int index, int spins) {
  for (int spin = 0; spin < spins; ++spin) {
    if (remaining(&shares[index]) > 0) return 1;
    relax();
  }
  return 0;
}

/* Returns 1 when there are tasks, waits are over or the worker is of no use, 0 when it should sleep all the same. It
 * yields, since there may be fewer cores than threads, and leaves a core that somebody took: two that compute would
 * share one while workers pass the other between them. */
static int stay_alert(int index) {
  int64_t end = now_ns() + PI_ALERT_NS;
  while (atomic_load(&pool.wakeups) & PI_ALERT && atomic_load(&pool.threads) > index) {
    int64_t before = now_ns();
    if (before > end) return 0;
    sched_yield();
    if (now_ns() - before > PI_TAKEN_NS) return 0;
    if (spin_for_tasks(index, PI_SPINS_A_YIELD)) break;
  }
  return 1;
}

/* Returns when there are tasks, or for no reason. The launching thread may fail to see a worker that is about to sleep:
 * then this region is done without it. */
static void await_tasks(int index) {
  if (spin_for_tasks(index, PI_SPINS)) return;
  uint32_t alert = atomic_load(&pool.wakeups) & PI_ALERT;
  if (alert && stay_alert(index)) return;
  uint32_t seen = atomic_load(&pool.wakeups); /* before `asleep`: whoever clears that changes this */
  atomic_store(&pool.asleep, 1);
  int is_needed = remaining(&shares[index]) > 0 || (seen & PI_ALERT) != alert;
  if (!is_needed && atomic_load(&pool.threads) > index) futex(&pool.wakeups, FUTEX_WAIT, seen);
}

static void report_done(int tasks) {
  uint32_t before = atomic_fetch_add_explicit(&pool.done, (uint32_t)tasks << 1, memory_order_release);
  if (before & 1) futex(&pool.done, FUTEX_WAKE, 1);
}

typedef struct {
  int64_t began, last;
} PiTurn;

/* Lets others run at the end of a turn, when nobody waits for this worker. A long time since it was last asked means
 * that they have just run, or that regions are so long that this is of no use. */
static void offer_core(PiTurn *turn) {
  int64_t now = now_ns();
  if (now - turn->last > PI_TURN_NS) turn->began = now;
  turn->last = now;
  if (now - turn->began <= PI_TURN_NS) return;
  sched_yield();
  turn->began = turn->last = now_ns();
}

static void *worker_main(void *argument) {
  int index = (int)(intptr_t)argument;
  PiTurn turn = {0, 0};
  for (int threads; (threads = await_use(index)) > 0;) {
    await_tasks(index);
    int taken = take_own_then_others(index, threads);
    if (taken == 0) continue;
    report_done(taken);
    offer_core(&turn);
  }
  return NULL;
}

static int start_workers(int threads) {
  while (pool.started < threads - 1) {
    void *index = (void *)(intptr_t)(pool.started + 1);
    if (pthread_create(&pool.workers[pool.started], NULL, worker_main, index) != 0) {
      snprintf(last_error, sizeof last_error, "cannot start thread %d of %d", pool.started + 2, threads);
      return -1;
    }
    ++pool.started;
  }
  return 0;
}

static void wake_workers(void) {
  if (!atomic_load_explicit(&pool.asleep, memory_order_relaxed) || !atomic_exchange(&pool.asleep, 0)) return;
  atomic_fetch_add(&pool.wakeups, 2);
  futex(&pool.wakeups, FUTEX_WAKE, INT_MAX);
}

/* A forked process has none of its parent's workers, and is in none of its regions. */
static void forget_workers(void) {
  pthread_mutex_init(&pool.run_lock, NULL);
  pthread_mutex_init(&error_lock, NULL);
  for (int i = 0; i < PI_MAX_THREADS; ++i) atomic_store(&shares[i].range, 0);
  atomic_store(&pool.failed, 0);
  atomic_store(&pool.asleep, 0);
  atomic_store(&pool.wakeups, 0);
  atomic_store(&pool.done, 0);
  atomic_store(&pool.threads, 1);
  pool.expected = 0;
  pool.started = 0;
}

__attribute__((constructor)) static void set_up(void) { pthread_atfork(NULL, NULL, forget_workers); }

static void use_threads(int threads) {
  if (atomic_exchange(&pool.threads, threads) == threads) return;
  futex(&pool.threads, FUTEX_WAKE, INT_MAX);
}

/* Ends all workers and returns when none is left, so that this library can be unloaded. A later run starts new ones. */
PI_EXPORT void pi_stop(void) {
  pthread_mutex_lock(&pool.run_lock);
  use_threads(0);
  atomic_fetch_add(&pool.wakeups, 2); /* behind `threads`: a worker about to sleep sees this, or that */
  futex(&pool.wakeups, FUTEX_WAKE, INT_MAX);
  while (pool.started > 0) pthread_join(pool.workers[--pool.started], NULL);
  use_threads(1);
  pthread_mutex_unlock(&pool.run_lock);
}

/* ---- regions ---- */

static void open_region(PiLambda lambda, void *data, int tasks, int threads) {
  for (int i = threads; i-- > 0;) {
    uint32_t first = (uint32_t)(tasks * i / threads), end = (uint32_t)(tasks * (i + 1) / threads);
    shares[i].lambda = lambda;
    shares[i].data = data;
    shares[i].tasks = tasks;
    atomic_store_explicit(&shares[i].range, end << 16 | first, memory_order_release);
  }
}

/* Waits until `done` is as expected. The bit that says that this thread sleeps is in the same word, so that the last
 * worker cannot miss it. */
static void join_workers(void) {
  for (int spin = 0; spin < PI_SPINS_MAIN; ++spin) {
    if (atomic_load_explicit(&pool.done, memory_order_acquire) == pool.expected) return;
    relax();
  }
  uint32_t now = atomic_fetch_or_explicit(&pool.done, 1, memory_order_acquire) | 1;
  while (now != (pool.expected | 1)) {
    futex(&pool.done, FUTEX_WAIT, now);
    now = atomic_load_explicit(&pool.done, memory_order_acquire);
  }
  atomic_store_explicit(&pool.done, pool.expected, memory_order_relaxed);
}

static int parallel_launch(PiLambda lambda, void *data, int num_task) {
  int threads = atomic_load_explicit(&pool.threads, memory_order_relaxed);
  int tasks = threads > 1 ? threads * PI_TASKS_A_THREAD : 1;
  if (num_task > 0 && num_task < tasks) tasks = num_task;
  if (tasks == 1) {
    PiEnv env = {NULL, 1};
    return lambda(0, &env, data);
  }
  open_region(lambda, data, tasks, threads);
  wake_workers();
  int taken = take_own_then_others(0, threads);
  pool.expected += (uint32_t)(tasks - taken) << 1;
  join_workers();
  if (!atomic_load_explicit(&pool.failed, memory_order_relaxed)) return 0;
  atomic_store_explicit(&pool.failed, 0, memory_order_relaxed);
  return -1;
}

/* TVM's objects define this pointer as a weak, empty symbol; this definition is the one that is linked. */
PI_EXPORT int (*__TVMBackendParallelLaunch)(PiLambda, void *, int) = parallel_launch;

/* ---- the program ---- */

/* The index of the last call that waits for the other device, -1 if none does. */
static int last_wait(const PiCall *calls, int count) {
  int last = count - 1;
  while (last >= 0 && !(calls[last].flags & PI_WAITS)) --last;
  return last;
}
static void let_workers_sleep(void) { atomic_fetch_and(&pool.wakeups, ~(uint32_t)PI_ALERT); }

/* Runs `count` calls in order on `threads` threads. Unless stamps is NULL, call i begins at stamps[i][0] and ends at
 * stamps[i][1], in ns of CLOCK_MONOTONIC, which is the same for all libraries. Returns -1 when all succeeded, else the
 * index of the call that failed, or -2 when threads could not be started; `pi_last_error` says why. */
PI_EXPORT int pi_run(const PiCall *calls, int count, int threads, int64_t (*stamps)[2]) {
  if (threads < 1) threads = 1;
  if (threads > PI_MAX_THREADS) threads = PI_MAX_THREADS;
  pthread_mutex_lock(&pool.run_lock);
  last_error[0] = '\0';
  int failed_call = start_workers(threads) == 0 ? -1 : -2;
  use_threads(threads);
  int alert_until = threads > 1 ? last_wait(calls, count) : -1;
  if (alert_until >= 0) atomic_fetch_or(&pool.wakeups, PI_ALERT);
  if (threads > 1) wake_workers(); /* they come while the first calls, which are short, run */
  for (int i = 0; i < count && failed_call == -1; ++i) {
    PiAny result = {0, 0, NULL};
    if (stamps) stamps[i][0] = now_ns();
    if (calls[i].kernel(NULL, calls[i].args, calls[i].num_args, &result) != 0) failed_call = i;
    if (stamps) stamps[i][1] = now_ns();
    if (i == alert_until) let_workers_sleep();
  }
  if (failed_call != -1) let_workers_sleep();
  pthread_mutex_unlock(&pool.run_lock);
  return failed_call;
}
