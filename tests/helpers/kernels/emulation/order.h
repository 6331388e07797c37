/* What orders two threads of a launch, by "Memory Fence Functions", "Synchronization Functions" and the warp functions
   of the CUDA C++ Programming Guide:
   - two threads of a block: a barrier of the block between the two accesses, or __syncwarp with both in its mask.
     Shuffles and votes promise nothing about memory;
   - two blocks: a fence and then an atomic write of the first one, and later an atomic operation of the second one.
     Which thread of a block did so is not looked at, nor at which address. */

#pragma once

#include "memory.h"

#include <stdlib.h>

/* A thread between two of the points where it is ordered with others. */
struct Moment { uint32_t thread, block, phase, clock; };

/* A block, and how far others may see what it did: to its last fence, and to the last one that an atomic followed. */
struct Block { uint3 index; uint32_t fenced, released; };

/* An array that grows. */
template <class T> struct Rows {
    T *rows;
    uint32_t count, room;

    bool add(T row) {
        if (count == room) {
            uint32_t larger = room * 2 + 1024;
            T *moved = (T *)realloc(rows, larger * sizeof(T));
            if (!moved) return false;
            rows = moved, room = larger;
        }
        rows[count++] = row;
        return true;
    }
};

static Rows<Moment> moments;             /* of this launch */
static Rows<Block> blocks;               /* of this launch, in the order in which they ran */
static uint32_t first_moment = 1;        /* of this launch */

/* What is known of a thread: its moment, 0 if it has done nothing in it, and the clocks of its warp's lanes. Each lane
   counts its own on at every __syncwarp; what it knows of another one's, that one did before. */
struct Knowledge { uint32_t moment, clocks[32]; };
static Knowledge knowledge[MOST_THREADS];
static uint32_t phase;                   /* barriers of the block so far */
static bool block_acquired;              /* did an atomic, and sees what earlier blocks released */

static void begin_block_accesses() {
    memset(knowledge, 0, launch.count * sizeof *knowledge);
    for (unsigned thread = 0; thread < launch.count; thread++) knowledge[thread].clocks[thread % 32] = 1;
    phase = 0;
    block_acquired = false;
    if (!blocks.add({emulated_block, 0, 0})) note_failure(&threads[0], "has no memory left on this machine");
}

static void order_block() {
    phase++;
    for (unsigned thread = 0; thread < launch.count; thread++) knowledge[thread].moment = 0;
}

/* The lanes of `mask` have met at __syncwarp: each knows all that one of them knew. */
static void order_warp(unsigned first_thread, unsigned mask) {
    Knowledge *warp = &knowledge[first_thread], joined = {};
    for (unsigned lane = 0; lane < 32; lane++)
        for (unsigned other = 0; mask >> lane & 1 && other < 32; other++)
            if (warp[lane].clocks[other] > joined.clocks[other]) joined.clocks[other] = warp[lane].clocks[other];
    for (unsigned lane = 0; lane < 32; lane++) {
        if (!(mask >> lane & 1)) continue;
        warp[lane] = joined;
        warp[lane].clocks[lane]++;
    }
}

/* The moment of the running thread; 0 if there is no memory for it. */
static uint32_t current_moment() {
    Knowledge *known = &knowledge[launch.last];
    if (known->moment) return known->moment;
    if (!moments.add({launch.last, blocks.count - 1, phase, known->clocks[launch.last % 32]})) return 0;
    return known->moment = first_moment + moments.count - 1;
}

/* Does what the running thread does now at `address` come after `access`, which is 2 * moment + (was it atomic?)? */
static bool is_after(const char *address, uint32_t access) {
    Moment then = moments.rows[(access >> 1) - first_moment];
    if (then.block != blocks.count - 1) {
        uint32_t released = blocks.rows[then.block].released;
        return is_shared(address) || (block_acquired && released && (access & 1 || access >> 1 < released));
    }
    if (then.thread == launch.last || then.phase != phase) return true;
    return then.thread / 32 == launch.last / 32 && knowledge[launch.last].clocks[then.thread % 32] >= then.clock;
}

static void note_fence() {
    blocks.rows[blocks.count - 1].fenced = current_moment() + 1;
    knowledge[launch.last].moment = 0;
}

extern "C" void emulated_fence() {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    note_fence();
}

extern "C" void emulated_fence_acq_rel() {
    __atomic_thread_fence(__ATOMIC_ACQ_REL);
    note_fence();
}
