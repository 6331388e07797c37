/* Modules, kernels and graphs. The library that FAKE_CUDA_KERNELS names has

       int pi_params(const char *symbol);      how many parameters a kernel has, all of them pointers; -1: there is none
       const char *pi_emulate(const char *symbol, const unsigned grid[3], const unsigned block[3], void **params,
                              int order);      runs one; NULL, or what went wrong

   `params` are those of cuLaunchKernel, with addresses that the host can use. */

#include "fake.h"

#include <cctype>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>

using namespace fake;

namespace fake {

static const double FILL_S = 1.5e-6;

Module::~Module() {
    if (library) dlclose(library);
}

static void wait_if_launches_do(Call &call, Stream &stream) {
    if (setting("CUDA_LAUNCH_BLOCKING", 0)) state.changed.wait(call.lock, [&] { return stream.idle(); });
}

/* Waits until the stream takes another task. */
static void wait_for_room(Call &call, Stream &stream) {
    long most = setting("FAKE_CUDA_QUEUE", 0);
    state.changed.wait(call.lock, [&] { return !most || (long)stream.queue.size() < most; });
}

/* A copy of mapped memory, for a kernel that does not see the host's writes. The kernel's own writes arrive later. */
struct Blinders {
    struct Copies {
        std::vector<char> before, now;
    };
    std::map<Block *, Copies> copies;
    char *see(Block &block) {
        if (!block.on_host || !setting("FAKE_CUDA_BLIND", 0)) return block.start;
        auto &found = copies[&block];
        if (found.now.empty()) found.now.assign(block.start, block.start + block.size), found.before = found.now;
        return found.now.data();
    }
    ~Blinders() {
        for (auto &[block, found] : copies)
            for (size_t i = 0; i < block->size; i++)
                if (found.now[i] != found.before[i]) block->start[i] = found.now[i];
    }
};

/* The driver refers to a graph's kernels in the module they were loaded with, so the module must still be loaded. */
int run(const Launch &launch) {
    std::vector<std::shared_ptr<Block>> keep;
    std::vector<void *> addresses, params;
    Blinders blinders;
    auto module = launch.module.lock();
    if (!module) return LAUNCH_FAILED;
    {
        std::unique_lock<std::mutex> lock(state.mutex);
        for (uint64_t address : launch.params) {
            auto block = on_device(address, 1);
            if (!block) return ILLEGAL_ADDRESS;
            keep.push_back(block);
            addresses.push_back(blinders.see(*block) + (address - block->device));
        }
    }
    for (auto &address : addresses) params.push_back(&address);
    const char *error = module->emulate(launch.symbol.c_str(), launch.grid, launch.block, params.data(), module->order);
    if (!error) return SUCCESS;
    std::unique_lock<std::mutex> lock(state.mutex);
    state.kernel_error = error;
    return LAUNCH_FAILED;
}

/* Whether all of `nodes` are among `last` or run before them. */
static bool all_before(const std::vector<Node> &graph, const std::vector<size_t> &nodes, std::vector<size_t> last) {
    std::vector<bool> before(graph.size());
    while (!last.empty()) {
        size_t node = last.back();
        last.pop_back();
        if (before[node]) continue;
        before[node] = true;
        last.insert(last.end(), graph[node].after.begin(), graph[node].after.end());
    }
    for (size_t node : nodes)
        if (!before[node]) return false;
    return true;
}

static int copy_now(const Copy &copy) {
    memmove(copy.to, copy.from, copy.size);
    return SUCCESS;
}

static int fill_now(const Fill &fill) {
    memset(fill.to, fill.value, fill.size);
    return SUCCESS;
}

static int run_node(const Node &node) {
    if (node.copy.size) return copy_now(node.copy);
    if (node.host.function) return run(node.host);
    if (node.fill.size) return fill_now(node.fill);
    if (!node.event) return run(node.launch);
    std::unique_lock<std::mutex> lock(state.mutex);
    node.event->done = ++node.event->recorded;
    state.changed.notify_all();
    return SUCCESS;
}

/* Runs a graph of several streams, one node at a time, in an order that its edges allow. */
static int run_forked(const Exec &exec) {
    static unsigned seed = 1;
    std::vector<bool> done(exec.nodes.size());
    long copies = setting("FAKE_CUDA_COPIES", 0);
    for (size_t ran = 0; ran < exec.nodes.size(); ran++) {
        std::vector<size_t> ready, wanted;
        for (size_t i = 0; i < exec.nodes.size(); i++) {
            bool is_ready = !done[i];
            for (size_t before : exec.nodes[i].after) is_ready = is_ready && done[before];
            if (!is_ready) continue;
            ready.push_back(i);
            if ((copies == 1) == (exec.nodes[i].copy.size != 0)) wanted.push_back(i);
        }
        size_t next = copies && !wanted.empty() ? wanted[0] : copies ? ready[0] : ready[rand_r(&seed) % ready.size()];
        if (int error = run_node(exec.nodes[next])) return error;
        done[next] = true;
    }
    return SUCCESS;
}

static void log_line(unsigned count, const int *options, void **values, const char *line) {
    char *buffer = nullptr;
    size_t size = 0;
    for (unsigned i = 0; i < count; i++) {
        if (options[i] == 5) buffer = (char *)values[i];
        if (options[i] == 6) size = (size_t)values[i];
    }
    if (buffer && size) strncpy(buffer, line, size - 1);
}

/* Is it text with a version, up to the zero that ends it? Behind text without one stands what is no text. */
static bool is_ptx(const char *image) {
    if (!strstr(image, ".version")) return false;
    for (; *image; image++)
        if (!isprint((unsigned char)*image) && !isspace((unsigned char)*image)) return false;
    return true;
}

static Function *find_function(void *handle) {
    for (auto &entry : state.alive)
        if (auto module = std::dynamic_pointer_cast<Module>(entry.second))
            for (auto &function : module->functions)
                if (function.second.get() == handle) return function.second.get();
    return nullptr;
}

static bool fits(const unsigned *grid, const unsigned *block) {
    if (!grid[0] || !grid[1] || !grid[2] || !block[0] || !block[1] || !block[2]) return false;
    return grid[0] <= 2147483647 && grid[1] <= 65535 && grid[2] <= 65535 && block[2] <= 64 &&
           (uint64_t)block[0] * block[1] * block[2] <= 1024;
}

}  // namespace fake

