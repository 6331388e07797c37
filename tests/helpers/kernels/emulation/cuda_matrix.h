/* Instructions for matrices, which CUDA C has no functions for: mma, ldmatrix and cp.async of the PTX ISA. */

#pragma once

#include "cuda_threads.h"
#include "cuda_vectors.h"

static inline void emulated_mma(int operation, float *d, const unsigned *a, const unsigned *b, int registers, int line) {
    emulated::MmaOperands own = {};
    for (int i = 0; i < registers; i++) own.a[i] = a[i];
    for (int i = 0; i < registers / 2; i++) own.b[i] = b[i];
    for (int i = 0; i < 4; i++) own.d[i] = d[i];
    emulated_collective(operation, 0xffffffff, (uint64_t)&own, 0, 32, line);
    for (int i = 0; i < 4; i++) d[i] = own.d[i];
}

static inline void pi_mma_m16n8k16(float *d, const unsigned *a, const unsigned *b, EMULATED_LINE) {
    emulated_mma(emulated::MMA_K16, d, a, b, 4, line);
}
static inline void pi_mma_m16n8k8(float *d, const unsigned *a, const unsigned *b, EMULATED_LINE) {
    emulated_mma(emulated::MMA_K8, d, a, b, 2, line);
}

/* Each lane reads the row whose address it has, so that races and misaligned addresses are found in that lane. */
__attribute__((always_inline)) static inline void emulated_ldmatrix(int operation, unsigned *to, const void *row,
                                                                    int line) {
    emulated::MatrixRow own;
    uint4 words = *(const uint4 *)row;
    own.row[0] = words.x, own.row[1] = words.y, own.row[2] = words.z, own.row[3] = words.w;
    emulated_collective(operation, 0xffffffff, (uint64_t)&own, 0, 32, line);
    for (int i = 0; i < 4; i++) to[i] = own.loaded[i];
}

__attribute__((always_inline)) static inline void pi_ldmatrix_x4(unsigned *to, const void *row, EMULATED_LINE) {
    emulated_ldmatrix(emulated::LDMATRIX, to, row, line);
}
__attribute__((always_inline)) static inline void pi_ldmatrix_x4_trans(unsigned *to, const void *row, EMULATED_LINE) {
    emulated_ldmatrix(emulated::LDMATRIX_TRANS, to, row, line);
}

static inline void pi_cp_async_16(void *shared, const void *source, int bytes) {
    emulated_copy_async(shared, source, (unsigned)bytes);
}
static inline void pi_cp_async_wait_all() { emulated_copies_arrive(); }
