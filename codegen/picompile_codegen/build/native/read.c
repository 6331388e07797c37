/* Reads memory and does nothing else with it: the speed that `bench` holds kernels to.
 *
 * A kernel like the compiled ones, under `__tvm_ffi_pi_read`, so that it runs on the same threads in the same way.
 */
#include "abi.h"

typedef int64_t PiVector __attribute__((vector_size(16))); /* what all these machines have; memory is slower yet */

typedef struct {
  const PiVector *data;
  int64_t vectors;
  int64_t *sums;
} PiRead;

/* Adds up the vectors of one task: a stretch of its own, whose halves are read side by side. While one half waits for a
 * page's address the other reads on, which makes 8 % where pages have 4 KiB. The last few vectors are left out. */
static int read_task(int task, PiEnv *env, void *data) {
  const PiRead *read = data;
  int64_t share = read->vectors / env->num_task, half = share / 8 * 4;
  const PiVector *x = read->data + share * task, *y = x + half;
  PiVector x0 = {0}, x1 = {0}, x2 = {0}, x3 = {0}, y0 = {0}, y1 = {0}, y2 = {0}, y3 = {0};
  for (int64_t i = 0; i < half; i += 4) {
    x0 += x[i], x1 += x[i + 1], x2 += x[i + 2], x3 += x[i + 3];
    y0 += y[i], y1 += y[i + 1], y2 += y[i + 2], y3 += y[i + 3];
  }
  PiVector sum = x0 + x1 + x2 + x3 + y0 + y1 + y2 + y3;
  read->sums[task] = sum[0] + sum[1];
  return 0;
}

/* data int64 [n], sums int64 [256]: the sum of each task. There are 256 at most. Nobody needs the sums, but
 * without them nothing would be read. */
PI_EXPORT int __tvm_ffi_pi_read(void *self, const PiAny *args, int32_t count, PiAny *result) {
  (void)self, (void)count, (void)result;
  const PiTensor *data = args[0].value, *sums = args[1].value;
  PiRead read = {data->data, data->shape[0] / 2, sums->data};
  return __TVMBackendParallelLaunch(read_task, &read, 256);
}
