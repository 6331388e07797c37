/* A stand-in for libcuda.so.1: the functions in picompile_runtime/devices/cuda/driver.py, with memory of the host.

   It checks that callers keep the rules of the driver API: initialize first, devices by number, a current context of
   the calling thread, handles that are alive, addresses and sizes inside allocated memory, nothing freed twice, and
   only launches, functions of the host, copies to the GPU, memsets and events while a thread captures streams, and no
   call from a function of the host. Calls that break a rule return an error. Mistakes that the driver would not notice, but that
   harm the program, are faults (`fake_fault`): memory freed while it is in use, or written past its end. A call from a
   function of the host is a fault, too, and so is a query of a captured stream, since nobody may look at its result.

   A stream that waits for an event of a captured one is captured, too, and must be joined to the first one at the end.
   The nodes of such a graph run one by one, in an order that its edges allow.

   A stream is a thread with a queue. Memory is poisoned when it is allocated. The GPU has its own addresses, so that
   the host cannot use them by mistake; they are translated for copies and for kernels. Kernels come from a library that
   the environment names: see modules.cpp.

   Time is simulated: copies take bytes / rate when their stream is waited for, a memset in a graph takes 1.5 us, and a
   wait takes 5 us. But events have the real time at which a stream's thread reached them.

   Environment variables, read at every call:
   FAKE_CUDA_FAIL_AT    the n-th call since fake_reset, from 0, fails. Functions that free or wait still do so, as the
                        driver's do when they report an earlier error.
   FAKE_CUDA_FAIL_CALL  a function's name: only its calls are counted for FAIL_AT.
   FAKE_CUDA_FAIL_WITH  the result of the failing call; CUDA_ERROR_UNKNOWN if not set.
   FAKE_CUDA_DEVICES    number of GPUs; 1 if not set. cuInit fails with CUDA_ERROR_NO_DEVICE for -1.
   FAKE_CUDA_MEMORY     bytes of memory, of which a byte in 16 is in use; 2^30 if not set.
   FAKE_CUDA_SM         the compute capability times ten; 89 if not set.
   FAKE_CUDA_VERSION    the result of cuDriverGetVersion; 12040 if not set.
   FAKE_CUDA_REFUSE     cuModuleLoadDataEx fails with this, and logs a line.
   FAKE_CUDA_NO_PINNING cuMemHostRegister fails with this.
   FAKE_CUDA_KERNELS    the library with the kernels, read when a module is loaded.
   FAKE_CUDA_ORDER      the order of threads that it is asked for; 0 if not set.
   FAKE_CUDA_DELAY_US   whatever a stream does is delayed by up to so many microseconds, at random.
   FAKE_CUDA_BLIND      1: kernels see what the host wrote to mapped memory before they began, and the host sees what
                        they wrote when they end, as on systems without concurrent access.
   FAKE_CUDA_COPIES     when copies in a graph run: 1 as early as its edges allow, 2 as late as they do, else at random.
                        Functions of the host are no copies: they run late in the first case, early in the second.
   FAKE_CUDA_QUEUE      how many tasks a stream takes; a launch of more waits, as the driver's do. No limit if not set.
   FAKE_CUDA_DRY        1: copies and poison take no real time, since they are left out.
   CUDA_LAUNCH_BLOCKING 1: launches return when all has run, as the driver's do. */

#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace fake {

enum Result {
    SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201, INVALID_PTX = 218, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600,
    ILLEGAL_ADDRESS = 700, LAUNCH_FAILED = 719, NOT_PERMITTED = 800, CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901,
    CAPTURE_UNMATCHED = 903, CAPTURE_UNJOINED = 904, CAPTURE_ISOLATION = 905, CAPTURE_WRONG_THREAD = 908, UNKNOWN = 999
};

/* What a call needs; without IN_CAPTURE it fails in a thread that captures a stream. */
enum Needs { NOTHING = 0, CONTEXT = 1, IN_CAPTURE = 2 };

/* The kinds of objects that a handle can stand for. */
struct Object {
    virtual ~Object() = default;
};

/* Memory, with guard bytes around it. `device` is its address on the GPU, 0 for none. */
struct Block : Object {
    Block(size_t size, bool on_host);
    Block(void *address, size_t size);  // the caller's own, with nothing around it
    ~Block() override;
    bool whole() const;
    char *base, *start;
    size_t size;
    bool on_host;
    uint64_t device = 0;
};

struct Module : Object {
    using Emulate = const char *(*)(const char *, const unsigned *, const unsigned *, void **, int);
    ~Module() override;
    void *library = nullptr;
    Emulate emulate = nullptr;
    int (*params)(const char *) = nullptr;
    int order = 0;
    std::map<std::string, std::unique_ptr<struct Function>> functions;
};

