/* Stands in for the pool of host.c and looks for races in the parallel regions of kernels.
 *
 * `__TVMBackendParallelLaunch` of a library is made to point to one of two functions here. `checker_ordered` runs the
 * tasks of a region one after the other, in an order of its own. `checker_check` does so too, each from the memory that
 * the region found, and proves for the bytes that it was told of and for the stack of the kernel:
 *
 *   1. No two tasks write the same byte.
 *   2. No task reads what another writes: it is run again with the others' bytes poisoned, and must write the same.
 *   3. No task writes another's bytes even with what they hold already: the poison must still be there.
 *
 * A region that passes gives the same bytes in any order of its tasks, and no two threads touch one byte that either
 * writes. What stays unseen is a byte that all of its writers leave as the region found it. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../../codegen/picompile_codegen/build/native/abi.h"

typedef struct {
  uint8_t *start;
  size_t size;
} Span;

#define MAX_SPANS 64
#define MAX_TASKS 1024
#define NOBODY (-1)
#define STACK_BYTES 8192 /* the frame of the kernel, and some of those above it */

static Span spans[MAX_SPANS + 1]; /* the last one in use is the stack's */
static int span_count, task_count;
static unsigned seed;
static char problem[256];
static int regions, most_writers;

/* The region that is checked; all have as many bytes as the spans together. */
static uint8_t *before, *after, *poisoned;
static int16_t *owner;
static struct {
  size_t first, end, count;
} written[MAX_TASKS];
static size_t repeated; /* of the bytes of the task that runs again, those that it has written as before */

static void report(int task, const char *what, int other, size_t at) {
  if (problem[0]) return;
  int i = 0;
  for (; at >= spans[i].size; ++i) at -= spans[i].size;
  char who[32] = "";
  if (other != NOBODY) snprintf(who, sizeof who, " %d", other);
  if (i == span_count) snprintf(problem, sizeof problem, "task %d %s%s: the stack", task, what, who);
  else snprintf(problem, sizeof problem, "task %d %s%s: span %d, byte %zu", task, what, who, i, at);
}

static void copy(uint8_t *to_image, const uint8_t *from_image) {
  size_t at = 0;
  for (int i = 0; i <= span_count; at += spans[i].size, ++i) {
    if (to_image) memcpy(to_image + at, spans[i].start, spans[i].size);
    else memcpy(spans[i].start, from_image + at, spans[i].size);
  }
}

static void set_byte(size_t at, uint8_t value) {
  int i = 0;
  for (; at >= spans[i].size; ++i) at -= spans[i].size;
  spans[i].start[at] = value;
}

/* Calls visit(byte's number, its place, task) for each byte that differs from `image`. */
static void each_change(const uint8_t *image, int task, void (*visit)(size_t, uint8_t *, int)) {
  size_t base = 0;
  for (int i = 0; i <= span_count; base += spans[i].size, ++i)
    for (size_t start = 0; start < spans[i].size; start += 256) {
      size_t size = spans[i].size - start < 256 ? spans[i].size - start : 256;
      uint8_t *memory = spans[i].start + start;
      if (memcmp(memory, image + base + start, size) == 0) continue;
      for (size_t k = 0; k < size; ++k)
        if (memory[k] != image[base + start + k]) visit(base + start + k, memory + k, task);
    }
}

static void take_write(size_t at, uint8_t *place, int task) {
  if (owner[at] != NOBODY) report(task, "writes a byte of task", owner[at], at);
  owner[at] = (int16_t)task;
  after[at] = *place;
  if (written[task].count++ == 0) written[task].first = at;
  written[task].end = at + 1;
  *place = before[at];
}

static void check_write(size_t at, uint8_t *place, int task) {
  if (owner[at] == task && *place == after[at]) ++repeated;
  else if (owner[at] == task) report(task, "reads what other tasks write", NOBODY, at);
  else if (owner[at] != NOBODY) report(task, "writes a byte of task", owner[at], at);
  else report(task, "writes elsewhere, so it reads what other tasks write", NOBODY, at);
  *place = poisoned[at];
}

/* What differs both from what the region found and from what it leaves. */
static uint8_t poison(size_t at) {
  uint8_t value = (uint8_t)~before[at];
  return value == after[at] ? value ^ 1 : value;
}

static size_t total_bytes(void) {
  size_t total = 0;
  for (int i = 0; i <= span_count; ++i) total += spans[i].size;
  return total;
}

static int run_task(PiLambda lambda, int task, void *data) {
  PiEnv env = {NULL, task_count};
  return lambda(task, &env, data);
}

