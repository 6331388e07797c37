/* Kernels that watch whether workers of the thread pool sleep. host.c is compiled with -Dsyscall=watched_syscall and the
 * like (see watched_library in test_runtime_host_pool.py), so that what it asks the system for comes by here. */
#undef syscall
#undef sched_yield
#undef pthread_create
#define _GNU_SOURCE
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "../../../codegen/picompile_codegen/build/native/abi.h"

extern void TVMFFIErrorSetRaisedFromCStr(const char *kind, const char *message);

#define KERNEL(name) PI_EXPORT int __tvm_ffi_##name(void *self, const PiAny *args, int count, PiAny *result)
#define UNUSED (void)self, (void)count, (void)result
#define I32(i) ((int32_t *)((PiTensor *)args[i].value)->data)

static _Atomic int asleep; /* workers that wait on a futex */
static _Atomic int sleeps; /* how often one was put to sleep */
static _Atomic int yields; /* how often a worker gave its core away */
PI_EXPORT _Atomic int pool_refuses_threads;

/* Tests launch programs from the main thread. */
static int is_worker(void) { return syscall(SYS_gettid) != getpid(); }

long watched_syscall(long number, ...) {
  va_list rest;
  va_start(rest, number);
  uint32_t *word = va_arg(rest, uint32_t *);
  int operation = va_arg(rest, int);
  uint32_t value = va_arg(rest, uint32_t);
  va_end(rest);
  if ((operation & FUTEX_CMD_MASK) != FUTEX_WAIT || !is_worker())
    return syscall(number, word, operation, value, NULL, NULL, 0);
  atomic_fetch_add(&sleeps, 1);
  atomic_fetch_add(&asleep, 1);
  long status = syscall(number, word, operation, value, NULL, NULL, 0);
  atomic_fetch_sub(&asleep, 1);
  if (status != 0) atomic_fetch_sub(&sleeps, 1); /* the word had changed */
  return status;
}

int watched_yield(void) {
  if (is_worker()) atomic_fetch_add(&yields, 1);
  return sched_yield();
}

int watched_create(pthread_t *thread, const pthread_attr_t *how, void *(*run)(void *), void *argument) {
  return atomic_load(&pool_refuses_threads) ? -1 : pthread_create(thread, how, run, argument);
}

static int fail(const char *message) {
  TVMFFIErrorSetRaisedFromCStr("ValueError", message);
  return -1;
}

/* Waits until `word` is at least `wanted`; 0 after half a minute. */
static int reaches(const _Atomic int *word, int wanted) {
  for (int i = 0; i < 300000 && atomic_load(word) < wanted; ++i) nanosleep(&(struct timespec){0, 100000}, NULL);
  return atomic_load(word) >= wanted;
}

/* Fails unless the one worker there is has yielded several times, and so had nothing to do for long, without sleeping. */
KERNEL(pool_await_yields) {
  UNUSED;
  (void)args;
  int slept = atomic_load(&sleeps);
  if (!reaches(&yields, atomic_load(&yields) + 10)) return fail("the worker does not yield");
  return atomic_load(&sleeps) > slept ? fail("the worker slept") : 0;
}

/* workers[1]: fails unless so many come to sleep at the same time */
KERNEL(pool_await_sleep) {
  UNUSED;
  return reaches(&asleep, I32(0)[0]) ? 0 : fail("the workers do not sleep");
}

/* state[1]: sets it to 1 and returns when it is 2 */
KERNEL(pool_hold) {
  UNUSED;
  _Atomic int *state = (_Atomic int *)I32(0);
  atomic_store(state, 1);
  return reaches(state, 2) ? 0 : fail("nobody let go");
}
