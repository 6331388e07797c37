/* Where threads wait for each other: barriers of a block, and collective operations of a warp. */

#pragma once

#include "copies.h"
#include "matrix.h"

static bool meets(const Thread *thread, const Meeting *meeting) {
    const Meeting *other = &thread->meeting;
    return thread->state == WAITING && other->operation == meeting->operation && other->mask == meeting->mask &&
           other->width == meeting->width && other->line == meeting->line;
}

static void describe_meeting(const Meeting *meeting, char *text, size_t room) {
    int length = snprintf(text, room, "%s in line %d", operation_names[meeting->operation], meeting->line);
    if (meeting->mask) snprintf(text + length, room - length, " with mask 0x%08x", meeting->mask);
}

static void release(Thread *thread, uint64_t result) {
    thread->result = result;
    thread->state = READY;
    launch.ready++;
}

static void begin_to_wait(const Meeting *meeting) {
    Thread *thread = running();
    thread->meeting = *meeting;
    thread->state = WAITING;
    launch.ready--;
}

/* If all threads of the block are at the barrier, they go on. */
static void complete_barrier(const Meeting *meeting) {
    unsigned count = 0;
    for (unsigned i = 0; i < launch.count; i++) {
        if (!meets(&threads[i], meeting)) return;
        count += threads[i].meeting.value != 0;
    }
    unsigned result = 0;
    if (meeting->operation == SYNCTHREADS_OR) result = count > 0;
    if (meeting->operation == SYNCTHREADS_AND) result = count == launch.count;
    if (meeting->operation == SYNCTHREADS_COUNT) result = count;
    order_block();
    for (unsigned i = 0; i < launch.count; i++) release(&threads[i], result);
}

/* The lane whose value `lane` gets, by the table of "Warp Shuffle Functions" in the CUDA C++ Programming Guide. */
static unsigned source_lane(const Meeting *meeting, unsigned lane) {
    unsigned width = (unsigned)meeting->width, begin = lane & ~(width - 1), end = begin + width;
    uint64_t source = lane;
    if (meeting->operation == SHFL) source = begin | (meeting->operand & (width - 1));
    if (meeting->operation == SHFL_UP && meeting->operand <= lane - begin) source = lane - meeting->operand;
    if (meeting->operation == SHFL_DOWN) source = (uint64_t)lane + meeting->operand;
    if (meeting->operation == SHFL_XOR) source = lane ^ meeting->operand;
    return source < end ? (unsigned)source : lane;
}

static bool shuffle(Thread *warp, unsigned mask) {
    for (unsigned lane = 0; lane < 32; lane++) {
        if (!(mask >> lane & 1)) continue;
        const Meeting *meeting = &warp[lane].meeting;
        unsigned source = source_lane(meeting, lane);
        if (!(mask >> source & 1)) {
            note_failure(&warp[lane], "reads lane %u in %s in line %d, which mask 0x%08x does not name", source,
                         operation_names[meeting->operation], meeting->line, mask);
            return false;
        }
        warp[lane].result = warp[source].meeting.value;
    }
    return true;
}

static uint32_t combined(int operation, uint32_t a, uint32_t b) {
    switch (operation) {
    case REDUCE_ADD: return a + b;
    case REDUCE_MIN: return a < b ? a : b;
    case REDUCE_MAX: return a > b ? a : b;
    case REDUCE_MIN_SIGNED: return (int32_t)a < (int32_t)b ? a : b;
    case REDUCE_MAX_SIGNED: return (int32_t)a > (int32_t)b ? a : b;
    case REDUCE_AND: return a & b;
    case REDUCE_XOR: return a ^ b;
    default: return a | b;
    }
}

/* Votes and reductions: the same for all lanes of `mask`. */
static uint32_t common_result(const Thread *warp, int operation, unsigned mask) {
    uint32_t voters = 0, reduced = 0;
    bool first = true;
    for (unsigned lane = 0; lane < 32; lane++) {
        if (!(mask >> lane & 1)) continue;
        uint32_t value = (uint32_t)warp[lane].meeting.value;
        voters |= (uint32_t)(value != 0) << lane;
        reduced = first ? value : combined(operation, reduced, value);
        first = false;
    }
    if (operation == ANY) return voters != 0;
    if (operation == ALL) return voters == mask;
    return operation == BALLOT ? voters : reduced;
}

