/* Memory between processes: legacy IPC handles, and virtual memory management with descriptors. */
#include "standin.h"

#include <sys/syscall.h>

/* -- legacy IPC ------------------------------------------------------------------------------- */

/* What the 64 bytes of a handle say: where the exporter keeps the memory's descriptor, as /proc
 * shows it within one PID namespace, and which file that has to be. */
struct handle {
    char magic[8];
    pid_t process;
    int fd;
    ino_t inode;
    size_t offset, nbytes;
};
static const char MAGIC[8] = "standin";

CUresult cuIpcGetMemHandle(CUipcMemHandle *out, CUdeviceptr address) {
    CALL(NEEDS_CONTEXT, "%#llx", address);
    FIND(range, range_at(address, ALLOCATED), INVALID_VALUE);
    const struct backing *backing = range->backing;
    struct handle handle = {"standin",      getpid(),      backing->fd,
                            backing->inode, range->offset, range->nbytes};
    memset(out, 0, sizeof *out);
    FINISH(memcpy(out, &handle, sizeof handle));
}

static bool refused(const struct backing *backing) {
    return settings.hidden_refused && backing->device == CU_DEVICE_INVALID;
}

/* Return the memory behind a handle, or NULL if it is gone. */
static struct backing *handle_open(const struct handle *handle) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle->process, handle->fd);
    struct backing *backing = backing_adopt(open(path, O_RDWR | O_CLOEXEC), "legacy");
    if (!backing) return NULL;
    backing->exporter = (int)syscall(SYS_pidfd_open, handle->process, 0);
    if (backing->inode == handle->inode) return backing;
    backing_drop(backing);
    return NULL;
}

CUresult cuIpcOpenMemHandle(CUdeviceptr *address, CUipcMemHandle in, unsigned flags) {
    struct handle handle;
    memcpy(&handle, &in, sizeof handle);
    CALL(NEEDS_CONTEXT | UNSAFE, "of process %d, %u", handle.process, flags);
    CUcontext context = context_current();
    REQUIRE(flags == CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, INVALID_VALUE);
    REQUIRE(!memcmp(handle.magic, MAGIC, sizeof MAGIC), INVALID_VALUE);
    /* It can not be opened by the process that made it. */
    REQUIRE(handle.process != getpid(), INVALID_CONTEXT);
    FIND(backing, handle_open(&handle), INVALID_HANDLE);
    /* cuDeviceCanAccessPeer tells whether a mapping is possible. */
    bool reached =
        backing->device == context->device || device_reaches(context->device, backing->gpu);
    if (refused(backing) || !reached) {
        backing_drop(backing);
        return call_end(reached ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
    }
    /* "If the memory handle has already been opened by the current context, the reference count on
     * the handle is incremented by 1 and the existing device pointer is returned." */
    for (struct range *at = ranges; at; at = at->next) {
        if (at->kind != OPENED || at->owner != context || at->backing->inode != backing->inode ||
            at->opened != at->address + handle.offset)
            continue;
        backing_drop(backing);
        at->opens++;
        GIVE(address, at->opened);
    }
    /* cuMemAlloc may cut allocations out of a larger block, which a handle then shares as a whole
     * (CUDA programming guide, interprocess communication). */
    uintptr_t base = addresses_reserve(round_up(backing->nbytes, GRANULARITY), 0);
    bool block = handle.offset > 0;
    struct range *range =
        range_add(OPENED, base, block ? backing->nbytes : handle.nbytes, backing->device);
    range->backing = backing;
    range->opens = 1;
    range->opened = base + handle.offset;
    range->readers = range->writers = 1u << context->device;
    addresses_show(base, backing->nbytes, backing->fd, false);
    GIVE(address, range->opened);
}

/* "When the reference count reaches 0, this API unmaps the memory." No synchronisation is promised:
 * work that is queued finds nothing here. */
CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
    CALL(NEEDS_CONTEXT | UNSAFE, "%#llx", address);
    struct range *range = range_at(address, OPENED);
    REQUIRE(range && range->opened == address, INVALID_VALUE);
    if (!--range->opens) range_free(range);
    return call_end(CUDA_SUCCESS);
}

/* -- virtual memory management: allocations --------------------------------------------------- */

static bool is_device(CUmemLocation at) {
    return at.type == CU_MEM_LOCATION_TYPE_DEVICE && at.id >= 0 && at.id < device_count();
}

/* "On systems where NUMA is not available id must be set to 0": this one has none. */
static const CUmemLocation THE_HOST = {.type = CU_MEM_LOCATION_TYPE_HOST_NUMA};
#define ON_DEVICE(number) (CUmemLocation){.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = number}

static bool is_host(CUmemLocation at) { return at.type == THE_HOST.type && at.id == THE_HOST.id; }

