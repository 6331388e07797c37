/* Runs the thread pool of host.c from C, so that a sanitizer can watch it: pool_driver SECONDS.
 *
 * Two threads take turns at it, with changing numbers of workers, naps, tasks that fail, waits to come, workers that are
 * ended, and forks, whose children run some more. Exits with 1 on a wrong sum.
 *
 * AddressSanitizer sees no forks: its own lock of threads (GCC 12) may be held by the other thread at that moment, and
 * then nobody opens it in the child, which waits for ever at its first thread. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../../../codegen/picompile_codegen/build/native/abi.h"

int pi_run(const PiCall *calls, int count, int threads, int64_t (*stamps)[2]);
void pi_stop(void);

#define SIZE 1000
#define CALLS 50
#ifdef __SANITIZE_ADDRESS__
#define FORKS 0
#else
#define FORKS 1
#endif

static int add_task(int task, PiEnv *env, void *data) {
  int *values = data;
  for (int i = task; i < SIZE; i += env->num_task) values[i] += 1;
  return 0;
}

/* Each element is written by one task here and by another in the next region, which the pool must keep apart. */
static int shift_task(int task, PiEnv *env, void *data) {
  int *values = data;
  for (int i = env->num_task - 1 - task; i < SIZE; i += env->num_task) values[i] += 1;
  return 0;
}

static int fail_task(int task, PiEnv *env, void *data) {
  (void)data;
  return task == env->num_task / 2 ? -1 : 0;
}

static int failing_kernel(void *self, const PiAny *args, int count, PiAny *result) {
  (void)self, (void)args, (void)count, (void)result;
  return __TVMBackendParallelLaunch(fail_task, NULL, 0);
}

static int kernel(void *self, const PiAny *args, int count, PiAny *result) {
  (void)self, (void)count, (void)result;
  if (__TVMBackendParallelLaunch(add_task, args[0].value, 0) != 0) return -1;
  return __TVMBackendParallelLaunch(shift_task, args[0].value, 3);
}

/* A wait for another device, longer than workers spin. */
static int waiting_kernel(void *self, const PiAny *args, int count, PiAny *result) {
  (void)self, (void)args, (void)count, (void)result;
  usleep(300);
  return 0;
}

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static double until;
static _Atomic int wrong;

/* Runs the kernel CALLS times on fresh values, and in the middle, where it `waits`, a wait; 0 if all sums are right. */
static int run_once(int threads, int waits) {
  int values[SIZE] = {0}, errors = 0;
  PiAny arg = {7, 0, values};
  PiCall calls[CALLS + 1];
  for (int i = 0; i <= CALLS; ++i) calls[i] = (PiCall){kernel, &arg, 1, 0};
  calls[CALLS / 2] = (PiCall){waiting_kernel, &arg, 1, waits ? PI_WAITS : 0};
  errors += pi_run(calls, CALLS + 1, threads, NULL) != -1;
  for (int i = 0; i < SIZE; ++i) errors += values[i] != CALLS * 2;
  calls[7].kernel = failing_kernel;
  errors += pi_run(calls, CALLS + 1, threads, NULL) != 7;
  return errors;
}

static int run_in_child(int threads) {
  int status;
  pid_t child = fork();
  if (child == 0) _exit(run_once(threads, 0) ? 1 : 0);
  return waitpid(child, &status, 0) != child || status != 0;
}

static void *work(void *data) {
  unsigned seed = (unsigned)(intptr_t)data;
  static const int threads[] = {1, 2, 3, 8};
  for (int runs = 0; now() < until; ++runs) {
    if (run_once(threads[rand_r(&seed) % 4], runs % 2) != 0) wrong = 1;
    if (runs % 7 == 0) usleep(3000); /* workers fall asleep */
    if (runs % 5 == 0) pi_stop();    /* while the other thread may be amid a program */
    if (FORKS && runs % 50 == 10 && run_in_child(3) != 0) wrong = 1; /* and the other thread may be amid a region */
  }
  return NULL;
}

int main(int count, char **arguments) {
  pthread_t threads[2];
  until = now() + (count > 1 ? atof(arguments[1]) : 1.0);
  for (intptr_t i = 0; i < 2; ++i) pthread_create(&threads[i], NULL, work, (void *)(i + 1));
  for (int i = 0; i < 2; ++i) pthread_join(threads[i], NULL);
  puts(wrong ? "wrong" : "right");
  return wrong;
}