extern "C" {

int cuModuleLoadDataEx(void **handle, const void *image, unsigned count, int *options, void **values) {
    BEGIN(CONTEXT);
    if (long refused = setting("FAKE_CUDA_REFUSE", 0)) {
        log_line(count, options, values, "ptxas fatal : refused by the stand-in\nptxas : a second line");
        return refused;
    }
    bool cubin = !memcmp(image, "\x7f" "ELF", 4);
    if (!cubin && !is_ptx((const char *)image)) return INVALID_PTX;
    auto module = std::make_shared<Module>();
    if (const char *path = getenv("FAKE_CUDA_KERNELS")) {
        module->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        if (!module->library) return INVALID_IMAGE;
        module->emulate = (Module::Emulate)dlsym(module->library, "pi_emulate");
        module->params = (int (*)(const char *))dlsym(module->library, "pi_params");
        if (!module->emulate || !module->params) return INVALID_IMAGE;
    }
    module->order = setting("FAKE_CUDA_ORDER", 0);
    state.image = cubin ? 1 : 2;
    *handle = own(module);
    return SUCCESS;
}

int cuModuleUnload(void *handle) {
    BEGIN_END(CONTEXT);
    if (any_busy()) fault("a module was unloaded while a stream was busy");
    int freed = disown<Module>(handle);
    return call.failed ? call.failed : freed;
}

int cuModuleGetFunction(void **function, void *handle, const char *symbol) {
    BEGIN(CONTEXT);
    auto module = find<Module>(handle);
    if (!module) return INVALID_HANDLE;
    int params = module->params ? module->params(symbol) : -1;
    if (params < 0) return NOT_FOUND;
    auto &found = module->functions[symbol];
    if (!found) found.reset(new Function{module.get(), symbol, params});
    *function = found.get();
    return SUCCESS;
}

int cuLaunchKernel(void *handle, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                   unsigned block_z, unsigned shared_bytes, void *stream_handle, void **params, void **extra) {
    BEGIN(CONTEXT | IN_CAPTURE);
    auto function = find_function(handle);
    auto stream = find<Stream>(stream_handle);
    if (!function || !stream) return INVALID_HANDLE;
    Launch launch{find<Module>(function->module), function->symbol, {grid_x, grid_y, grid_z},
                  {block_x, block_y, block_z}, {}};
    if (!fits(launch.grid, launch.block) || shared_bytes || extra) return INVALID_VALUE;
    if (function->params && !params) return INVALID_VALUE;
    for (int i = 0; i < function->params; i++) launch.params.push_back(*(uint64_t *)params[i]);
    if (!stream->capture) enqueue(*stream, [=] { return run(launch); });
    else return capture(*stream, {launch, nullptr, {}, {}, {}, {}});
    wait_if_launches_do(call, *stream);
    return SUCCESS;
}

int cuLaunchHostFunc(void *stream_handle, void (*function)(void *), void *data) {
    BEGIN(CONTEXT | IN_CAPTURE);
    auto stream = find<Stream>(stream_handle);
    if (!stream) return INVALID_HANDLE;
    if (!function) return INVALID_VALUE;
    HostCall host{function, data};
    if (stream->capture) return capture(*stream, {{}, nullptr, {}, host, {}, {}});
    enqueue(*stream, [=] { return run(host); });
    wait_if_launches_do(call, *stream);
    return SUCCESS;
}

int cuStreamBeginCapture_v2(void *handle, int mode) {
    BEGIN(CONTEXT);
    auto stream = find<Stream>(handle);
    if (!stream) return INVALID_HANDLE;
    if (stream->capture || mode < 0 || mode > 2) return INVALID_VALUE;
    stream->capture.reset(new Capture{std::this_thread::get_id(), std::make_shared<Graph>(), stream.get()});
    stream->captured.clear();
    return SUCCESS;
}

int cuStreamEndCapture(void *handle, void **graph) {
    BEGIN_END(CONTEXT | IN_CAPTURE);
    auto stream = find<Stream>(handle);
    *graph = nullptr;
    if (!stream) return INVALID_HANDLE;
    if (!stream->capture) return CAPTURE_UNMATCHED;
    if (stream->capture->thread != std::this_thread::get_id()) return CAPTURE_WRONG_THREAD;
    auto capture = stream->capture;
    if (capture->origin != stream.get()) return CAPTURE_UNMATCHED;
    bool joined = true;
    for (auto &entry : state.alive)
        if (auto other = std::dynamic_pointer_cast<Stream>(entry.second))
            if (other->capture == capture) {
                joined = joined && all_before(capture->graph->nodes, other->captured, stream->captured);
                other->capture.reset();
            }
    if (!capture->valid) return CAPTURE_INVALIDATED;
    if (!joined) return CAPTURE_UNJOINED;
    if (call.failed) return call.failed;
    *graph = own(capture->graph);
    return SUCCESS;
}

int cuGraphInstantiateWithFlags(void **handle, void *graph_handle, unsigned long long flags) {
    BEGIN(CONTEXT);
    auto graph = find<Graph>(graph_handle);
    if (!graph) return INVALID_HANDLE;
    if (flags) return INVALID_VALUE;
    auto exec = std::make_shared<Exec>();
    exec->nodes = graph->nodes, exec->forked = graph->forked;
    *handle = own(exec);
    return SUCCESS;
}

int cuGraphUpload(void *exec, void *stream) {
    BEGIN(CONTEXT);
    return find<Exec>(exec) && find<Stream>(stream) ? SUCCESS : INVALID_HANDLE;
}

int cuGraphLaunch(void *handle, void *stream_handle) {
    BEGIN(CONTEXT);
    auto exec = find<Exec>(handle);
    auto stream = find<Stream>(stream_handle);
    if (!exec || !stream) return INVALID_HANDLE;
    for (auto &node : exec->nodes)
        if (node.fill.size) state.queued_s += FILL_S;
    if (exec->forked) enqueue(*stream, [=] { return run_forked(*exec); });
    else for (auto &node : exec->nodes) {
        wait_for_room(call, *stream);
        if (node.copy.size) enqueue(*stream, [=] { return copy_now(node.copy); });
        else if (node.host.function) enqueue(*stream, [=] { return run(node.host); });
        else if (node.fill.size) enqueue(*stream, [=] { return fill_now(node.fill); });
        else if (node.event) enqueue_record(*stream, node.event);
        else enqueue(*stream, [=] { return run(node.launch); });
    }
    exec->pending++;
    enqueue(*stream, [=] {
        std::unique_lock<std::mutex> lock(state.mutex);
        exec->pending--;
        return SUCCESS;
    });
    wait_if_launches_do(call, *stream);
    return SUCCESS;
}

int cuGraphExecDestroy(void *handle) {
    BEGIN_END(CONTEXT);
    auto exec = find<Exec>(handle);
    if (exec && exec->pending && !state.sticky) fault("a graph was destroyed while it ran");
    int freed = disown<Exec>(handle);
    return call.failed ? call.failed : freed;
}

int cuGraphDestroy(void *handle) {
    BEGIN_END(CONTEXT);
    int freed = disown<Graph>(handle);
    return call.failed ? call.failed : freed;
}

}  // extern "C"
