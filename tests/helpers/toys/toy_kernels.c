/* Kernels of the toy model (see toy_artifact.py), with the ABI of compiled ones, and some that only try host.c out.
 * Each takes its sizes from its arguments. `step` is int32[8]: step[0] tokens, the first of them at position step[1] of
 * the sequence in slot step[2]. Kernels of a batch are given the position and the slot of each row. */
#define _GNU_SOURCE
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#include "../../../codegen/picompile_codegen/build/native/abi.h"

extern void TVMFFIErrorSetRaisedFromCStr(const char *kind, const char *message);

#define KERNEL(name) \
  PI_EXPORT int __tvm_ffi_##name(void *self, const PiAny *args, int count, PiAny *result)
#define UNUSED (void)self, (void)count, (void)result
#define TENSOR(i) ((PiTensor *)args[i].value)
#define F32(i) ((float *)TENSOR(i)->data)
#define I32(i) ((int32_t *)TENSOR(i)->data)

static int refuse(const char *message) {
  TVMFFIErrorSetRaisedFromCStr("ValueError", message);
  return -1;
}

/* step, ids[rows], table[vocab, dim], y[rows, dim] */
KERNEL(toy_embed) {
  UNUSED;
  int64_t dim = TENSOR(2)->shape[1];
  if (I32(0)[0] > TENSOR(1)->shape[0]) return refuse("more tokens\n  than rows");
  for (int t = 0; t < I32(0)[0]; ++t) memcpy(F32(3) + t * dim, F32(2) + I32(1)[t] * dim, dim * sizeof(float));
  return 0;
}

/* The cache[sequences, 1, context, dim] of one sequence. */
static float *cache_of(const PiTensor *cache, int slot) {
  return (float *)cache->data + slot * cache->shape[2] * cache->shape[3];
}

/* step, x[rows, dim], cache */
KERNEL(toy_cache) {
  UNUSED;
  int64_t dim = TENSOR(1)->shape[1];
  memcpy(cache_of(TENSOR(2), I32(0)[2]) + I32(0)[1] * dim, F32(1), I32(0)[0] * dim * sizeof(float));
  return 0;
}

/* step, x[rows, dim], cache, positions[rows], slots[rows] */
KERNEL(toy_cache_batch) {
  UNUSED;
  int64_t dim = TENSOR(1)->shape[1];
  for (int t = 0; t < I32(0)[0]; ++t)
    memcpy(cache_of(TENSOR(2), I32(4)[t]) + I32(3)[t] * dim, F32(1) + t * dim, dim * sizeof(float));
  return 0;
}

/* y[t] = sum over j <= p of cache[j] * cos(p - j) */
typedef struct {
  int rows;
  const int32_t *positions, *slots; /* slots: NULL where all rows are of sequence `slot` */
  int slot;
  const PiTensor *cache;
  float *y;
} Mix;

static int mix_task(int task, PiEnv *env, void *data) {
  const Mix *mix = data;
  int64_t dim = mix->cache->shape[3];
  for (int t = task; t < mix->rows; t += env->num_task) {
    const float *cache = cache_of(mix->cache, mix->slots ? mix->slots[t] : mix->slot);
    for (int64_t d = 0; d < dim; ++d) {
      float sum = 0;
      for (int j = 0; j <= mix->positions[t]; ++j) sum += cache[j * dim + d] * cosf((float)(mix->positions[t] - j));
      mix->y[t * dim + d] = sum;
    }
  }
  return 0;
}

/* step, positions[rows], cache, y[rows, dim] */
KERNEL(toy_mix) {
  UNUSED;
  for (int t = 0; t < I32(0)[0]; ++t)
    if (I32(1)[t] != I32(0)[1] + t) return refuse("positions do not follow from step");
  Mix mix = {I32(0)[0], I32(1), NULL, I32(0)[2], TENSOR(2), F32(3)};
  return __TVMBackendParallelLaunch(mix_task, &mix, 0);
}

/* step, positions[rows], slots[rows], cache, y[rows, dim] */
KERNEL(toy_mix_batch) {
  UNUSED;
  Mix mix = {I32(0)[0], I32(1), I32(2), 0, TENSOR(3), F32(4)};
  return __TVMBackendParallelLaunch(mix_task, &mix, 0);
}

/* step, x[1, dim], w[neurons, dim], stats[2], y[1, dim]: counts three quarters of the neurons as computed, a quarter as fired */
KERNEL(toy_ffn) {
  UNUSED;
  int64_t *stats = TENSOR(3)->data, neurons = TENSOR(2)->shape[0];
  stats[0] += neurons * 3 / 4;
  stats[1] += neurons / 4;
  memcpy(F32(4), F32(1), TENSOR(4)->shape[1] * sizeof(float));
  return 0;
}

/* step, x[rows, dim], y[1, dim] */
KERNEL(toy_last) {
  UNUSED;
  int64_t dim = TENSOR(1)->shape[1];
  memcpy(F32(2), F32(1) + (I32(0)[0] - 1) * dim, dim * sizeof(float));
  return 0;
}

