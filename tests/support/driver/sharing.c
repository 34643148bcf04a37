/* Memory between processes: legacy IPC handles, and virtual memory management with descriptors. */
#include "standin.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

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
    CALL(NEEDS_CONTEXT, "%#llx", (unsigned long long)address);
    struct range *range = range_at(address, ALLOCATED);
    REQUIRE(range, CUDA_ERROR_INVALID_VALUE);
    struct stat status;
    REQUIRE(!fstat(range->backing->fd, &status), CUDA_ERROR_OPERATING_SYSTEM);
    struct handle handle = {"standin", getpid(), range->backing->fd, status.st_ino, range->offset,
                            range->nbytes};
    memset(out, 0, sizeof *out);
    memcpy(out, &handle, sizeof handle);
    return call_end(CUDA_SUCCESS);
}

static bool refused(const struct backing *backing) {
    return settings.hidden_refused && backing->device == CU_DEVICE_INVALID;
}

/* Return the memory behind a handle, or NULL if it is gone. */
static struct backing *handle_open(const struct handle *handle) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle->process, handle->fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    struct stat status;
    if (fd < 0 || fstat(fd, &status) || status.st_ino != handle->inode) {
        close(fd);
        return NULL;
    }
    struct backing *backing = backing_adopt(fd, "legacy");
    if (backing) backing->exporter = (int)syscall(SYS_pidfd_open, handle->process, 0);
    return backing;
}

CUresult cuIpcOpenMemHandle(CUdeviceptr *address, CUipcMemHandle in, unsigned flags) {
    struct handle handle;
    memcpy(&handle, &in, sizeof handle);
    CALL(NEEDS_CONTEXT | UNSAFE, "of process %d, %u", handle.process, flags);
    CUcontext context = context_current();
    REQUIRE(flags == CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(!memcmp(handle.magic, MAGIC, sizeof MAGIC), CUDA_ERROR_INVALID_VALUE);
    /* It can not be opened by the process that made it. */
    REQUIRE(handle.process != getpid(), CUDA_ERROR_INVALID_CONTEXT);
    struct backing *backing = handle_open(&handle);
    REQUIRE(backing, CUDA_ERROR_INVALID_HANDLE);
    backing->uses = 1;
    /* cuDeviceCanAccessPeer tells whether a mapping is possible. */
    bool reached =
        backing->device == context->device || device_reaches(context->device, backing->gpu);
    if (refused(backing) || !reached) {
        backing_drop(backing);
        return call_end(reached ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
    }
    struct stat here, there;
    fstat(backing->fd, &there);
    /* "If the memory handle has already been opened by the current context, the reference count on
     * the handle is incremented by 1 and the existing device pointer is returned." */
    for (struct range *at = range_first(); at; at = at->next) {
        if (at->kind != OPENED || at->owner != context) continue;
        uintptr_t opened = at->address + handle.offset;
        if (at->opened == opened && !fstat(at->backing->fd, &here) && here.st_ino == there.st_ino) {
            backing_drop(backing);
            at->opens++;
            *address = opened;
            return call_end(CUDA_SUCCESS);
        }
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
    addresses_show(base, backing->nbytes, backing->fd);
    *address = range->opened;
    return call_end(CUDA_SUCCESS);
}

/* "When the reference count reaches 0, this API unmaps the memory." No synchronisation is promised:
 * work that is queued finds nothing here. */
CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
    CALL(NEEDS_CONTEXT | UNSAFE, "%#llx", (unsigned long long)address);
    struct range *range = range_at(address, OPENED);
    REQUIRE(range && range->opened == address, CUDA_ERROR_INVALID_VALUE);
    if (!--range->opens) {
        uintptr_t base = range->address;
        size_t nbytes = range->backing->nbytes;
        range_remove(range);
        addresses_release(base, round_up(nbytes, GRANULARITY));
    }
    return call_end(CUDA_SUCCESS);
}

/* -- virtual memory management: allocations --------------------------------------------------- */

static bool usable(const CUmemAllocationProp *properties) {
    return settings.vmm && properties->type == CU_MEM_ALLOCATION_TYPE_PINNED &&
           properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
           properties->location.id >= 0 && properties->location.id < device_count() &&
           (properties->requestedHandleTypes | CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) ==
               CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
}

CUresult cuMemGetAllocationGranularity(size_t *nbytes, const CUmemAllocationProp *properties,
                                       CUmemAllocationGranularity_flags option) {
    CALL(NEEDS_DRIVER, "%d", option);
    REQUIRE(usable(properties), settings.vmm ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_NOT_SUPPORTED);
    *nbytes = GRANULARITY;
    return call_end(CUDA_SUCCESS);
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t nbytes,
                     const CUmemAllocationProp *properties, unsigned long long flags) {
    CALL(UNSAFE, "%zu, device %d", nbytes, properties->location.id);
    REQUIRE(usable(properties), settings.vmm ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_NOT_SUPPORTED);
    REQUIRE(nbytes && nbytes % GRANULARITY == 0 && !flags, CUDA_ERROR_INVALID_VALUE);
    struct backing *backing = backing_new(properties->location.id, nbytes, "vmm");
    REQUIRE(backing, CUDA_ERROR_OUT_OF_MEMORY);
    backing->uses = backing->handles = 1;
    backing->exportable = properties->requestedHandleTypes != 0;
    *handle = (uintptr_t)backing;
    return call_end(CUDA_SUCCESS);
}

/* "The memory allocation will be freed when all outstanding mappings to the memory are unmapped and
 * when all outstanding references to the handle (including it's shareable counterparts) are also
 * released." */
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    CALL(UNSAFE, "%#llx", handle);
    struct backing *backing = backing_find(handle);
    REQUIRE(backing, CUDA_ERROR_INVALID_VALUE);
    backing->handles--;
    backing_drop(backing);
    return call_end(CUDA_SUCCESS);
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
    CALL(NEEDS_DRIVER, "%p", address);
    struct range *range = range_at((uintptr_t)address, MAPPED);
    REQUIRE(range, CUDA_ERROR_INVALID_VALUE);
    range->backing->handles++;
    range->backing->uses++;
    *handle = (uintptr_t)range->backing;
    return call_end(CUDA_SUCCESS);
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *properties,
                                                CUmemGenericAllocationHandle handle) {
    CALL(NEEDS_DRIVER, "%#llx", handle);
    struct backing *backing = backing_find(handle);
    REQUIRE(backing, CUDA_ERROR_INVALID_VALUE);
    *properties = (CUmemAllocationProp){
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .requestedHandleTypes = backing->exportable ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : 0,
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = backing->device},
    };
    return call_end(CUDA_SUCCESS);
}

CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType type, unsigned long long flags) {
    CALL(NEEDS_DRIVER, "%#llx, %d", handle, type);
    struct backing *backing = backing_find(handle);
    REQUIRE(type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CUDA_ERROR_NOT_SUPPORTED);
    REQUIRE(backing && backing->exportable && !flags, CUDA_ERROR_INVALID_VALUE);
    int fd = fcntl(backing->fd, F_DUPFD_CLOEXEC, 0);
    REQUIRE(fd >= 0, CUDA_ERROR_OPERATING_SYSTEM);
    *(int *)out = fd;
    return call_end(CUDA_SUCCESS);
}

/* The descriptor comes as a pointer's value, and stays the caller's. */
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *in,
                                        CUmemAllocationHandleType type) {
    CALL(UNSAFE, "%d, %d", (int)(intptr_t)in, type);
    REQUIRE(settings.vmm && type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            CUDA_ERROR_NOT_SUPPORTED);
    int fd = fcntl((int)(intptr_t)in, F_DUPFD_CLOEXEC, 0);
    REQUIRE(fd >= 0, CUDA_ERROR_INVALID_VALUE);
    struct backing *backing = backing_adopt(fd, "vmm");
    REQUIRE(backing, CUDA_ERROR_INVALID_VALUE);
    backing->uses = backing->handles = 1;
    backing->exportable = true;
    if (refused(backing)) {
        backing_drop(backing);
        return call_end(CUDA_ERROR_INVALID_DEVICE);
    }
    *handle = (uintptr_t)backing;
    return call_end(CUDA_SUCCESS);
}

/* -- virtual memory management: addresses ----------------------------------------------------- */

static struct reservation {
    struct reservation *next;
    uintptr_t address;
    size_t nbytes;
} *reservations;

static bool reserved(uintptr_t address, size_t nbytes) {
    for (struct reservation *at = reservations; at; at = at->next)
        if (address >= at->address && address + nbytes <= at->address + at->nbytes) return true;
    return false;
}