static bool usable(const CUmemAllocationProp *properties) {
    const unsigned other = ~(unsigned)CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    return properties->type == CU_MEM_ALLOCATION_TYPE_PINNED &&
           (is_device(properties->location) || is_host(properties->location)) &&
           !(properties->requestedHandleTypes & other);
}

CUresult cuMemGetAllocationGranularity(size_t *nbytes, const CUmemAllocationProp *properties,
                                       CUmemAllocationGranularity_flags option) {
    CALL(NEEDS_DRIVER, "%d", option);
    REQUIRE(settings.vmm, NOT_SUPPORTED);
    REQUIRE(usable(properties), INVALID_VALUE);
    GIVE(nbytes, GRANULARITY);
}

CUresult cuMemCreate(Handle *handle, size_t nbytes, const CUmemAllocationProp *properties,
                     Flags flags) {
    int device = is_host(properties->location) ? CU_DEVICE_CPU : properties->location.id;
    CALL(UNSAFE, "%zu, device %d", nbytes, device);
    REQUIRE(settings.vmm && (settings.host_numa || device >= 0), NOT_SUPPORTED);
    REQUIRE(usable(properties), INVALID_VALUE);
    REQUIRE(nbytes && nbytes % GRANULARITY == 0 && !flags, INVALID_VALUE);
    FIND(backing, backing_new(device, nbytes, "vmm"), OUT_OF_MEMORY);
    backing->uses = backing->handles = 1;
    backing->exportable = properties->requestedHandleTypes != 0;
    GIVE(handle, (uintptr_t)backing);
}

/* "The memory allocation will be freed when all outstanding mappings to the memory are unmapped and
 * when all outstanding references to the handle (including it's shareable counterparts) are also
 * released." */
CUresult cuMemRelease(Handle handle) {
    CALL(UNSAFE, "%#llx", handle);
    FIND(backing, backing_find(handle), INVALID_VALUE);
    backing->handles--;
    FINISH(backing_drop(backing));
}

CUresult cuMemRetainAllocationHandle(Handle *handle, void *address) {
    CALL(NEEDS_DRIVER, "%p", address);
    FIND(range, range_at((uintptr_t)address, MAPPED), INVALID_VALUE);
    range->backing->handles++;
    range->backing->uses++;
    GIVE(handle, (uintptr_t)range->backing);
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *properties, Handle handle) {
    CALL(NEEDS_DRIVER, "%#llx", handle);
    FIND(backing, backing_find(handle), INVALID_VALUE);
    *properties = (CUmemAllocationProp){
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .requestedHandleTypes = backing->exportable ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : 0,
        .location = backing->device == CU_DEVICE_CPU ? THE_HOST : ON_DEVICE(backing->device),
    };
    return call_end(CUDA_SUCCESS);
}

CUresult cuMemExportToShareableHandle(void *out, Handle handle, CUmemAllocationHandleType type,
                                      Flags flags) {
    CALL(NEEDS_DRIVER, "%#llx, %d", handle, type);
    struct backing *backing = backing_find(handle);
    REQUIRE(type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, NOT_SUPPORTED);
    REQUIRE(backing && backing->exportable && !flags, INVALID_VALUE);
    int fd = fcntl(backing->fd, F_DUPFD_CLOEXEC, 0);
    REQUIRE(fd >= 0, OPERATING_SYSTEM);
    GIVE((int *)out, fd);
}

/* The descriptor comes as a pointer's value, and stays the caller's. */
CUresult cuMemImportFromShareableHandle(Handle *handle, void *in, CUmemAllocationHandleType type) {
    CALL(UNSAFE, "%d, %d", (int)(intptr_t)in, type);
    REQUIRE(settings.vmm && type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, NOT_SUPPORTED);
    int fd = fcntl((int)(intptr_t)in, F_DUPFD_CLOEXEC, 0);
    REQUIRE(fd >= 0, INVALID_VALUE);
    FIND(backing, backing_adopt(fd, "vmm"), INVALID_VALUE);
    backing->handles = backing->exportable = true;
    if (refused(backing)) {
        backing_drop(backing);
        return call_end(CUDA_ERROR_INVALID_DEVICE);
    }
    GIVE(handle, (uintptr_t)backing);
}

/* -- virtual memory management: addresses ----------------------------------------------------- */

