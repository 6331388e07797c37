/* What of TVM's and DLPack's ABI is used here (c_api.h, c_backend_api.h, dlpack.h), and what a program is made of. */
#ifndef PICOMPILE_ABI_H
#define PICOMPILE_ABI_H

#include <stdint.h>

#define PI_EXPORT __attribute__((visibility("default")))

/* TVMFFIAny. Of numbers, `value` holds the bits. */
typedef struct {
  int32_t type_index;
  uint32_t padding;
  void *value;
} PiAny;

/* DLTensor. */
typedef struct {
  void *data;
  int32_t device_type, device_id, ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t byte_offset;
} PiTensor;

/* TVMParallelGroupEnv. */
typedef struct {
  void *sync_handle;
  int32_t num_task;
} PiEnv;

typedef int (*PiLambda)(int task, PiEnv *env, void *data);
typedef int (*PiKernel)(void *self, const PiAny *args, int32_t num_args, PiAny *result);

/* Runs `lambda` for each of `num_task` tasks, or as many as suit the pool for 0; kernels reach it through this pointer.
 */
extern int (*__TVMBackendParallelLaunch)(PiLambda lambda, void *data, int num_task);

#define PI_WAITS 1 /* a flag of a call: it waits for the other device */

/* One call of a program. */
typedef struct {
  PiKernel kernel;
  const PiAny *args;
  int32_t num_args, flags;
} PiCall;

#endif