/* Each task from the memory that the region found: who writes what. */
static int find_writes(PiLambda lambda, void *data) {
  int writers = 0;
  memset(written, 0, sizeof written);
  for (int task = 0; task < task_count; ++task) {
    if (run_task(lambda, task, data) != 0) return -1;
    each_change(before, task, take_write);
    writers += written[task].count > 0;
  }
  if (writers > most_writers) most_writers = writers;
  return 0;
}

static void fill_own(int task, int is_poison) {
  for (size_t at = written[task].first; at < written[task].end; ++at)
    if (owner[at] == task) set_byte(at, poisoned[at] = is_poison ? poison(at) : before[at]);
}

/* Each task with the bytes of all others poisoned. */
static int check_reads(PiLambda lambda, void *data, size_t total) {
  for (size_t at = 0; at < total; ++at) poisoned[at] = owner[at] == NOBODY ? before[at] : poison(at);
  copy(NULL, poisoned);
  for (int task = 0; task < task_count && !problem[0]; ++task) {
    fill_own(task, 0);
    if (run_task(lambda, task, data) != 0) return -1;
    repeated = 0;
    each_change(poisoned, task, check_write);
    if (repeated != written[task].count) report(task, "reads what other tasks write", NOBODY, written[task].first);
    fill_own(task, 1);
  }
  return 0;
}

static __attribute__((noinline)) int check_region(PiLambda lambda, void *data) {
  size_t total = total_bytes();
  before = malloc(total), after = malloc(total), poisoned = malloc(total), owner = malloc(total * sizeof *owner);
  copy(before, NULL);
  memcpy(after, before, total);
  for (size_t at = 0; at < total; ++at) owner[at] = NOBODY;
  int failed = find_writes(lambda, data);
  if (failed == 0 && !problem[0]) failed = check_reads(lambda, data, total);
  copy(NULL, after);
  free(before), free(after), free(poisoned), free(owner);
  ++regions;
  return failed;
}

/* What lies above `frame` is its callers', and tasks may know of it. */
static Span stack_above(uint8_t *frame) {
  pthread_attr_t attributes;
  void *base = frame;
  size_t size = 0;
  if (pthread_getattr_np(pthread_self(), &attributes) == 0) {
    pthread_attr_getstack(&attributes, &base, &size);
    pthread_attr_destroy(&attributes);
  }
  uint8_t *start = frame + 2 * sizeof(void *), *end = (uint8_t *)base + size;
  size_t left = end > start ? (size_t)(end - start) : 0;
  return (Span){start, left < STACK_BYTES ? left : STACK_BYTES};
}

static int checked_region(PiLambda lambda, void *data, int num_task) {
  (void)num_task;
  spans[span_count] = stack_above(__builtin_frame_address(0));
  return check_region(lambda, data);
}

static int ordered_region(PiLambda lambda, void *data, int num_task) {
  (void)num_task;
  int order[MAX_TASKS], failed = 0;
  for (int i = 0; i < task_count; ++i) order[i] = task_count - 1 - i;
  for (int i = task_count - 1; seed != 0 && i > 0; --i) {
    int other = rand_r(&seed) % (i + 1), value = order[i];
    order[i] = order[other], order[other] = value;
  }
  for (int i = 0; i < task_count; ++i) failed |= run_task(lambda, order[i], data);
  ++regions;
  return failed;
}

/* Regions shall have `tasks` tasks, in reversed order, or, with a seed that is not zero, in a random one. */
PI_EXPORT void *checker_ordered(int tasks, unsigned order_seed) {
  task_count = tasks < MAX_TASKS ? tasks : MAX_TASKS;
  seed = order_seed;
  return (void *)ordered_region;
}

/* Regions shall have `tasks` tasks and be checked for the bytes of `count` spans, which must not overlap. */
PI_EXPORT void *checker_check(int tasks, const Span *watched, int count) {
  task_count = tasks < MAX_TASKS ? tasks : MAX_TASKS;
  span_count = count < MAX_SPANS ? count : MAX_SPANS;
  memcpy(spans, watched, (size_t)span_count * sizeof *spans);
  problem[0] = '\0';
  return (void *)checked_region;
}

/* The first race that was seen, or an empty text. */
PI_EXPORT const char *checker_problem(void) { return problem; }

/* How many regions ran, and how many tasks of one wrote something at most, since the last call. */
PI_EXPORT void checker_counts(int *region_count, int *writer_count) {
  *region_count = regions, *writer_count = most_writers;
  regions = most_writers = 0;
}
