/* Kernels with which the two devices of a toy artifact meet; see toy_two_sides.py, and toy_kernels.c for the others. */
#define _GNU_SOURCE
#include <stdint.h>
#include <string.h>
#include <time.h>

#include "../../../codegen/picompile_codegen/build/native/abi.h"

extern void pi_signal(int32_t *flag, int32_t step, const void *written, const void *also_written);
extern void pi_wait(const int32_t *flag, int32_t *abandoned, int32_t step, const void *awaited);

#define KERNEL(name) PI_EXPORT int __tvm_ffi_##name(void *self, const PiAny *args, int count, PiAny *result)
#define UNUSED (void)self, (void)count, (void)result
#define TENSOR(i) ((PiTensor *)args[i].value)
#define F32(i) ((float *)TENSOR(i)->data)
#define I32(i) ((int32_t *)TENSOR(i)->data)

/* source[words], y[words] */
KERNEL(toy_words) {
  UNUSED;
  memcpy(I32(1), I32(0), TENSOR(0)->shape[0] * sizeof(int32_t));
  return 0;
}

/* step, x[rows, dim], y[rows, dim], flag: of a y with one row, all of it */
KERNEL(toy_send) {
  UNUSED;
  int rows = TENSOR(2)->shape[0] == 1 ? 1 : I32(0)[0];
  memcpy(F32(2), F32(1), rows * TENSOR(2)->shape[1] * sizeof(float));
  pi_signal(I32(3), I32(0)[3], F32(2), F32(2));
  return 0;
}

/* step, source[rows, dim], flag, abandoned, y[rows, dim] */
KERNEL(toy_receive) {
  UNUSED;
  pi_wait(I32(2), I32(3), I32(0)[3], F32(1));
  memcpy(F32(4), F32(1), I32(0)[0] * TENSOR(4)->shape[1] * sizeof(float));
  return 0;
}

/* count[1]: sleeps for 300 ms, and counts that it has */
KERNEL(toy_doze) {
  UNUSED;
  nanosleep(&(struct timespec){0, 300000000}, NULL);
  ++I32(0)[0];
  return 0;
}