/* step, x[rows, dim], w[vocab, dim], script[context], y[rows, vocab]: y = x w^T, and 100 more for the token that the
 * script wants at the position of the last of the step's tokens (that of each row, if there are as many rows; a batch,
 * whose step says nothing of positions, is no place for a script) */
KERNEL(toy_head) {
  UNUSED;
  int64_t dim = TENSOR(1)->shape[1], vocab = TENSOR(2)->shape[0], rows = TENSOR(4)->shape[0];
  int tokens = I32(0)[0];
  for (int t = 0; t < (rows == 1 ? 1 : tokens); ++t) {
    float *y = F32(4) + t * vocab;
    for (int64_t v = 0; v < vocab; ++v) {
      y[v] = 0;
      for (int64_t d = 0; d < dim; ++d) y[v] += F32(1)[t * dim + d] * F32(2)[v * dim + d];
    }
    int wanted = I32(3)[I32(0)[1] + (rows == 1 ? tokens - 1 : t)];
    if (wanted >= 0) y[wanted] += 100;
  }
  return 0;
}

/* ---- for two devices: a flag is int32[16], see native/host.c; step[3] is the number of the step ---- */

extern void pi_signal(int32_t *flag, int32_t step, const void *written, const void *also_written);
extern void pi_wait(const int32_t *flag, int32_t *abandoned, int32_t step, const void *awaited);

/* step, flag, … */
KERNEL(toy_signal) {
  UNUSED;
  pi_signal(I32(1), I32(0)[3], NULL, NULL);
  return 0;
}

/* step, flag, abandoned, … */
KERNEL(toy_wait) {
  UNUSED;
  pi_wait(I32(1), I32(2), I32(0)[3], NULL);
  return 0;
}

KERNEL(fail) {
  UNUSED;
  (void)args;
  return refuse("this kernel\n  always fails");
}

/* ---- for the tests of the thread pool ---- */

/* out[i] = number of threads that i's task saw; every element exactly once: out[i] += 1000 */
static int fill_task(int task, PiEnv *env, void *data) {
  PiTensor *out = data;
  int32_t *values = out->data;
  for (int64_t i = task; i < out->shape[0]; i += env->num_task) values[i] += 1000 + env->num_task;
  return 0;
}

/* out int32[n] */
KERNEL(pool_fill) {
  UNUSED;
  return __TVMBackendParallelLaunch(fill_task, TENSOR(0), 0);
}

/* limit int32[1], out int32[n]: as pool_fill, with at most limit[0] tasks */
KERNEL(pool_fill_limited) {
  UNUSED;
  return __TVMBackendParallelLaunch(fill_task, TENSOR(1), I32(0)[0]);
}

static int sum_task(int task, PiEnv *env, void *data) {
  const PiAny *args = data;
  int64_t n = TENSOR(0)->shape[0], total = 0;
  for (int64_t i = task; i < n; i += env->num_task) total += I32(0)[i];
  ((int64_t *)TENSOR(1)->data)[task * 8] = total;
  return 0;
}

/* x int32[n], partial int64[256, 8], y int32[n]: y[i] = x[i] + sum of x, so that each region needs the one before it */
KERNEL(pool_sum) {
  UNUSED;
  int64_t *partial = TENSOR(1)->data, total = 0, n = TENSOR(0)->shape[0];
  memset(partial, 0, 256 * 8 * sizeof *partial);
  if (__TVMBackendParallelLaunch(sum_task, (void *)args, 0) != 0) return -1;
  for (int i = 0; i < 256; ++i) total += partial[i * 8];
  for (int64_t i = 0; i < n; ++i) I32(2)[i] = (int32_t)((I32(0)[i] + total) % 1000003);
  return 0;
}

typedef struct {
  pthread_t caller;
  _Atomic int naps;
} Nap;

static int nap_task(int task, PiEnv *env, void *data) {
  (void)task, (void)env;
  Nap *nap = data;
  if (pthread_equal(pthread_self(), nap->caller)) {
    while (nap->naps == 0) sched_yield();
  } else if (atomic_exchange(&nap->naps, 1) == 0) {
    nanosleep(&(struct timespec){0, 300000000}, NULL);
  }
  return 0;
}

/* A worker sleeps for 0.3 s over its first task; the caller waits for that to begin, and so does not take all. */
KERNEL(pool_nap) {
  UNUSED;
  (void)args;
  Nap nap = {pthread_self(), 0};
  return __TVMBackendParallelLaunch(nap_task, &nap, 0);
}

static int fail_last_task(int task, PiEnv *env, void *data) {
  (void)data;
  return task == env->num_task - 1 ? refuse("the last task failed") : 0;
}

KERNEL(pool_fail) {
  UNUSED;
  (void)args;
  return __TVMBackendParallelLaunch(fail_last_task, NULL, 0);
}
