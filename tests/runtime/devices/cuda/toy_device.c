/* A few kernels for the stand-in driver; see tests/helpers/fake_cuda/modules.cpp. `elements` are those of all blocks. */

#include <sched.h>
#include <stddef.h>
#include <string.h>
#include <time.h>

static const struct { const char *symbol; int params; } kernels[] = {
    {"axpy", 3}, {"add_one", 1}, {"await", 2}, {"signal", 1}, {"fail", 0}, {"overrun", 1},
};

int pi_params(const char *symbol) {
    for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++)
        if (!strcmp(kernels[i].symbol, symbol)) return kernels[i].params;
    return -1;
}

/* Waits for the host, though not forever. */
static const char *await(volatile const int *flag, volatile int *seen) {
    time_t start = time(NULL);
    while (!*flag) {
        if (time(NULL) - start > 20) return "await: nobody set the flag";
        sched_yield();
    }
    *seen = *flag;
    return NULL;
}

const char *pi_emulate(const char *symbol, const unsigned grid[3], const unsigned block[3], void **params, int order) {
    size_t elements = (size_t)grid[0] * grid[1] * grid[2] * block[0] * block[1] * block[2];
    (void)order;
    if (!strcmp(symbol, "axpy")) { /* y += a · x */
        const float *a = *(float **)params[0], *x = *(float **)params[1];
        float *y = *(float **)params[2];
        for (size_t i = 0; i < elements; i++) y[i] += *a * x[i];
    } else if (!strcmp(symbol, "add_one")) {
        int *x = *(int **)params[0];
        for (size_t i = 0; i < elements; i++) x[i]++;
    } else if (!strcmp(symbol, "await")) {
        return await(*(int **)params[0], *(int **)params[1]);
    } else if (!strcmp(symbol, "signal")) {
        *(volatile int *)*(int **)params[0] = 1;
    } else if (!strcmp(symbol, "overrun")) { /* one byte behind `elements` */
        (*(char **)params[0])[elements] = 1;
    } else {
        return "fail: on purpose";
    }
    return NULL;
}
