/* A stand-in for libcuda.so.1: the functions that picompile/measure/cuda_driver.py calls, with memory of the host.

   It holds the caller to the rules of the driver API: initialize first, devices by number, a current context for memory
   and streams, addresses and sizes inside of what was allocated, nothing freed twice. Whatever breaks one is answered
   with CUDA_ERROR_INVALID_VALUE. Time is its own: copies take bytes / rate once their stream is waited for, and a wait
   takes WAIT_S.

   Environment, read at every call:
   FAKE_CUDA_FAIL_AT   the n-th call since fake_reset, from 0, fails with CUDA_ERROR_UNKNOWN. Functions that free do free
                       then, as the driver's do when they report an earlier error.
   FAKE_CUDA_DEVICES   how many there are; 1 if not set. cuInit fails with CUDA_ERROR_NO_DEVICE for -1.
   FAKE_CUDA_MEMORY    bytes of memory, of which a byte in 16 is in use. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, UNKNOWN = 999 };
enum { DEVICE, PINNED, STREAM, CONTEXT, PUSHED, KINDS };
#define MOST 64
#define WAIT_S 5e-6

static struct { void *address; size_t size; int kind; } owned[MOST];
static int calls, ready;
static double now_s, queued_s;

static long setting(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text ? atol(text) : otherwise;
}

static int refused(int needs_context) {
    if (calls++ == setting("FAKE_CUDA_FAIL_AT", -1)) return UNKNOWN;
    if (!ready) return NOT_INITIALIZED;
    if (!needs_context) return SUCCESS;
    for (int i = 0; i < MOST; i++)
        if (owned[i].address && owned[i].kind == PUSHED) return SUCCESS;
    return INVALID_VALUE;
}

static int own(int kind, size_t size, void **result) {
    for (int i = 0; i < MOST; i++)
        if (!owned[i].address) {
            owned[i].address = malloc(size ? size : 1);
            owned[i].size = size, owned[i].kind = kind;
            *result = owned[i].address;
            return SUCCESS;
        }
    return OUT_OF_MEMORY;
}

/* Frees what is at `address`, or the last of its kind for NULL. */
static int disown(int kind, void *address) {
    for (int i = MOST - 1; i >= 0; i--)
        if (owned[i].address && owned[i].kind == kind && (!address || owned[i].address == address)) {
            free(owned[i].address);
            owned[i].address = NULL;
            return SUCCESS;
        }
    return INVALID_VALUE;
}

static int inside(int kind, const void *address, size_t size) {
    for (int i = 0; i < MOST; i++)
        if (owned[i].address == address && address && owned[i].kind == kind) return size <= owned[i].size;
    return 0;
}

static long memory(void) { return setting("FAKE_CUDA_MEMORY", 1L << 30); }

static long used(void) {
    long sum = memory() / 16;
    for (int i = 0; i < MOST; i++)
        if (owned[i].address && owned[i].kind == DEVICE) sum += owned[i].size;
    return sum;
}

/* For the tests. */
void fake_reset(void) { calls = ready = 0, now_s = queued_s = 0; }
int fake_calls(void) { return calls; }
double fake_time(void) { return now_s; }
int fake_owned(void) {
    int count = 0;
    for (int i = 0; i < MOST; i++) count += owned[i].address != NULL;
    return count;
}

int cuInit(unsigned flags) {
    if (calls++ == setting("FAKE_CUDA_FAIL_AT", -1)) return UNKNOWN;
    if (flags) return INVALID_VALUE;
    if (setting("FAKE_CUDA_DEVICES", 1) < 0) return NO_DEVICE;
    ready = 1;
    return SUCCESS;
}

int cuGetErrorName(int error, const char **name) {
    *name = error == NO_DEVICE ? "CUDA_ERROR_NO_DEVICE"
            : error == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY"
            : error == INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE"
            : error == NOT_INITIALIZED ? "CUDA_ERROR_NOT_INITIALIZED" : NULL;
    return *name ? SUCCESS : INVALID_VALUE;
}

#define BEGIN(needs_context) do { int error = refused(needs_context); if (error) return error; } while (0)
/* Frees, and reports an error after that. */
#define END(expression) do { int error = refused(1), freed = (expression); return error ? error : freed; } while (0)