struct Function {
    Module *module;
    std::string symbol;
    int params;
};

struct Launch {
    std::weak_ptr<Module> module;
    std::string symbol;
    unsigned grid[3], block[3];
    std::vector<uint64_t> params;
};

struct Event : Object {
    long recorded = 0, done = 0;
    bool timed = false;
    int64_t time_ns = 0; /* when it was last reached */
    std::shared_ptr<struct Capture> capture; /* in which it was last recorded, and the nodes that were before it */
    std::vector<size_t> nodes;
};

struct Copy {
    std::shared_ptr<Block> to_block, from_block;
    char *to = nullptr, *from = nullptr;
    size_t size = 0;
};

/* Sets the bytes from `to` on to `value`. */
struct Fill {
    std::shared_ptr<Block> block;
    char *to = nullptr;
    size_t size = 0;
    unsigned char value = 0;
};

/* A function of the host that a stream calls, with what it is given. */
struct HostCall {
    void (*function)(void *) = nullptr;
    void *data = nullptr;
};

/* A node of a graph: it records `event`, or copies, or fills, or calls the host, or else is a launch. It runs after the
   nodes `after`. */
struct Node {
    Launch launch;
    std::shared_ptr<Event> event;
    Copy copy;
    HostCall host;
    Fill fill;
    std::vector<size_t> after;
};

/* A graph, and one that is ready to run. */
struct Graph : Object {
    std::vector<Node> nodes;
    bool forked = false;
};

struct Exec : Object {
    std::vector<Node> nodes;
    bool forked = false;
    int pending = 0;
};

struct Capture {
    std::thread::id thread;
    std::shared_ptr<Graph> graph;
    struct Stream *origin;
    bool valid = true;
};

using Task = std::function<int()>;

struct Stream : Object {
    std::deque<Task> queue;
    bool running = false, ending = false;
    long delay_us = 0;
    unsigned seed = 1;
    std::shared_ptr<Capture> capture;
    std::vector<size_t> captured; /* the nodes after which its next one runs */
    std::thread worker;
    bool idle() const { return queue.empty() && !running; }
};

/* The state of the stand-in. It is never destroyed: threads may still run when the process ends. */
struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::map<void *, std::shared_ptr<Object>> alive;
    std::map<std::string, int> counts;
    int calls = 0, event_records = 0, retained = 0, pushed = 0, leaked = 0, sticky = 0, image = 0;
    bool ready = false;
    double now_s = 0, queued_s = 0;
    std::string fault, failed, kernel_error, loading;
};

extern State &state;

/* One call of a function: it holds the lock, counts the call, and knows whether the call fails. */
struct Call {
    Call(const char *name, int needs);
    int error() const { return forbidden ? forbidden : failed; }
    std::unique_lock<std::mutex> lock;
    int forbidden = 0, failed = 0;
};

#define BEGIN(needs)                      \
    fake::Call call(__func__, needs);     \
    if (call.error()) return call.error()
/* For functions that free or wait: they do so unless a rule forbids it, and report an error afterwards. */
#define BEGIN_END(needs)              \
    fake::Call call(__func__, needs); \
    if (call.forbidden) return call.forbidden

long setting(const char *name, long otherwise);
void fault(const std::string &text);

template <class T> std::shared_ptr<T> find(void *handle) {
    auto found = state.alive.find(handle);
    return found == state.alive.end() ? nullptr : std::dynamic_pointer_cast<T>(found->second);
}

template <class T> void *own(std::shared_ptr<T> object) {
    void *handle = object.get();
    state.alive[handle] = std::move(object);
    return handle;
}

template <class T> int disown(void *handle) {
    if (!find<T>(handle)) return INVALID_HANDLE;
    state.alive.erase(handle);
    return SUCCESS;
}

/* The memory that contains all of these addresses, the GPU's or the host's, or null. */
std::shared_ptr<Block> on_device(uint64_t address, size_t size);
std::shared_ptr<Block> on_host(const void *address, size_t size);
bool any_busy();
void enqueue(Stream &stream, Task task);
/* Make the stream record the event when it gets there. It takes the lock when it runs. */
void enqueue_record(Stream &stream, std::shared_ptr<Event> event);
/* Let a stream finish, and end its thread. */
void finish(Call &call, Stream &stream);
Stream *captured_here();
/* Add a node to the graph that the stream is captured into. */
int capture(Stream &stream, Node node);
int run(const Launch &launch);
int run(const HostCall &call);

}  // namespace fake
