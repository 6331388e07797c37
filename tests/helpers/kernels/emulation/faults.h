/* Faults of a running thread: what g++'s checks find, and signals. Both end the launch, and not the process. */

#pragma once

#include "scheduler.h"

#include <pthread.h>
#include <signal.h>
#include <ucontext.h>

/* As GCC hands them to its runtime library (libsanitizer/ubsan/ubsan_handlers.h), which is not linked. */
struct SourceLocation { const char *file; uint32_t line, column; };
struct TypeDescriptor { uint16_t kind, info; char name[]; };
struct TypeMismatch {
    SourceLocation where;
    const TypeDescriptor *type;
    unsigned char log_alignment, access;
};
struct OutOfBounds { SourceLocation where; const TypeDescriptor *array, *index; };
struct ShiftOutOfBounds { SourceLocation where; const TypeDescriptor *left, *right; };

extern "C" {

[[noreturn]] void __ubsan_handle_type_mismatch_v1_abort(TypeMismatch *data, uintptr_t address) {
    note_fault(__builtin_return_address(0), "uses address %#lx as %s, which is not aligned to %u bytes",
               (unsigned long)address, data->type->name, 1u << data->log_alignment);
    abandon();
}

[[noreturn]] void __ubsan_handle_out_of_bounds_abort(OutOfBounds *data, uintptr_t index) {
    note_fault(__builtin_return_address(0), "uses index %ld of an array %s", (long)index, data->array->name);
    abandon();
}

[[noreturn]] void __ubsan_handle_shift_out_of_bounds_abort(ShiftOutOfBounds *data, uintptr_t, uintptr_t distance) {
    note_fault(__builtin_return_address(0), "shifts %s by %ld", data->left->name, (long)distance);
    abandon();
}
}

enum { SIGNALS = 3 };
static const int signals[SIGNALS] = {SIGSEGV, SIGBUS, SIGFPE};

static struct sigaction outer_actions[SIGNALS];
static pthread_t launching_thread;
static char signal_stack[64 << 10];

/* Not ours: the action that was there before gets the signal when the instruction runs again. */
static void pass_on(int signal) {
    for (int i = 0; i < SIGNALS; i++)
        if (signals[i] == signal) sigaction(signal, &outer_actions[i], nullptr);
}

/* The instruction that faults. Where registers are is known for one kind of machine; elsewhere no line is found. */
static void *code_of(void *context) {
#ifdef __x86_64__
    return (void *)(((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP] + 1);
#else
    (void)context;
    return nullptr;
#endif
}

static void on_signal(int signal, siginfo_t *info, void *context) {
    if (!inside_thread || !pthread_equal(pthread_self(), launching_thread)) return pass_on(signal);
    char *address = (char *)info->si_addr, *stack = stack_of(&stacks, launch.last);
    if (signal == SIGFPE)
        note_fault(code_of(context), "divides an integer by zero");
    else if (address < stack && address >= stack - GUARD_BYTES)
        note_fault(code_of(context), "needs more than %zu bytes of stack", (size_t)STACK_BYTES);
    else
        note_fault(code_of(context), "uses address %p, where no memory is", info->si_addr);
    abandon();
}

static void catch_signals(stack_t *outer) {
    stack_t stack = {};
    stack.ss_sp = signal_stack;
    stack.ss_size = sizeof signal_stack;
    sigaltstack(&stack, outer);
    /* No signal is blocked while the handler runs, since it does not return. */
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int i = 0; i < SIGNALS; i++) sigaction(signals[i], &action, &outer_actions[i]);
    launching_thread = pthread_self();
}

static void restore_signals(const stack_t *outer) {
    for (int i = 0; i < SIGNALS; i++) sigaction(signals[i], &outer_actions[i], nullptr);
    sigaltstack(outer, nullptr);
}
