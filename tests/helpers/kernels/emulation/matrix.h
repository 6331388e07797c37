/* mma and ldmatrix: what each lane of a warp has of the matrices, as drawn in the PTX ISA ("Matrix Fragments for
   mma.m16n8k8" and "... m16n8k16", "ldmatrix"). */

#pragma once

#include "scheduler.h"

#include <math.h>

static double half_of(const unsigned *registers, unsigned index) {
    unsigned bits = registers[index / 2] >> index % 2 * 16, exponent = bits >> 10 & 31, fraction = bits & 1023;
    double magnitude = ldexp((exponent ? 1024 : 0) + (int)fraction, (exponent ? (int)exponent : 1) - 25);
    if (exponent == 31) magnitude = fraction ? NAN : INFINITY;
    return bits & 0x8000 ? -magnitude : magnitude;
}

/* "Matrix Fragments for mma.m16n8k16": element i of eight that a lane has of A [16, 16]. Those of m16n8k8 are the first
   four, of A [16, 8]. */
static void place_in_a(unsigned lane, unsigned i, unsigned *row, unsigned *column) {
    unsigned group = lane / 4, in_group = lane % 4;
    *row = i < 2 || (4 <= i && i < 6) ? group : group + 8;
    *column = in_group * 2 + (i & 1) + (i >= 4 ? 8 : 0);
}

/* Element i of four that a lane has of B [16, 8]; those of m16n8k8 are the first two, of B [8, 8]. */
static void place_in_b(unsigned lane, unsigned i, unsigned *row, unsigned *column) {
    *row = lane % 4 * 2 + (i & 1) + (i >= 2 ? 8 : 0);
    *column = lane / 4;
}

/* Element i of four that a lane has of C and D [16, 8]. */
static void place_in_d(unsigned lane, unsigned i, unsigned *row, unsigned *column) {
    *row = i < 2 ? lane / 4 : lane / 4 + 8;
    *column = lane % 4 * 2 + (i & 1);
}

static MmaOperands *operands_of(Thread *thread) { return (MmaOperands *)thread->meeting.value; }

/* The ISA leaves open in which order products are added, and how sums are rounded on the way: here once, at the end. */
static void multiply_matrices(Thread *warp, unsigned depth) {
    static double a[16][16], b[16][8], d[16][8];
    unsigned row, column;
    for (unsigned lane = 0; lane < 32; lane++) {
        const MmaOperands *own = operands_of(&warp[lane]);
        for (unsigned i = 0; i < depth / 2; i++) {
            place_in_a(lane, i, &row, &column);
            a[row][column] = half_of(own->a, i);
        }
        for (unsigned i = 0; i < depth / 4; i++) {
            place_in_b(lane, i, &row, &column);
            b[row][column] = half_of(own->b, i);
        }
    }
    for (row = 0; row < 16; row++)
        for (column = 0; column < 8; column++) {
            d[row][column] = 0;
            for (unsigned k = 0; k < depth; k++) d[row][column] += a[row][k] * b[k][column];
        }
    for (unsigned lane = 0; lane < 32; lane++)
        for (unsigned i = 0; i < 4; i++) {
            place_in_d(lane, i, &row, &column);
            float *sum = &operands_of(&warp[lane])->d[i];
            *sum = (float)(d[row][column] + (double)*sum);
        }
}

/* Lane 8 m + r has row r of matrix m; register m of a lane gets two elements of it. */
static void load_matrices(Thread *warp, bool transposed) {
    for (unsigned lane = 0; lane < 32; lane++)
        for (unsigned m = 0; m < 4; m++) {
            unsigned loaded = 0;
            for (unsigned i = 0; i < 2; i++) {
                unsigned row = lane / 4, column = lane % 4 * 2 + i;
                if (transposed) row = lane % 4 * 2 + i, column = lane / 4;
                const unsigned *words = ((MatrixRow *)warp[8 * m + row].meeting.value)->row;
                loaded |= (words[column / 2] >> column % 2 * 16 & 0xffff) << 16 * i;
            }
            ((MatrixRow *)warp[lane].meeting.value)->loaded[m] = loaded;
        }
}

static void complete_matrix(Thread *warp, int operation) {
    if (operation == MMA_K8) multiply_matrices(warp, 8);
    if (operation == MMA_K16) multiply_matrices(warp, 16);
    if (operation == LDMATRIX || operation == LDMATRIX_TRANS) load_matrices(warp, operation == LDMATRIX_TRANS);
}
