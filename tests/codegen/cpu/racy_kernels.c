/* Kernels with parallel regions of ten tasks' worth of work: one that is right, and one for each way to be wrong. */
#include "../../../codegen/picompile_codegen/build/native/abi.h"

#define SIZE 10

typedef struct {
  int32_t *x, *y, *sum;
} Closure;

/* `body` runs for each i of a task, with c->x int32[SIZE + 1] and c->y int32[SIZE]; c->sum is on the kernel's stack. */
#define KERNEL(name, body)                                                                                     \
  static int name##_task(int task, PiEnv *env, void *data) {                                                   \
    volatile Closure *c = data;                                                                                \
    for (int i = 0; i < SIZE; ++i)                                                                             \
      if (i % env->num_task == task) {                                                                         \
        body;                                                                                                  \
      }                                                                                                        \
    return 0;                                                                                                  \
  }                                                                                                            \
  PI_EXPORT int __tvm_ffi_##name(void *self, const PiAny *args, int n, PiAny *out) {                           \
    (void)self, (void)n, (void)out;                                                                            \
    int32_t sum = 0;                                                                                           \
    Closure closure = {((PiTensor *)args[0].value)->data, ((PiTensor *)args[1].value)->data, &sum};            \
    return __TVMBackendParallelLaunch(name##_task, &closure, 0);                                               \
  }

KERNEL(right, c->y[i] = c->y[i] + c->x[i])
KERNEL(writes_the_next, c->y[i] = c->y[(i + 1) % SIZE] = c->x[i])
KERNEL(writes_the_same_as_all, (c->y[i] = c->x[i], c->x[SIZE] = 0))
KERNEL(reads_the_last, c->y[i] = c->x[i] + (i ? c->y[i - 1] : 0))
KERNEL(adds_up_on_the_stack, *c->sum += c->x[i])
/* Only under poison does it write elsewhere. */
KERNEL(writes_where_the_next_says, (c->y[i] = c->x[i], c->y[(i + 1) % SIZE] < 110 ? 0 : (c->x[i] = 7)))
/* Task 3 writes to y[4] what it has always had. */
KERNEL(writes_the_same_as_the_next, (c->y[i] = c->x[i], i == 3 ? c->y[4] = c->x[4] : 0))
