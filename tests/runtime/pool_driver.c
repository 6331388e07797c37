/* Runs the thread pool of host.c from C, so that a sanitizer can watch it: pool_driver SECONDS. Exits with 1 on a wrong sum. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef struct {
  int32_t type_index;
  uint32_t padding;
  void *value;
} Any;

typedef struct {
  int (*kernel)(void *, const Any *, int, Any *);
  const Any *args;
  int32_t num_args, padding;
} Call;

typedef struct {
  void *sync_handle;
  int32_t num_task;
} Env;

extern int (*__TVMBackendParallelLaunch)(int (*)(int, Env *, void *), void *, int);
int pi_run(const Call *calls, int count, int threads, double *seconds);

#define SIZE 1000
#define CALLS 50

static int add_task(int task, Env *env, void *data) {
  int *values = data;
  for (int i = task; i < SIZE; i += env->num_task) values[i] += 1;
  return 0;
}

/* Each element is written by one task here and by another in the next region, which the pool must keep apart. */
static int shift_task(int task, Env *env, void *data) {
  int *values = data;
  for (int i = env->num_task - 1 - task; i < SIZE; i += env->num_task) values[i] += 1;
  return 0;
}

static int kernel(void *self, const Any *args, int count, Any *result) {
  (void)self, (void)count, (void)result;
  if (__TVMBackendParallelLaunch(add_task, args[0].value, 0) != 0) return -1;
  return __TVMBackendParallelLaunch(shift_task, args[0].value, 3);
}

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static double until;
static int wrong;

static void *work(void *data) {
  unsigned seed = (unsigned)(intptr_t)data;
  static const int threads[] = {1, 2, 3, 8};
  int values[SIZE], runs = 0;
  Any arg = {7, 0, values};
  Call calls[CALLS];
  for (int i = 0; i < CALLS; ++i) calls[i] = (Call){kernel, &arg, 1, 0};
  memset(values, 0, sizeof values);
  for (; now() < until; ++runs) {
    if (pi_run(calls, CALLS, threads[rand_r(&seed) % 4], NULL) != -1) wrong = 1;
    for (int i = 0; i < SIZE; ++i)
      if (values[i] != (runs + 1) * CALLS * 2) wrong = 1;
    if (runs % 7 == 0) usleep(3000); /* workers fall asleep */
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
