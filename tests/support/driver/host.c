/* Host memory: pinned, which the driver allocates, and registered, which the process has. */
#include "standin.h"

#include <sys/mman.h>

CUresult cuMemHostAlloc(void **address, size_t nbytes, unsigned flags) {
    CALL(NEEDS_CONTEXT | UNSAFE, "%zu, %#x", nbytes, flags);
    REQUIRE(nbytes, INVALID_VALUE);
    void *found = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(found != MAP_FAILED, OUT_OF_MEMORY);
    memset(found, GARBAGE, nbytes);
    range_add(PINNED, (uintptr_t)found, nbytes, context_current()->device);
    GIVE(address, found);
}

CUresult cuMemFreeHost(void *address) {
    CALL(NEEDS_CONTEXT | UNSAFE, "%p", address);
    return call_end(drain_and_free((uintptr_t)address, PINNED, CUDA_ERROR_INVALID_VALUE));
}

/* Fault pages in, as pinning does, and return how they are mapped: PROT_NONE if they are not. */
static int populate(uintptr_t begin, uintptr_t end) {
    if (!madvise((void *)begin, end - begin, MADV_POPULATE_WRITE)) return PROT_READ | PROT_WRITE;
    return madvise((void *)begin, end - begin, MADV_POPULATE_READ) ? PROT_NONE : PROT_READ;
}

static size_t registered(void) {
    size_t nbytes = 0;
    for (struct range *at = ranges; at; at = at->next)
        if (at->kind == REGISTERED) nbytes += at->nbytes;
    return nbytes;
}

/* The device gets a map of its own of shared memory: with an old size of 0 mremap makes another one
 * of the same pages. */
static void alias(struct range *range, int protection) {
    if (!settings.protect || range->address % page()) return;
    void *made = mremap((void *)range->address, 0, range->nbytes, MREMAP_MAYMOVE);
    if (made == MAP_FAILED) return; /* private memory */
    range->alias = made;
    range->protection = protection;
    mprotect((void *)range->address, range->nbytes, range->read_only ? PROT_NONE : PROT_READ);
    log_line("# %zu bytes at %#lx are moved elsewhere", range->nbytes, range->address);
}

void range_unalias(struct range *range) {
    if (!range->alias) return;
    WAIT_WHILE(range->busy);
    mprotect((void *)range->address, range->nbytes, range->protection);
    munmap(range->alias, range->nbytes);
    range->alias = NULL;
}

/* The flag "is required in order to register memory mapped to the CPU as read-only", and refused by
 * a device without the attribute. A page is registered once. */
CUresult cuMemHostRegister(void *address, size_t nbytes, unsigned flags) {
    CALL(NEEDS_CONTEXT | UNSAFE, "%p, %zu, %#x", address, nbytes, flags);
    bool read_only = flags & CU_MEMHOSTREGISTER_READ_ONLY;
    uintptr_t begin = (uintptr_t)address - (uintptr_t)address % page();
    uintptr_t end = round_up((uintptr_t)address + nbytes, page());
    REQUIRE(!read_only || !settings.no_read_only, NOT_SUPPORTED);
    REQUIRE(nbytes, INVALID_VALUE);
    REQUIRE(!range_overlaps(begin, end - begin), HOST_MEMORY_ALREADY_REGISTERED);
    REQUIRE(nbytes <= settings.lock_bytes - registered(), OUT_OF_MEMORY);
    int protection = populate(begin, end);
    REQUIRE(protection & (read_only ? PROT_READ : PROT_WRITE), INVALID_VALUE);
    int device = context_current()->device;
    struct range *range = range_add(REGISTERED, (uintptr_t)address, nbytes, device);
    range->read_only = read_only;
    FINISH(alias(range, protection));
}

/* "The base address must be the same one specified to cuMemHostRegister()." */
CUresult cuMemHostUnregister(void *address) {
    CALL(NEEDS_CONTEXT | UNSAFE, "%p", address);
    return call_end(
        drain_and_free((uintptr_t)address, REGISTERED, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED));
}

/* With unified addressing the device's address of pinned memory is the host's. */
CUresult cuMemHostGetDevicePointer(CUdeviceptr *found, void *address, unsigned flags) {
    CALL(NEEDS_CONTEXT, "%p, %u", address, flags);
    REQUIRE(!flags && range_at((uintptr_t)address, HOST_KINDS), INVALID_VALUE);
    GIVE(found, (CUdeviceptr)(uintptr_t)address);
}

bool host_is_split(uintptr_t address, size_t nbytes) {
    struct range *range = range_at(address, REGISTERED);
    return range && nbytes > range->address + range->nbytes - address;
}