static void complete_collective(Thread *warp, const Meeting *meeting) {
    unsigned mask = meeting->mask;
    for (unsigned lane = 0; lane < 32; lane++)
        if (mask >> lane & 1 && !meets(&warp[lane], meeting)) return;
    bool is_shuffle = meeting->operation >= SHFL && meeting->operation <= SHFL_XOR;
    if (is_shuffle && !shuffle(warp, mask)) return;
    if (meeting->operation == SYNCWARP) order_warp((unsigned)(warp - threads), mask);
    if (meeting->operation >= MMA_K8) complete_matrix(warp, meeting->operation);
    uint32_t result = is_shuffle ? 0 : common_result(warp, meeting->operation, mask);
    for (unsigned lane = 0; lane < 32; lane++)
        if (mask >> lane & 1) release(&warp[lane], is_shuffle ? warp[lane].result : result);
}

/* What is wrong with a call whatever other threads do; an empty text if nothing is. */
static const char *fault_of_call(const Meeting *meeting, unsigned thread) {
    unsigned begin = thread & ~31u, present = launch.count - begin;
    if (!(meeting->mask >> thread % 32 & 1)) return "is not in its own mask";
    if (present < 32 && meeting->mask >> present) return "names lanes that the block does not have";
    unsigned width = (unsigned)meeting->width;
    if (width == 0 || width > 32 || width & (width - 1)) return "gives a width that is no power of two up to 32";
    return "";
}

extern "C" unsigned emulated_barrier(int operation, unsigned value, int line) {
    Meeting meeting = {operation, 0, line, 0, 0, value};
    begin_to_wait(&meeting);
    complete_barrier(&meeting);
    back_to_scheduler();
    return (unsigned)running()->result;
}

extern "C" uint64_t emulated_collective(int operation, unsigned mask, uint64_t value, unsigned operand, int width,
                                        int line) {
    Meeting meeting = {operation, width, line, mask, operand, value};
    const char *fault = fault_of_call(&meeting, launch.last);
    if (*fault) {
        char place[96];
        describe_meeting(&meeting, place, sizeof place);
        note_failure(running(), "%s: %s", fault, place);
        abandon();
    }
    begin_to_wait(&meeting);
    complete_collective(&threads[launch.last & ~31u], &meeting);
    back_to_scheduler();
    return running()->result;
}

extern "C" void emulated_sleep() {
    running()->state = SLEEPING;
    launch.ready--;
    back_to_scheduler();
}

/* Of a thread that waits: one that it waits for, and that is not there. */
static const Thread *missing_for(unsigned waiting) {
    const Meeting *meeting = &threads[waiting].meeting;
    bool is_barrier = meeting->operation <= SYNCTHREADS_COUNT;
    unsigned begin = is_barrier ? 0 : waiting & ~31u, end = is_barrier ? launch.count : begin + 32;
    for (unsigned i = begin; i < end; i++)
        if ((is_barrier || meeting->mask >> (i - begin) & 1) && !meets(&threads[i], meeting)) return &threads[i];
    return nullptr;
}

/* No thread can run, and some have not ended. */
static void note_deadlock() {
    unsigned waiting = 0;
    while (threads[waiting].state != WAITING) waiting++;
    const Thread *thread = &threads[waiting], *missing = missing_for(waiting);
    char here[96], there[96];
    describe_meeting(&thread->meeting, here, sizeof here);
    describe_meeting(&missing->meeting, there, sizeof there);
    if (missing->state == ENDED)
        note_failure(thread, "waits at %s for thread " INDEX ", which has ended", here, INDEX_OF(missing->index));
    else
        note_failure(thread, "waits at %s for thread " INDEX ", which waits at %s", here, INDEX_OF(missing->index),
                     there);
}
