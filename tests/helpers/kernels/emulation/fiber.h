/* Stacks and the switch between them. */

#pragma once

#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>

#if defined(__x86_64__) && !defined(EMULATION_UCONTEXT)

struct Context { void *stack_pointer; };

/* Keeps what a call must keep by the System V ABI on the old stack, and takes it from the new one. */
extern "C" void emulated_switch(void **from, void *to);
asm(".pushsection .text\n"
    ".hidden emulated_switch\n"
    ".type emulated_switch, @function\n"
    "emulated_switch:\n"
    "  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15\n"
    "  movq %rsp, (%rdi)\n"
    "  movq %rsi, %rsp\n"
    "  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp\n"
    "  ret\n"
    ".size emulated_switch, . - emulated_switch\n"
    ".popsection\n");

static inline void switch_context(Context *from, const Context *to) {
    emulated_switch(&from->stack_pointer, to->stack_pointer);
}

/* Six registers, the address to return to, and the return address that `entry` must not use. */
static inline void make_context(Context *context, char *stack, size_t stack_bytes, void (*entry)(void)) {
    void **top = (void **)(stack + stack_bytes) - 8;
    for (int i = 0; i < 8; i++) top[i] = nullptr;
    top[6] = (void *)entry;
    context->stack_pointer = top;
}

#else

#include <ucontext.h>

struct Context { ucontext_t registers; };

static inline void switch_context(Context *from, const Context *to) { swapcontext(&from->registers, &to->registers); }

static inline void make_context(Context *context, char *stack, size_t stack_bytes, void (*entry)(void)) {
    getcontext(&context->registers);
    context->registers.uc_stack.ss_sp = stack;
    context->registers.uc_stack.ss_size = stack_bytes;
    context->registers.uc_link = nullptr;
    makecontext(&context->registers, entry, 0);
}

#endif

enum : size_t { STACK_BYTES = 64 << 10, GUARD_BYTES = 64 << 10 };

/* Stacks of `count` threads, with memory between them that faults. They are kept for the next launch. */
struct Stacks {
    char *start;
    unsigned count;
};

static inline char *stack_of(const Stacks *stacks, unsigned thread) {
    return stacks->start + thread * (STACK_BYTES + GUARD_BYTES) + GUARD_BYTES;
}

static inline bool is_on_stack(const Stacks *stacks, const void *address) {
    char *end = stacks->start + stacks->count * (STACK_BYTES + GUARD_BYTES);
    return (char *)address >= stacks->start && (char *)address < end;
}

static void release_stacks(Stacks *stacks) {
    if (stacks->count) munmap(stacks->start, stacks->count * (STACK_BYTES + GUARD_BYTES));
    *stacks = {};
}

static bool reserve_stacks(Stacks *stacks, unsigned count) {
    if (count <= stacks->count) return true;
    release_stacks(stacks);
    size_t bytes = count * (STACK_BYTES + GUARD_BYTES);
    void *start = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return false;
    *stacks = {(char *)start, count};
    for (unsigned thread = 0; thread < count; thread++)
        if (mprotect(stack_of(stacks, thread), STACK_BYTES, PROT_READ | PROT_WRITE)) return false;
    return true;
}
