/* Copies to shared memory that arrive some time between their start and the end of the thread's wait for them. */

#pragma once

#include "races.h"

struct AsyncCopy { char *shared; const char *source; unsigned bytes; };

enum : unsigned { ASYNC_BYTES = 16, MOST_COPIES = 64 };
struct Copies { AsyncCopy under_way[MOST_COPIES]; unsigned count; };
static Copies copies[MOST_THREADS];

static void deliver(const AsyncCopy *copy, void *code) {
    check_access((void *)copy->source, copy->bytes, false, false, code);
    check_access(copy->shared, ASYNC_BYTES, true, false, code);
    memcpy(copy->shared, copy->source, copy->bytes);
    memset(copy->shared + copy->bytes, 0, ASYNC_BYTES - copy->bytes);
}

static void check_copy(const AsyncCopy *copy, void *code) {
    const char *fault = nullptr;
    if ((uintptr_t)copy->shared % ASYNC_BYTES || (uintptr_t)copy->source % ASYNC_BYTES) fault = "is not aligned";
    if (copy->bytes > ASYNC_BYTES) fault = "has more than 16 bytes";
    if (!is_shared(copy->shared)) fault = "is not to shared memory";
    if (copies[launch.last].count == MOST_COPIES) fault = "is one more than can be watched";
    if (!fault) return;
    note_fault(code, "starts a copy that %s", fault);
    abandon();
}

/* A copy that arrives late has destroyed what was there before as soon as it starts. */
extern "C" void emulated_copy_async(void *shared, const void *source, unsigned bytes) {
    void *code = __builtin_return_address(0);
    AsyncCopy copy = {(char *)shared, (const char *)source, bytes};
    check_copy(&copy, code);
    Copies *own = &copies[launch.last];
    own->under_way[own->count++] = copy;
    check_access(shared, ASYNC_BYTES, true, false, code);
    if (launch.order % 2) deliver(&copy, code);
    else memset(shared, 0xff, ASYNC_BYTES);
}

extern "C" void emulated_copies_arrive() {
    Copies *own = &copies[launch.last];
    if (launch.order % 2 == 0)
        for (unsigned i = 0; i < own->count; i++) deliver(&own->under_way[i], __builtin_return_address(0));
    own->count = 0;
}