/* The driver treats `wanted` "as a hint about where to place the reservation". */
CUresult cuMemAddressReserve(CUdeviceptr *address, size_t nbytes, size_t alignment,
                             CUdeviceptr wanted, Flags flags) {
    CALL(NEEDS_DRIVER, "%zu, %zu, %#llx", nbytes, alignment, wanted);
    REQUIRE(settings.vmm, NOT_SUPPORTED);
    REQUIRE(nbytes && !(nbytes % GRANULARITY) && alignment <= GRANULARITY && !flags, INVALID_VALUE);
    /* A driver of CUDA 13.0 (580.159.04, H200) has smaller ranges, and those that are wished
     * elsewhere than at a multiple of 32 MiB, where it likes. */
    if (wanted % (32 << 20) || nbytes < 32 << 20) wanted = 0;
    FIND(found, addresses_reserve(nbytes, wanted), OUT_OF_MEMORY);
    range_add(RESERVED, found, nbytes, CU_DEVICE_INVALID);
    GIVE(address, found);
}

/* "The size must match what was given to memAddressReserve and the ptr given must match what was
 * returned from memAddressReserve." What is still mapped is not freed. */
CUresult cuMemAddressFree(CUdeviceptr address, size_t nbytes) {
    CALL(NEEDS_DRIVER, "%#llx, %zu", address, nbytes);
    struct range *range = range_at(address, RESERVED);
    REQUIRE(range && range->address == address && range->nbytes == nbytes, INVALID_VALUE);
    REQUIRE(!range_overlaps(address, nbytes), INVALID_VALUE);
    FINISH(range_free(range));
}

CUresult cuMemMap(CUdeviceptr address, size_t nbytes, size_t offset, Handle handle, Flags flags) {
    CALL(NEEDS_DRIVER, "%#llx, %zu, %#llx", address, nbytes, handle);
    struct backing *backing = backing_find(handle);
    /* The offset has to be zero (cuda.h on cuMemMap). */
    REQUIRE(backing && !offset && !flags, INVALID_VALUE);
    struct range *within = range_at(address, RESERVED);
    bool fits = nbytes && (address | nbytes) % GRANULARITY == 0 && nbytes <= backing->nbytes;
    REQUIRE(fits && within && nbytes <= within->address + within->nbytes - address, INVALID_VALUE);
    REQUIRE(!range_overlaps(address, nbytes), INVALID_VALUE);
    struct range *range = range_add(MAPPED, address, nbytes, backing->device);
    range->backing = backing;
    FINISH(backing->uses++);
}

/* Return true for a run of whole maps. */
static bool are_maps(uintptr_t address, size_t nbytes) {
    uintptr_t at = address;
    while (at < address + nbytes) {
        struct range *range = range_at(at, MAPPED);
        if (!range || range->address != at) return false;
        at += range->nbytes;
    }
    return nbytes && at == address + nbytes;
}

/* "cuMemUnmap cannot unmap a sub-range of an address range mapped by cuMemMap." It waits for
 * nothing but the piece of a copy that is being moved: what is queued finds nothing here. */
CUresult cuMemUnmap(CUdeviceptr address, size_t nbytes) {
    CALL(UNSAFE, "%#llx, %zu", address, nbytes);
    REQUIRE(are_maps(address, nbytes), INVALID_VALUE);
    struct range *range;
    for (uintptr_t at = address; at < address + nbytes && (range = range_at(at, MAPPED));) {
        at += range->nbytes;
        addresses_hide(range->address, range->nbytes, range->device == CU_DEVICE_CPU);
        range_remove(range);
    }
    return call_end(CUDA_SUCCESS);
}

static void set_access(struct range *range, unsigned bit, CUmemAccess_flags flags) {
    bool reads = flags & CU_MEM_ACCESS_FLAGS_PROT_READ;
    bool writes = flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    range->readers = (range->readers & ~bit) | (reads ? bit : 0);
    range->writers = (range->writers & ~bit) | (writes ? bit : 0);
    if (reads) addresses_show(range->address, range->nbytes, range->backing->fd, !bit);
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t nbytes, const CUmemAccessDesc *access,
                        size_t count) {
    CALL(NEEDS_DRIVER, "%#llx, %zu, %zu devices", address, nbytes, count);
    REQUIRE(access && count, INVALID_VALUE);
    REQUIRE(are_maps(address, nbytes), INVALID_VALUE);
    struct range *first = range_at(address, MAPPED);
    for (size_t i = 0; i < count; i++) {
        int device = access[i].location.id, host = is_host(access[i].location);
        REQUIRE(host || is_device(access[i].location), INVALID_DEVICE);
        /* "Users cannot specify HOST_NUMA accessibility for allocations created on with other
         * location types." */
        bool ok = !host && (device == first->device || device_reaches(device, first->backing->gpu));
        REQUIRE(ok || first->device == CU_DEVICE_CPU, INVALID_VALUE);
        struct range *range;
        for (uintptr_t at = address; at < address + nbytes; at += range->nbytes) {
            range = range_at(at, MAPPED);
            set_access(range, host ? 0 : 1u << device, access[i].flags);
        }
    }
    return call_end(CUDA_SUCCESS);
}
