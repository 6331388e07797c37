/* Memory of the GPU and pinned memory of the host; each has its own addresses on the GPU. */

#include "fake.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>

using namespace fake;

namespace fake {

/* Far outside the addresses of a process. */
static const uint64_t DEVICE_OFFSET = 1ULL << 60, MAPPED_OFFSET = 1ULL << 59;
static const size_t GUARD_BYTES = 256;
static const int GUARD = 0xCD, POISON = 0xAB;

Block::Block(size_t size, bool on_host) : size(size), on_host(on_host) {
    size_t whole = (size + 2 * GUARD_BYTES + 255) / 256 * 256;
    base = (char *)aligned_alloc(256, whole), start = base + GUARD_BYTES;
    if (!base) abort();
    memset(base, GUARD, GUARD_BYTES), memset(start + size, GUARD, GUARD_BYTES);
    if (!setting("FAKE_CUDA_DRY", 0)) memset(start, POISON, size);
}

Block::Block(void *address, size_t size) : base(nullptr), start((char *)address), size(size), on_host(true) {}

Block::~Block() { free(base); }

bool Block::whole() const {
    if (!base) return true;
    for (size_t i = 0; i < GUARD_BYTES; i++)
        if ((unsigned char)base[i] != GUARD || (unsigned char)start[size + i] != GUARD) return false;
    return true;
}

template <class Has> static std::shared_ptr<Block> search(Has has) {
    for (auto &entry : state.alive)
        if (auto block = std::dynamic_pointer_cast<Block>(entry.second))
            if (has(*block)) return block;
    return nullptr;
}

static bool reaches(uint64_t start, size_t bytes, uint64_t address, size_t size) {
    return start && address >= start && address - start <= bytes && size <= bytes - (address - start);
}

std::shared_ptr<Block> on_device(uint64_t address, size_t size) {
    return search([=](Block &block) { return reaches(block.device, block.size, address, size); });
}

std::shared_ptr<Block> on_host(const void *address, size_t size) {
    return search([=](Block &block) {
        return block.on_host && reaches((uint64_t)block.start, block.size, (uint64_t)address, size);
    });
}

static long free_bytes() {
    long bytes = setting("FAKE_CUDA_MEMORY", 1L << 30);
    bytes -= bytes / 16;
    for (auto &entry : state.alive)
        if (auto block = std::dynamic_pointer_cast<Block>(entry.second)) bytes -= block->on_host ? 0 : block->size;
    return bytes;
}

/* The driver would wait until the memory is not in use. */
static void check(const Block &block) {
    if (any_busy()) fault("memory was freed while a stream was busy");
    if (!block.whole()) fault("something was written past the end of memory, or before it");
}

/* Whether all pages exist and are writable: others cannot be pinned without a flag that nobody passes. */
static bool writable(const void *address, size_t size) {
    std::ifstream maps("/proc/self/maps");
    uint64_t next = (uint64_t)address, end = next + size;
    for (std::string line; next < end && std::getline(maps, line);) {
        unsigned long first, last;
        char access[8];
        if (sscanf(line.c_str(), "%lx-%lx %7s", &first, &last, access) != 3) continue;
        if (first <= next && next < last && access[1] == 'w') next = last;
    }
    return next >= end;
}

static int free_host(void *address) {
    auto block = find<Block>(address);
    if (!block || !block->on_host || !block->base) return INVALID_VALUE;
    check(*block);
    state.alive.erase(address);
    return SUCCESS;
}

static void own_host(void **address, size_t size, bool mapped) {
    auto block = std::make_shared<Block>(size, true);
    if (mapped) block->device = (uint64_t)block->start + MAPPED_OFFSET;
    state.alive[block->start] = block;
    *address = block->start;
}

}  // namespace fake

extern "C" {

int cuMemGetInfo_v2(size_t *free, size_t *total) {
    BEGIN(CONTEXT);
    *free = free_bytes(), *total = setting("FAKE_CUDA_MEMORY", 1L << 30);
    return SUCCESS;
}

int cuMemAlloc_v2(uint64_t *address, size_t size) {
    BEGIN(CONTEXT);
    if (!size) return INVALID_VALUE;
    if (size > (size_t)free_bytes()) return OUT_OF_MEMORY;
    auto block = std::make_shared<Block>(size, false);
    *address = block->device = (uint64_t)block->start + DEVICE_OFFSET;
    state.alive[(void *)block->device] = block;
    return SUCCESS;
}

int cuMemFree_v2(uint64_t address) {
    BEGIN_END(CONTEXT);
    auto block = find<Block>((void *)address);
    if (!block || block->on_host) return INVALID_VALUE;
    check(*block);
    state.alive.erase((void *)address);
    return call.failed;
}

int cuMemAllocHost_v2(void **address, size_t size) {
    BEGIN(CONTEXT);
    if (!size) return INVALID_VALUE;
    own_host(address, size, false);
    return SUCCESS;
}

int cuMemHostAlloc(void **address, size_t size, unsigned flags) {
    BEGIN(CONTEXT);
    if (!size || flags > 7) return INVALID_VALUE;
    own_host(address, size, flags & 2);
    return SUCCESS;
}

int cuMemHostRegister_v2(void *address, size_t size, unsigned flags) {
    BEGIN(CONTEXT);
    if (!address || !size || flags > 7 || on_host(address, 0)) return INVALID_VALUE;
    if (long refused = setting("FAKE_CUDA_NO_PINNING", 0)) return refused;
    if (!writable(address, size)) return INVALID_VALUE;
    auto block = std::make_shared<Block>(address, size);
    if (flags & 2) block->device = (uint64_t)address + MAPPED_OFFSET;
    state.alive[address] = block;
    return SUCCESS;
}

int cuMemHostUnregister(void *address) {
    BEGIN_END(CONTEXT);
    auto block = find<Block>(address);
    if (!block || block->base) return INVALID_VALUE;
    if (!writable(block->start, block->size)) fault("memory was unmapped while it was pinned");
    check(*block);
    state.alive.erase(address);
    return call.failed;
}

int cuMemHostGetDevicePointer_v2(uint64_t *device, void *address, unsigned flags) {
    BEGIN(CONTEXT);
    auto block = on_host(address, 0);
    if (flags || !block || !block->device) return INVALID_VALUE;
    *device = (uint64_t)address + MAPPED_OFFSET;
    return SUCCESS;
}

int cuMemFreeHost(void *address) {
    BEGIN_END(CONTEXT);
    int freed = free_host(address);
    return call.failed ? call.failed : freed;
}

}  // extern "C"
