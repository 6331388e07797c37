/* A kernel that takes its time: it sleeps for a random time, at most state[1] microseconds, and every other time not at
 * all. state uint32 [2]; state[0] is the state of the generator. See hybrid.py. */
#define _GNU_SOURCE
#include <time.h>

#include "../../codegen/picompile_codegen/build/native/abi.h"

PI_EXPORT int nap(void *self, const PiAny *args, int32_t count, PiAny *result) {
  (void)self, (void)count, (void)result;
  uint32_t *state = ((PiTensor *)args[0].value)->data;
  state[0] = state[0] * 1664525u + 1013904223u; /* Numerical Recipes' generator; its upper bits are random enough */
  uint32_t drawn = state[0] >> 8;
  if (drawn & 1) return 0;
  struct timespec time = {0, 1000L * (long)((drawn >> 1) % (state[1] + 1))};
  nanosleep(&time, NULL);
  return 0;
}
