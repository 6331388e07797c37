/* The driver, its GPU and its contexts; and functions that only tests call. */

#include "fake.h"

#include <cstdlib>
#include <cstring>

using namespace fake;

namespace fake {

State &state = *new State;

static thread_local std::vector<void *> current;
static thread_local bool in_host_call = false;

enum { THE_DEVICE = 7 };
static char the_context;

long setting(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text ? atol(text) : otherwise;
}

void fault(const std::string &text) {
    if (state.fault.empty()) state.fault = text;
}

static bool fails(const char *name) {
    const char *only = getenv("FAKE_CUDA_FAIL_CALL");
    if (only && strcmp(only, name)) return false;
    return (only ? state.counts[name] : state.calls) == setting("FAKE_CUDA_FAIL_AT", -1);
}

Call::Call(const char *name, int needs) : lock(state.mutex) {
    if (fails(name)) failed = setting("FAKE_CUDA_FAIL_WITH", UNKNOWN), state.failed = name;
    state.calls++, state.counts[name]++;
    if (in_host_call) {
        fault("a function of the host called the driver");
        forbidden = NOT_PERMITTED;
    } else if (!state.ready && strcmp(name, "cuInit")) forbidden = NOT_INITIALIZED;
    else if ((needs & CONTEXT) && current.empty()) forbidden = INVALID_CONTEXT;
    else if (Stream *stream = (needs & IN_CAPTURE) ? nullptr : captured_here()) {
        stream->capture->valid = false;
        forbidden = CAPTURE_UNSUPPORTED;
    } else if ((needs & CONTEXT) && !failed) failed = state.sticky;
}

int run(const HostCall &call) {
    in_host_call = true;
    call.function(call.data);
    in_host_call = false;
    return SUCCESS;
}

/* Everything that still exists is freed with the context. */
static void destroy_all(Call &call) {
    state.leaked += state.alive.size();
    while (!state.alive.empty()) {
        auto first = state.alive.begin();
        auto object = first->second;
        state.alive.erase(first);
        if (auto stream = std::dynamic_pointer_cast<Stream>(object)) finish(call, *stream);
    }
}

}  // namespace fake

extern "C" {

/* For the tests. */
void fake_reset() {
    std::unique_lock<std::mutex> lock(state.mutex);
    state.calls = state.event_records = state.leaked = state.sticky = state.image = 0;
    state.ready = false, state.now_s = state.queued_s = 0;
    state.fault.clear(), state.failed.clear(), state.kernel_error.clear(), state.counts.clear();
}
int fake_calls() { return state.calls; }
double fake_time() { return state.now_s; }
int fake_owned() {
    std::unique_lock<std::mutex> lock(state.mutex);
    return (int)state.alive.size() + state.retained + state.pushed;
}
/* Number of objects that were not freed before their context was. */
int fake_leaked() { return state.leaked; }
/* Number of calls of one function. */
int fake_count(const char *name) { return state.counts[name]; }
/* How often calls or nodes of graphs recorded an event. */
int fake_event_records() { return state.event_records; }
/* The value of CUDA_MODULE_LOADING in the last cuInit. */
const char *fake_loading() { return state.loading.c_str(); }
/* The first fault, the call that failed on demand, and the message of the last kernel that failed; empty for none. */
const char *fake_fault() { return state.fault.c_str(); }
const char *fake_failed() { return state.failed.c_str(); }
const char *fake_kernel_error() { return state.kernel_error.c_str(); }
/* The kind of the image that was loaded last: 1 for a cubin, 2 for PTX. */
int fake_image() { return state.image; }

int cuInit(unsigned flags) {
    BEGIN(NOTHING);
    if (flags) return INVALID_VALUE;
    if (setting("FAKE_CUDA_DEVICES", 1) < 0) return NO_DEVICE;
    const char *loading = getenv("CUDA_MODULE_LOADING");
    state.loading = loading ? loading : "";
    state.ready = true;
    return SUCCESS;
}

int cuGetErrorName(int error, const char **name) {
    static const std::map<int, const char *> names = {
        {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"}, {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
        {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"}, {NO_DEVICE, "CUDA_ERROR_NO_DEVICE"},
        {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE"}, {INVALID_PTX, "CUDA_ERROR_INVALID_PTX"},
        {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
        {209, "CUDA_ERROR_NO_BINARY_FOR_GPU"}, {218, "CUDA_ERROR_INVALID_PTX"},
        {221, "CUDA_ERROR_JIT_COMPILER_NOT_FOUND"}, {222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"},
        {223, "CUDA_ERROR_JIT_COMPILATION_DISABLED"}, {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE"},
        {NOT_FOUND, "CUDA_ERROR_NOT_FOUND"}, {NOT_READY, "CUDA_ERROR_NOT_READY"},
        {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"}, {LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED"},
        {NOT_PERMITTED, "CUDA_ERROR_NOT_PERMITTED"},
        {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
        {CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"},
        {CAPTURE_UNMATCHED, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED"},
        {CAPTURE_WRONG_THREAD, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD"},
        /* UNKNOWN has no name here, so that this case is tested, too. */
    };
    auto found = names.find(error);
    *name = found == names.end() ? nullptr : found->second;
    return *name ? SUCCESS : INVALID_VALUE;
}

int cuDriverGetVersion(int *version) {
    BEGIN(NOTHING);
    *version = setting("FAKE_CUDA_VERSION", 12040);
    return SUCCESS;
}

int cuDeviceGetCount(int *count) {
    BEGIN(NOTHING);
    *count = setting("FAKE_CUDA_DEVICES", 1);
    return SUCCESS;
}

int cuDeviceGet(int *device, int ordinal) {
    BEGIN(NOTHING);
    if (ordinal < 0 || ordinal >= setting("FAKE_CUDA_DEVICES", 1)) return INVALID_VALUE;
    *device = THE_DEVICE;
    return SUCCESS;
}

int cuDeviceGetName(char *name, int size, int device) {
    BEGIN(NOTHING);
    if (device != THE_DEVICE) return INVALID_VALUE;
    strncpy(name, "Stand-in 4090", size);
    return SUCCESS;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    BEGIN(NOTHING);
    if (device != THE_DEVICE || (attribute != 75 && attribute != 76)) return INVALID_VALUE;
    long sm = setting("FAKE_CUDA_SM", 89);
    *value = attribute == 75 ? sm / 10 : sm % 10;
    return SUCCESS;
}

int cuDeviceTotalMem_v2(size_t *size, int device) {
    BEGIN(NOTHING);
    if (device != THE_DEVICE) return INVALID_VALUE;
    *size = setting("FAKE_CUDA_MEMORY", 1L << 30);
    return SUCCESS;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    BEGIN(NOTHING);
    if (device != THE_DEVICE) return INVALID_VALUE;
    state.retained++;
    *context = &the_context;
    return SUCCESS;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
    BEGIN_END(NOTHING);
    if (device != THE_DEVICE || !state.retained) return INVALID_CONTEXT;
    if (--state.retained == 0) destroy_all(call), state.sticky = 0;
    return call.failed;
}

int cuCtxPushCurrent_v2(void *context) {
    BEGIN(IN_CAPTURE);
    if (context != &the_context || !state.retained) return INVALID_CONTEXT;
    current.push_back(context), state.pushed++;
    return SUCCESS;
}

int cuCtxPopCurrent_v2(void **context) {
    BEGIN_END(IN_CAPTURE);
    if (current.empty()) return INVALID_CONTEXT;
    *context = current.back();
    current.pop_back(), state.pushed--;
    return call.failed;
}

}  // extern "C"