/* The driver treats `wanted` "as a hint about where to place the reservation". */
CUresult cuMemAddressReserve(CUdeviceptr *address, size_t nbytes, size_t alignment,
                             CUdeviceptr wanted, unsigned long long flags) {
    CALL(NEEDS_DRIVER, "%zu, %zu, %#llx", nbytes, alignment, (unsigned long long)wanted);
    REQUIRE(settings.vmm, CUDA_ERROR_NOT_SUPPORTED);
    REQUIRE(nbytes && nbytes % GRANULARITY == 0 && alignment <= GRANULARITY && !flags,
            CUDA_ERROR_INVALID_VALUE);
    uintptr_t found = addresses_reserve(nbytes, wanted % GRANULARITY ? 0 : wanted);
    REQUIRE(found, CUDA_ERROR_OUT_OF_MEMORY);
    struct reservation *made = calloc(1, sizeof *made);
    *made = (struct reservation){reservations, found, nbytes};
    reservations = made;
    *address = found;
    return call_end(CUDA_SUCCESS);
}

/* "The size must match what was given to memAddressReserve and the ptr given must match what was
 * returned from memAddressReserve." What is still mapped is not freed. */
CUresult cuMemAddressFree(CUdeviceptr address, size_t nbytes) {
    CALL(NEEDS_DRIVER, "%#llx, %zu", (unsigned long long)address, nbytes);
    struct reservation **at = &reservations;
    while (*at && ((*at)->address != address || (*at)->nbytes != nbytes))
        at = &(*at)->next;
    REQUIRE(*at && !range_overlaps(address, nbytes), CUDA_ERROR_INVALID_VALUE);
    struct reservation *found = *at;
    *at = found->next;
    free(found);
    addresses_release(address, nbytes);
    return call_end(CUDA_SUCCESS);
}

CUresult cuMemMap(CUdeviceptr address, size_t nbytes, size_t offset,
                  CUmemGenericAllocationHandle handle, unsigned long long flags) {
    CALL(NEEDS_DRIVER, "%#llx, %zu, %#llx", (unsigned long long)address, nbytes, handle);
    struct backing *backing = backing_find(handle);
    /* The offset has to be zero (cuda.h on cuMemMap). */
    REQUIRE(backing && !offset && !flags, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(nbytes && address % GRANULARITY == 0 && nbytes % GRANULARITY == 0 &&
                nbytes <= backing->nbytes,
            CUDA_ERROR_INVALID_VALUE);
    REQUIRE(reserved(address, nbytes) && !range_overlaps(address, nbytes),
            CUDA_ERROR_INVALID_VALUE);
    struct range *range = range_add(MAPPED, address, nbytes, backing->device);
    range->backing = backing;
    backing->uses++;
    return call_end(CUDA_SUCCESS);
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
    CALL(UNSAFE, "%#llx, %zu", (unsigned long long)address, nbytes);
    REQUIRE(are_maps(address, nbytes), CUDA_ERROR_INVALID_VALUE);
    struct range *range;
    for (uintptr_t at = address; at < address + nbytes && (range = range_at(at, MAPPED));) {
        at += range->nbytes;
        addresses_hide(range->address, range->nbytes);
        range_remove(range);
    }
    return call_end(CUDA_SUCCESS);
}

static void set_access(struct range *range, unsigned bit, CUmemAccess_flags flags) {
    bool reads = flags & CU_MEM_ACCESS_FLAGS_PROT_READ;
    bool writes = flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    range->readers = (range->readers & ~bit) | (reads ? bit : 0);
    range->writers = (range->writers & ~bit) | (writes ? bit : 0);
    if (reads) addresses_show(range->address, range->nbytes, range->backing->fd);
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t nbytes, const CUmemAccessDesc *access,
                        size_t count) {
    CALL(NEEDS_DRIVER, "%#llx, %zu, %zu devices", (unsigned long long)address, nbytes, count);
    REQUIRE(access && count, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(are_maps(address, nbytes), CUDA_ERROR_INVALID_VALUE);
    struct range *first = range_at(address, MAPPED);
    for (size_t i = 0; i < count; i++) {
        int device = access[i].location.id;
        REQUIRE(access[i].location.type == CU_MEM_LOCATION_TYPE_DEVICE && device >= 0 &&
                    device < device_count(),
                CUDA_ERROR_INVALID_DEVICE);
        REQUIRE(device == first->device || device_reaches(device, first->backing->gpu),
                CUDA_ERROR_INVALID_VALUE);
        struct range *range;
        for (uintptr_t at = address; at < address + nbytes; at += range->nbytes) {
            range = range_at(at, MAPPED);
            set_access(range, 1u << device, access[i].flags);
        }
    }
    return call_end(CUDA_SUCCESS);
}