int cuDriverGetVersion(int *version) { BEGIN(0); *version = 12040; return SUCCESS; }

int cuDeviceGetCount(int *count) { BEGIN(0); *count = setting("FAKE_CUDA_DEVICES", 1); return SUCCESS; }

int cuDeviceGet(int *device, int ordinal) {
    BEGIN(0);
    if (ordinal < 0 || ordinal >= setting("FAKE_CUDA_DEVICES", 1)) return INVALID_VALUE;
    *device = 7;
    return SUCCESS;
}

int cuDeviceGetName(char *name, int size, int device) {
    BEGIN(0);
    if (device != 7) return INVALID_VALUE;
    strncpy(name, "Stand-in 4090", size);
    return SUCCESS;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    BEGIN(0);
    if (device != 7 || (attribute != 75 && attribute != 76)) return INVALID_VALUE;
    *value = attribute == 75 ? 8 : 9;
    return SUCCESS;
}

int cuDeviceTotalMem_v2(size_t *size, int device) {
    BEGIN(0);
    if (device != 7) return INVALID_VALUE;
    *size = memory();
    return SUCCESS;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    BEGIN(0);
    return device == 7 ? own(CONTEXT, 1, context) : INVALID_VALUE;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
    int error = refused(0), freed = device == 7 ? disown(CONTEXT, NULL) : INVALID_VALUE;
    return error ? error : freed;
}

int cuCtxPushCurrent_v2(void *context) {
    void *pushed;
    BEGIN(0);
    return inside(CONTEXT, context, 1) ? own(PUSHED, 1, &pushed) : INVALID_VALUE;
}

int cuCtxPopCurrent_v2(void **context) { *context = NULL; END(disown(PUSHED, NULL)); }

int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    BEGIN(1);
    *free_bytes = memory() - used(), *total = memory();
    return SUCCESS;
}

int cuMemAlloc_v2(uint64_t *address, size_t size) {
    void *result;
    BEGIN(1);
    if (!size) return INVALID_VALUE;
    if ((long)size > memory() - used() || own(DEVICE, size, &result)) return OUT_OF_MEMORY;
    *address = (uint64_t)result;
    return SUCCESS;
}

int cuMemFree_v2(uint64_t address) { END(address ? disown(DEVICE, (void *)address) : INVALID_VALUE); }

int cuMemAllocHost_v2(void **address, size_t size) { BEGIN(1); return size ? own(PINNED, size, address) : INVALID_VALUE; }

int cuMemFreeHost(void *address) { END(address ? disown(PINNED, address) : INVALID_VALUE); }

int cuStreamCreate(void **stream, unsigned flags) { BEGIN(1); return flags > 1 ? INVALID_VALUE : own(STREAM, 1, stream); }

int cuStreamDestroy_v2(void *stream) { END(stream ? disown(STREAM, stream) : INVALID_VALUE); }

int cuStreamSynchronize(void *stream) {
    BEGIN(1);
    if (!inside(STREAM, stream, 1)) return INVALID_VALUE;
    now_s += queued_s + WAIT_S, queued_s = 0;
    return SUCCESS;
}

static int copy(int to, void *target, int from, const void *source, size_t size, void *stream, double bytes_per_s) {
    BEGIN(1);
    if (!inside(STREAM, stream, 1) || !inside(to, target, size) || !inside(from, source, size)) return INVALID_VALUE;
    queued_s += size / bytes_per_s;
    return SUCCESS;
}

int cuMemcpyDtoDAsync_v2(uint64_t target, uint64_t source, size_t size, void *stream) {
    if (target == source) return INVALID_VALUE;
    return copy(DEVICE, (void *)target, DEVICE, (void *)source, size, stream, 500e9);
}

int cuMemcpyHtoDAsync_v2(uint64_t target, const void *source, size_t size, void *stream) {
    return copy(DEVICE, (void *)target, PINNED, source, size, stream, 25e9);
}

int cuMemcpyDtoHAsync_v2(void *target, uint64_t source, size_t size, void *stream) {
    return copy(PINNED, target, DEVICE, (void *)source, size, stream, 20e9);
}
