/* Finds two threads that use the same byte, one of them to write it, with nothing that orders them.

   g++ -fsanitize=thread calls the functions at the end in front of each access to memory; its runtime library is not
   linked. Every byte remembers at which moments it was written and read last. Two atomic operations do not race; a
   volatile access counts as one. */

#pragma once

#include "order.h"

/* Who wrote and who read a byte last: 2 * moment + (is it atomic?). Below `first_moment`: in another launch. */
struct Cell { uint32_t writer, reader; };

enum : size_t { PAGE_BYTES = 4096, SLOTS = 1 << 15, MOST_PAGES = SLOTS / 4 };
struct Page { uintptr_t number; Cell cells[PAGE_BYTES]; };

static Page *pages[SLOTS];
static unsigned page_count;

static void forget_pages() {
    for (unsigned slot = 0; slot < SLOTS; slot++) {
        free(pages[slot]);
        pages[slot] = nullptr;
    }
    page_count = 0;
    first_moment = 1;
}

/* Before a launch. Moments count on, so that cells need not be cleared. */
static void forget_accesses() {
    first_moment += moments.count;
    moments.count = blocks.count = 0;
    if (page_count > MOST_PAGES / 8 || first_moment > 1u << 29) forget_pages();
}

static bool races(const char *address, uint32_t access, bool atomic) {
    if (access >> 1 < first_moment || (atomic && access & 1)) return false;
    return !is_after(address, access);
}

[[noreturn]] static void race(const char *address, const char *verb, uint32_t other, const char *other_verb,
                              void *code) {
    char place[64];
    describe_address(address, place, sizeof place);
    Moment then = moments.rows[(other >> 1) - first_moment];
    if (then.block == blocks.count - 1)
        note_fault(code, "%s %s, which thread " INDEX " has %s, and nothing orders the two", verb, place,
                   INDEX_OF(threads[then.thread].index), other_verb);
    else
        note_fault(code, "%s %s, which thread " INDEX " of block " INDEX " has %s, and nothing orders the two", verb,
                   place, INDEX_OF(threads[then.thread].index), INDEX_OF(blocks.rows[then.block].index), other_verb);
    abandon();
}

static Page *page_of(uintptr_t number) {
    unsigned slot = (unsigned)(number * 0x9e3779b97f4a7c15 >> 49);
    while (pages[slot] && pages[slot]->number != number) slot = (slot + 1) % SLOTS;
    if (pages[slot] || page_count == MOST_PAGES) return pages[slot];
    pages[slot] = (Page *)calloc(1, sizeof(Page));
    if (!pages[slot]) return nullptr;
    page_count++;
    pages[slot]->number = number;
    return pages[slot];
}

static const char *verb_of(bool writes, bool atomic) {
    return atomic ? "atomically uses" : writes ? "writes" : "reads";
}

static void check_byte(char *address, Cell *cell, uint32_t access, bool writes, void *code) {
    bool atomic = access & 1;
    const char *verb = verb_of(writes, atomic);
    if (races(address, cell->writer, atomic)) race(address, verb, cell->writer, "written", code);
    if (writes && races(address, cell->reader, atomic)) race(address, verb, cell->reader, "read", code);
    (writes ? cell->writer : cell->reader) = access;
}

static void check_access(void *start, size_t bytes, bool writes, bool atomic, void *code) {
    if (!inside_thread || is_on_stack(&stacks, start)) return;
    check_place((char *)start, bytes, verb_of(writes, atomic), code);
    uint32_t access = current_moment() * 2 + atomic;
    Page *page = nullptr;
    for (char *address = (char *)start; address < (char *)start + bytes; address++) {
        uintptr_t number = (uintptr_t)address / PAGE_BYTES;
        if (!page || page->number != number) page = page_of(number);
        if (!page || access < 2) {
            note_fault(code, "is in a launch that uses more than %zu bytes, and no more can be watched",
                       MOST_PAGES * PAGE_BYTES);
            abandon();
        }
        check_byte(address, &page->cells[(uintptr_t)address % PAGE_BYTES], access, writes, code);
    }
}

/* The checks that g++ itself puts in leave out plain reads of numbers. */
static void check_alignment(const void *address, size_t bytes, void *code) {
    if (!inside_thread || (uintptr_t)address % bytes == 0) return;
    note_fault(code, "uses address %p, which is not aligned to %zu bytes", address, bytes);
    abandon();
}

static void check_atomic(void *address, size_t bytes, bool writes, void *code) {
    if (!inside_thread) return;
    check_alignment(address, bytes, code);
    check_access(address, bytes, writes, true, code);
    Block *block = &blocks.rows[blocks.count - 1];
    if (writes) block->released = block->fenced;
    block_acquired = true;
}

static void check_number(void *address, size_t bytes, bool writes, void *code) {
    check_alignment(address, bytes, code);
    check_access(address, bytes, writes, false, code);
}

#define CODE __builtin_return_address(0)

extern "C" void emulated_atomic_access(void *address, unsigned bytes) { check_atomic(address, bytes, true, CODE); }

/* The names that GCC's tsan.c calls: with a size for what has its alignment, and else for a range. */
#define DEFINE_ACCESS(BYTES)                                                                        \
    extern "C" void __tsan_read##BYTES(void *p) { check_number(p, BYTES, false, CODE); }            \
    extern "C" void __tsan_write##BYTES(void *p) { check_number(p, BYTES, true, CODE); }            \
    extern "C" void __tsan_volatile_read##BYTES(void *p) { check_atomic(p, BYTES, false, CODE); }   \
    extern "C" void __tsan_volatile_write##BYTES(void *p) { check_atomic(p, BYTES, true, CODE); }

DEFINE_ACCESS(1)
DEFINE_ACCESS(2)
DEFINE_ACCESS(4)
DEFINE_ACCESS(8)
DEFINE_ACCESS(16)

extern "C" void __tsan_read_range(void *p, size_t bytes) { check_access(p, bytes, false, false, CODE); }
extern "C" void __tsan_write_range(void *p, size_t bytes) { check_access(p, bytes, true, false, CODE); }
extern "C" void __tsan_init() {}

#undef DEFINE_ACCESS
#undef CODE
