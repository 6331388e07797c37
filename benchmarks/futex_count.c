/* Preloaded by futex.py: counts the futex calls that libraries make through `syscall`, as host.c does. The C library's own,
 * of locks and queues, do not come by here. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdarg.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* How often a thread made calls of one kind from a library. */
typedef struct {
  long thread, is_wake, count;
  char library[64];
} Row;

#define MOST_ROWS 1024
Row futex_rows[MOST_ROWS];
int futex_row_count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void count(long thread, long is_wake, const char *library) {
  pthread_mutex_lock(&lock);
  int i = 0;
  while (i < futex_row_count && (futex_rows[i].thread != thread || futex_rows[i].is_wake != is_wake ||
                                 strncmp(futex_rows[i].library, library, sizeof futex_rows[i].library - 1) != 0))
    ++i;
  if (i < MOST_ROWS) {
    if (i == futex_row_count) {
      futex_rows[i] = (Row){thread, is_wake, 0, ""};
      strncpy(futex_rows[i].library, library, sizeof futex_rows[i].library - 1);
      ++futex_row_count;
    }
    ++futex_rows[i].count;
  }
  pthread_mutex_unlock(&lock);
}

static long (*of_system)(long, ...);
__attribute__((constructor)) static void set_up(void) { of_system = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall"); }

long syscall(long number, ...) {
  va_list rest;
  long a[6];
  va_start(rest, number);
  for (int i = 0; i < 6; ++i) a[i] = va_arg(rest, long);
  va_end(rest);
  Dl_info caller;
  if (number == SYS_futex && dladdr(__builtin_return_address(0), &caller) && caller.dli_fname)
    count(of_system(SYS_gettid), (a[1] & FUTEX_CMD_MASK) == FUTEX_WAKE, caller.dli_fname);
  return of_system(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
