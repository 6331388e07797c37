/* Which memory a kernel may use. */

#pragma once

#include "scheduler.h"

/* The section of all __shared__ arrays; the linker names its ends if there is one. */
extern "C" char __start_emulated_shared[] __attribute__((weak, visibility("hidden")));
extern "C" char __stop_emulated_shared[] __attribute__((weak, visibility("hidden")));

/* The end of the library in memory. */
extern "C" char _end[] __attribute__((visibility("hidden")));

struct Span { const char *start; size_t bytes; };
enum { MOST_SPANS = 256 };

/* Where launches of a thread of the machine may read and write; anywhere if there are none. */
struct Spans { Span spans[MOST_SPANS]; int count; };
static thread_local Spans chosen_spans;
static const Spans *allowed;             /* those of this launch */

static inline bool is_shared(const char *address) {
    return address >= __start_emulated_shared && address < __stop_emulated_shared;
}

/* Where `address` is, for a reader of the source: so far behind the start of an argument, if one begins near. */
static void describe_address(const char *address, char *text, size_t room) {
    if (is_shared(address)) {
        snprintf(text, room, "shared memory + %td", address - __start_emulated_shared);
        return;
    }
    const ptrdiff_t far_bytes = 1 << 30;
    int nearest = -1;
    for (int i = 0; i < launch.kernel->params; i++) {
        const char *start = *(char **)launch.params[i];
        if (start > address || address - start > far_bytes) continue;
        if (nearest < 0 || start > *(char **)launch.params[nearest]) nearest = i;
    }
    if (nearest < 0) snprintf(text, room, "address %p", (const void *)address);
    else snprintf(text, room, "argument %d + %td", nearest, address - *(char **)launch.params[nearest]);
}

static bool is_within(const char *address, size_t bytes, const char *start, size_t room) {
    return address >= start && address + bytes <= start + room;
}

/* Arguments, or what the library itself holds: shared memory and constants. */
static void check_place(const char *address, size_t bytes, const char *verb, const void *code) {
    if (!allowed->count || is_within(address, bytes, __ehdr_start, _end - __ehdr_start)) return;
    for (int i = 0; i < allowed->count; i++)
        if (is_within(address, bytes, allowed->spans[i].start, allowed->spans[i].bytes)) return;
    char place[64];
    describe_address(address, place, sizeof place);
    note_fault(code, "%s %zu bytes at %s, outside of all arguments", verb, bytes, place);
    abandon();
}
