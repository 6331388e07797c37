/* Streams, each a thread with a queue; events; copies. */

#include "fake.h"

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <unistd.h>

using namespace fake;

namespace fake {

static const double WAIT_S = 5e-6;

bool any_busy() {
    for (auto &entry : state.alive)
        if (auto stream = std::dynamic_pointer_cast<Stream>(entry.second))
            if (!stream->idle()) return true;
    return false;
}

Stream *captured_here() {
    for (auto &entry : state.alive)
        if (auto stream = std::dynamic_pointer_cast<Stream>(entry.second))
            if (stream->capture && stream->capture->thread == std::this_thread::get_id()) return stream.get();
    return nullptr;
}

static void delay(Stream &stream) {
    if (stream.delay_us) usleep(rand_r(&stream.seed) % (stream.delay_us + 1));
}

/* After an error nothing runs any more, and every wait returns the error. */
static void work(Stream *stream) {
    std::unique_lock<std::mutex> lock(state.mutex);
    while (true) {
        state.changed.wait(lock, [&] { return stream->ending || !stream->queue.empty(); });
        if (stream->queue.empty()) return;
        Task task = std::move(stream->queue.front());
        stream->queue.pop_front();
        stream->running = true;
        int error = state.sticky;
        lock.unlock();
        if (!error) delay(*stream), error = task();
        lock.lock();
        stream->running = false;
        if (!state.sticky) state.sticky = error;
        state.changed.notify_all();
    }
}

void enqueue(Stream &stream, Task task) {
    stream.queue.push_back(std::move(task));
    state.changed.notify_all();
}

int capture(Stream &stream, Node node) {
    if (!stream.capture->valid) return CAPTURE_INVALIDATED;
    auto &nodes = stream.capture->graph->nodes;
    node.after = stream.captured;
    nodes.push_back(std::move(node));
    stream.captured = {nodes.size() - 1};
    return SUCCESS;
}

/* The stream, unless it is captured: the stand-in captures launches, functions of the host, copies to the GPU,
   memsets, and events. */
static int usable(void *handle, std::shared_ptr<Stream> &stream) {
    stream = find<Stream>(handle);
    if (!stream) return INVALID_HANDLE;
    if (stream->capture) stream->capture->valid = false;
    return stream->capture ? CAPTURE_UNSUPPORTED : SUCCESS;
}

void finish(Call &call, Stream &stream) {
    stream.ending = true;
    state.changed.notify_all();
    call.lock.unlock();
    stream.worker.join();
    call.lock.lock();
}

/* Bytes inside a block of memory, which is kept until they are copied. */
struct Place {
    std::shared_ptr<Block> block;
    char *bytes;
};

static Place device_place(uint64_t address, size_t size) {
    auto block = on_device(address, size);
    return {block, block ? block->start + (address - block->device) : nullptr};
}

static Place host_place(const void *address, size_t size) { return {on_host(address, size), (char *)address}; }

static int copy(Call &call, void *handle, Place to, Place from, size_t size, double bytes_per_s, bool captures = false) {
    std::shared_ptr<Stream> stream = find<Stream>(handle);
    if (captures && stream && stream->capture) {
        if (!to.block || !from.block || !size) return INVALID_VALUE;
        if (call.failed) return call.failed;
        Copy copied{to.block, from.block, to.bytes, from.bytes, size};
        return capture(*stream, {{}, nullptr, copied, {}, {}, {}});
    }
    if (int error = usable(handle, stream)) return error;
    if (call.failed) return call.failed;
    if (!to.block || !from.block || to.bytes == from.bytes) return INVALID_VALUE;
    state.queued_s += size / bytes_per_s;
    if (!setting("FAKE_CUDA_DRY", 0)) enqueue(*stream, [=] { return memmove(to.bytes, from.bytes, size), SUCCESS; });
    return SUCCESS;
}

static int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

/* Who waits for the event may destroy the stream at once, so the stream is no longer running when the event is done. */
void enqueue_record(Stream &stream, std::shared_ptr<Event> event) {
    long ticket = ++event->recorded;
    state.event_records++;
    Stream *owner = &stream;
    enqueue(stream, [=] {
        std::unique_lock<std::mutex> lock(state.mutex);
        event->done = ticket, event->time_ns = now_ns(), owner->running = false;
        state.changed.notify_all();
        return SUCCESS;
    });
}

/* Whether an event has happened, so that nothing has to wait for it. */
static bool reached(const Event &event, long ticket) { return event.done >= ticket || state.sticky; }

}  // namespace fake

extern "C" {

int cuStreamCreate(void **handle, unsigned flags) {
    BEGIN(CONTEXT);
    if (flags > 1) return INVALID_VALUE;
    auto stream = std::make_shared<Stream>();
    stream->delay_us = setting("FAKE_CUDA_DELAY_US", 0);
    stream->worker = std::thread(work, stream.get());
    *handle = own(stream);
    return SUCCESS;
}

int cuStreamDestroy_v2(void *handle) {
    BEGIN_END(CONTEXT);
    auto stream = find<Stream>(handle);
    if (!stream) return INVALID_HANDLE;
    if (stream->capture) fault("a stream was destroyed while it was captured");
    if (!stream->idle()) fault("a stream was destroyed while it was busy");
    state.alive.erase(handle);
    finish(call, *stream);
    return call.failed;
}

int cuStreamQuery(void *handle) {
    BEGIN(CONTEXT);
    std::shared_ptr<Stream> stream;
    int error = usable(handle, stream);
    if (stream && stream->capture) fault("a stream was queried while it was captured");
    if (error) return error;
    if (call.failed || state.sticky) return call.failed ? call.failed : state.sticky;
    return stream->idle() ? SUCCESS : NOT_READY;
}

int cuStreamSynchronize(void *handle) {
    BEGIN_END(CONTEXT);
    std::shared_ptr<Stream> stream;
    if (int error = usable(handle, stream)) return error;
    state.changed.wait(call.lock, [&] { return stream->idle(); });
    state.now_s += state.queued_s + WAIT_S, state.queued_s = 0;
    return call.failed ? call.failed : state.sticky;
}

int cuEventCreate(void **handle, unsigned flags) {
    BEGIN(CONTEXT);
    if (flags > 3) return INVALID_VALUE;
    auto event = std::make_shared<Event>();
    event->timed = !(flags & 2);
    *handle = own(event);
    return SUCCESS;
}

int cuEventDestroy_v2(void *handle) {
    BEGIN_END(CONTEXT);
    int freed = disown<Event>(handle);
    return call.failed ? call.failed : freed;
}

int cuEventRecord(void *handle, void *stream_handle) {
    BEGIN(CONTEXT | IN_CAPTURE);
    auto event = find<Event>(handle);
    std::shared_ptr<Stream> stream = find<Stream>(stream_handle);
    if (event && stream && stream->capture) {
        event->capture = stream->capture, event->nodes = stream->captured;
        return SUCCESS;
    }
    if (int error = usable(stream_handle, stream)) return error;
    if (!event) return INVALID_HANDLE;
    event->capture.reset();
    enqueue_record(*stream, event);
    return SUCCESS;
}

/* In a capture only the flag CU_EVENT_RECORD_EXTERNAL makes a node that records the event whenever the graph runs. */
int cuEventRecordWithFlags(void *handle, void *stream_handle, unsigned flags) {
    BEGIN(CONTEXT | IN_CAPTURE);
    auto event = find<Event>(handle);
    auto stream = find<Stream>(stream_handle);
    if (!event || !stream) return INVALID_HANDLE;
    if (flags > 1 || (flags && !stream->capture)) return INVALID_VALUE;
    if (!stream->capture) return enqueue_record(*stream, event), SUCCESS;
    if (!stream->capture->valid) return CAPTURE_INVALIDATED;
    if (!flags) return stream->capture->valid = false, CAPTURE_UNSUPPORTED;
    return capture(*stream, {{}, event, {}, {}, {}, {}});
}

int cuEventSynchronize(void *handle) {
    BEGIN_END(CONTEXT);
    auto event = find<Event>(handle);
    if (!event) return INVALID_HANDLE;
    long ticket = event->recorded;
    state.changed.wait(call.lock, [&] { return reached(*event, ticket); });
    return call.failed ? call.failed : state.sticky;
}

int cuEventElapsedTime(float *elapsed_ms, void *first_handle, void *second_handle) {
    BEGIN(CONTEXT);
    auto first = find<Event>(first_handle), second = find<Event>(second_handle);
    if (!first || !second || !first->timed || !second->timed) return INVALID_HANDLE;
    if (!first->recorded || !second->recorded) return INVALID_HANDLE;
    if (first->done < first->recorded || second->done < second->recorded) return NOT_READY;
    *elapsed_ms = (float)(1e-6 * (double)(second->time_ns - first->time_ns));
    return SUCCESS;
}

int cuStreamWaitEvent(void *stream_handle, void *handle, unsigned flags) {
    BEGIN(CONTEXT | IN_CAPTURE);
    auto event = find<Event>(handle);
    std::shared_ptr<Stream> stream = find<Stream>(stream_handle);
    if (!event || !stream) return INVALID_HANDLE;
    if (flags) return INVALID_VALUE;
    if (event->capture || stream->capture) {
        if (!event->capture || (stream->capture && stream->capture != event->capture)) return CAPTURE_ISOLATION;
        if (!stream->capture) stream->capture = event->capture, stream->captured.clear();
        stream->captured.insert(stream->captured.end(), event->nodes.begin(), event->nodes.end());
        stream->capture->graph->forked = true;
        return SUCCESS;
    }
    long ticket = event->recorded;
    enqueue(*stream, [=] {
        std::unique_lock<std::mutex> lock(state.mutex);
        state.changed.wait(lock, [&] { return reached(*event, ticket); });
        return SUCCESS;
    });
    return SUCCESS;
}

int cuMemsetD8Async(uint64_t address, unsigned char value, size_t size, void *handle) {
    BEGIN(CONTEXT | IN_CAPTURE);
    std::shared_ptr<Stream> stream = find<Stream>(handle);
    auto place = device_place(address, size);
    if (stream && stream->capture) {
        if (!place.block || !size) return INVALID_VALUE;
        return capture(*stream, {{}, nullptr, {}, {}, {place.block, place.bytes, size, value}, {}});
    }
    if (int error = usable(handle, stream)) return error;
    if (!place.block) return INVALID_VALUE;
    enqueue(*stream, [=] { return memset(place.bytes, value, size), SUCCESS; });
    return SUCCESS;
}

int cuMemcpyDtoDAsync_v2(uint64_t target, uint64_t source, size_t size, void *stream) {
    BEGIN_END(CONTEXT);
    return copy(call, stream, device_place(target, size), device_place(source, size), size, 500e9);
}

int cuMemcpyHtoDAsync_v2(uint64_t target, const void *source, size_t size, void *stream) {
    BEGIN_END(CONTEXT | IN_CAPTURE);
    return copy(call, stream, device_place(target, size), host_place(source, size), size, 25e9, true);
}

int cuMemcpyDtoHAsync_v2(void *target, uint64_t source, size_t size, void *stream) {
    BEGIN_END(CONTEXT);
    return copy(call, stream, host_place(target, size), device_place(source, size), size, 20e9);
}

}  // extern "C"
