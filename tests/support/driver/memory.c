/* Device memory as memfds, addresses, cuMemAlloc, pinned and registered memory. */
#include "standin.h"

#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>

#define ALIGNMENT 512
#define SMALL ((size_t)1 << 20)
/* The names of memfds begin with this; an importer reads the purpose and the GPU in them. */
#define NAME "mx-standin"

struct range *ranges;
static struct backing *backings;
static unsigned long long last_id;

size_t page(void) { return (size_t)sysconf(_SC_PAGESIZE); }

/* -- backings --------------------------------------------------------------------------------- */

static size_t memory_used(int device) {
    size_t used = 0;
    for (struct backing *at = backings; at; at = at->next)
        if (at->counted && at->device == device) used += at->nbytes;
    return used < settings.memory_bytes ? used : settings.memory_bytes;
}

/* Take over a descriptor; NULL if there is nothing behind it. */
static struct backing *backing_make(int fd, int gpu, bool counted) {
    struct stat status = {0};
    fstat(fd, &status);
    size_t nbytes = (size_t)status.st_size;
    char *alias = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (alias == MAP_FAILED) {
        close(fd);
        return NULL;
    }
    struct backing *made = calloc(1, sizeof *made);
    *made = (struct backing){backings, fd,    status.st_ino,      gpu,           device_of_gpu(gpu),
                             nbytes,   alias, .counted = counted, .exporter = -1};
    return backings = made;
}

struct backing *backing_new(int device, size_t nbytes, const char *purpose) {
    /* What was asked for counts, not the whole pages of it. */
    if (nbytes > settings.memory_bytes - memory_used(device)) return NULL;
    char name[64];
    snprintf(name, sizeof name, NAME ":%s:%d", purpose, device_gpu(device));
    int fd = memfd_create(name, MFD_CLOEXEC);
    bool sized = !ftruncate(fd, (off_t)round_up(nbytes, page()));
    struct backing *made = backing_make(fd, device_gpu(device), sized);
    if (made && nbytes < SPARSE) memset(made->alias, GARBAGE, made->nbytes);
    return made;
}

struct backing *backing_adopt(int fd, const char *purpose) {
    int gpu;
    char link[64], name[128] = "", format[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    snprintf(format, sizeof format, "/memfd:" NAME ":%s:%%d", purpose);
    if (readlink(link, name, sizeof name - 1) < 0 || sscanf(name, format, &gpu) != 1) {
        close(fd);
        return NULL;
    }
    struct backing *made = backing_make(fd, gpu, false);
    if (made) made->uses = 1;
    return made;
}

void backing_drop(struct backing *backing) {
    if (--backing->uses > 0) return;
    struct backing **at = &backings;
    while (*at != backing)
        at = &(*at)->next;
    *at = backing->next;
    munmap(backing->alias, backing->nbytes);
    close(backing->fd);
    if (backing->exporter >= 0) close(backing->exporter);
    if (backing->address) addresses_release(backing->address, GRANULARITY);
    free(backing);
}

struct backing *backing_find(Handle handle) {
    for (struct backing *at = backings; at; at = at->next)
        if ((uintptr_t)at == handle && at->handles) return at;
    return NULL;
}

/* -- ranges ----------------------------------------------------------------------------------- */

struct range *range_add(enum kind kind, uintptr_t address, size_t nbytes, int device) {
    struct range *made = calloc(1, sizeof *made);
    *made = (struct range){
        ranges, kind, address, nbytes, device, .owner = context_current(), .id = ++last_id};
    return ranges = made;
}

struct range *range_at(uintptr_t address, unsigned kinds) {
    for (struct range *at = ranges; at; at = at->next)
        if (at->kind & kinds && address >= at->address && address - at->address < at->nbytes)
            return at;
    return NULL;
}

bool range_overlaps(uintptr_t address, size_t nbytes) {
    for (struct range *at = ranges; at; at = at->next)
        if (at->kind != RESERVED && at->address < address + nbytes &&
            address < at->address + at->nbytes)
            return true;
    return false;
}

void range_remove(struct range *range) {
    /* First, so that no further piece of a copy finds it. */
    struct range **at = &ranges;
    while (*at != range)
        at = &(*at)->next;
    *at = range->next;
    WAIT_WHILE(range->busy);
    if (range->backing) backing_drop(range->backing);
    free(range);
}

static bool exporter_is_gone(struct backing *backing) {
    struct pollfd ended = {.fd = backing->exporter, .events = POLLIN};
    return settings.exporter_death && backing->exporter >= 0 && poll(&ended, 1, 0) == 1;
}

static bool may_touch(CUcontext context, struct range *range, bool write) {
    unsigned bit = 1u << context->device;
    if (range->kind & HOST_KINDS) return !(write && range->read_only);
    if ((write ? range->writers : range->readers) & bit) return true;
    /* Peer access is about memory of contexts: that of cuMemCreate needs cuMemSetAccess. */
    return range->kind == ALLOCATED &&
           (range->device == context->device || context->peers >> range->device & 1);
}

char *range_touch(CUcontext context, uintptr_t address, bool write, size_t *run,
                  struct range **touched) {
    struct range *range = range_at(address, DEVICE_KINDS | HOST_KINDS);
    if (!range || !may_touch(context, range, write)) return NULL;
    if (range->backing && exporter_is_gone(range->backing)) return NULL;
    size_t inside = address - range->address;
    if (*run > range->nbytes - inside) *run = range->nbytes - inside;
    range->busy++;
    *touched = range;
    if (range->alias) return range->alias + inside;
    return range->backing ? range->backing->alias + range->offset + inside : (char *)address;
}

void range_leave(struct range *range) {
    range->busy--;
    driver_changed();
}

/* -- addresses -------------------------------------------------------------------------------- */

#define UNUSED (MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE)

uintptr_t addresses_reserve(size_t nbytes, uintptr_t wanted) {
    if (wanted) {
        void *found = mmap((void *)wanted, nbytes, PROT_NONE, UNUSED | MAP_FIXED_NOREPLACE, -1, 0);
        if (found == (void *)wanted) return wanted;
        if (found != MAP_FAILED) munmap(found, nbytes);
    }
    char *whole = mmap(NULL, nbytes + GRANULARITY, PROT_NONE, UNUSED, -1, 0);
    if (whole == MAP_FAILED) return 0;
    char *found = (char *)round_up((uintptr_t)whole, GRANULARITY);
    if (found > whole) munmap(whole, (size_t)(found - whole));
    munmap(found + nbytes, (size_t)(whole + GRANULARITY - found));
    return (uintptr_t)found;
}

void addresses_show(uintptr_t address, size_t nbytes, int fd, bool host) {
    if (settings.host_access || host)
        mmap((void *)address, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
}

void addresses_hide(uintptr_t address, size_t nbytes, bool host) {
    if (settings.host_access || host)
        mmap((void *)address, nbytes, PROT_NONE, UNUSED | MAP_FIXED, -1, 0);
}

void addresses_release(uintptr_t address, size_t nbytes) {
    if (settings.reuse_addresses)
        munmap((void *)address, nbytes);
    else
        addresses_hide(address, nbytes, false);
}

/* -- device memory ---------------------------------------------------------------------------- */

CUresult cuMemGetInfo(size_t *left, size_t *total) {
    CALL(NEEDS_CONTEXT, " ");
    *total = settings.memory_bytes;
    GIVE(left, *total - memory_used(context_current()->device));
}

/* Return the block of the device that has room, or a new one. */
static struct backing *block_with_room(int device, size_t nbytes) {
    for (struct backing *at = backings; at; at = at->next)
        if (at->address && at->device == device && GRANULARITY - at->filled >= nbytes) return at;
    struct backing *made = backing_new(device, GRANULARITY, "legacy");
    if (!made) return NULL;
    made->address = addresses_reserve(GRANULARITY, 0);
    made->filled = ALIGNMENT; /* so that no allocation is where its block is */
    addresses_show(made->address, GRANULARITY, made->fd, false);
    return made;
}

CUresult cuMemAlloc(CUdeviceptr *address, size_t nbytes) {
    CALL(NEEDS_CONTEXT | UNSAFE, "%zu", nbytes);
    REQUIRE(nbytes, INVALID_VALUE);
    int device = context_current()->device;
    bool small = settings.small_in_blocks && nbytes < SMALL;
    size_t size = round_up(nbytes, ALIGNMENT);
    FIND(backing, small ? block_with_room(device, size) : backing_new(device, nbytes, "legacy"),
         OUT_OF_MEMORY);
    uintptr_t at = small ? backing->address + backing->filled
                         : addresses_reserve(round_up(nbytes, GRANULARITY), 0);
    struct range *range = range_add(ALLOCATED, at, nbytes, device);
    range->backing = backing;
    range->offset = small ? backing->filled : 0;
    backing->uses++;
    if (small)
        backing->filled += size;
    else
        addresses_show(at, backing->nbytes, backing->fd, false);
    GIVE(address, at);
}

void range_free(struct range *range) {
    uintptr_t address = range->address;
    size_t nbytes = range->nbytes;
    enum kind kind = range->kind;
    bool small = range->backing && range->backing->address;
    range_unalias(range);
    range_remove(range);
    if (kind == PINNED)
        munmap((void *)address, round_up(nbytes, page()));
    else if (kind != REGISTERED && !small)
        addresses_release(address, round_up(nbytes, GRANULARITY));
}

CUresult drain_and_free(uintptr_t address, enum kind kind, CUresult error) {
    struct range *range = range_at(address, kind);
    if (!range || range->address != address) return error;
    streams_drain(range->owner);
    range_free(range);
    return CUDA_SUCCESS;
}

CUresult cuMemFree(CUdeviceptr address) {
    CALL(NEEDS_CONTEXT | UNSAFE, "%#llx", address);
    return call_end(drain_and_free(address, ALLOCATED, CUDA_ERROR_INVALID_VALUE));
}

void memory_end_context(CUcontext context) {
    for (struct range *at = ranges, *next; at; at = next) {
        next = at->next;
        if (at->owner == context && !(at->kind & (MAPPED | RESERVED))) range_free(at);
    }
}

/* -- what is known of an address -------------------------------------------------------------- */

CUresult cuMemGetAddressRange(CUdeviceptr *base, size_t *nbytes, CUdeviceptr address) {
    CALL(NEEDS_CONTEXT, "%#llx", address);
    FIND(range, range_at(address, DEVICE_KINDS), NOT_FOUND);
    if (base) *base = range->address;
    if (nbytes) *nbytes = range->nbytes;
    return call_end(CUDA_SUCCESS);
}

/* Write one attribute; false if it is unknown. The types are those that cuda.h names for each. */
static bool attribute_of(struct range *range, CUdeviceptr address, CUpointer_attribute attribute,
                         void *out) {
    bool host = range->kind & HOST_KINDS || range->device == CU_DEVICE_CPU;
    bool exportable = range->kind == MAPPED && range->backing->exportable;
#define ATTRIBUTE(name, type, value)                                                               \
    case CU_POINTER_ATTRIBUTE_##name: *(type *)out = range->kind ? value : (type)0; return true
    switch ((int)attribute) {
        /* Memory of cuMemCreate belongs to no context. */
        ATTRIBUTE(CONTEXT, CUcontext, range->kind == MAPPED ? NULL : range->owner);
        ATTRIBUTE(MEMORY_TYPE, unsigned, host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE);
        ATTRIBUTE(DEVICE_POINTER, CUdeviceptr, address);
        ATTRIBUTE(HOST_POINTER, void *, host ? (void *)address : NULL);
        ATTRIBUTE(BUFFER_ID, unsigned long long, range->id);
        ATTRIBUTE(IS_MANAGED, bool, false);
        ATTRIBUTE(DEVICE_ORDINAL, int, range->device);
        ATTRIBUTE(IS_LEGACY_CUDA_IPC_CAPABLE, bool, range->kind == ALLOCATED);
        ATTRIBUTE(MEMPOOL_HANDLE, CUmemoryPool, NULL);
        ATTRIBUTE(ALLOWED_HANDLE_TYPES, unsigned long long,
                  exportable ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : 0);
    default: return false;
    }
}

CUresult cuPointerGetAttribute(void *out, CUpointer_attribute attribute, CUdeviceptr address) {
    CALL(NEEDS_CONTEXT, "%d, %#llx", attribute, address);
    struct range *range = range_at(address, DEVICE_KINDS | HOST_KINDS);
    REQUIRE(range && attribute_of(range, address, attribute, out), INVALID_VALUE);
    return call_end(CUDA_SUCCESS);
}

/* "Unlike cuPointerGetAttribute, this function will not return an error when the ptr encountered is
 * not a valid CUDA pointer. Instead, the attributes are assigned default NULL values". UCX relies
 * on it in threads without a context. */
CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute *attributes, void **out,
                                CUdeviceptr address) {
    CALL(NEEDS_DRIVER, "%d and %u more, %#llx", *attributes, count - 1, address);
    struct range nothing = {0}, *range = range_at(address, DEVICE_KINDS | HOST_KINDS);
    for (unsigned i = 0; i < count; i++)
        REQUIRE(attribute_of(range ? range : &nothing, address, attributes[i], out[i]),
                INVALID_VALUE);
    return call_end(CUDA_SUCCESS);
}

/* Synchronous copies of all memory are complete when they return, here. */
CUresult cuPointerSetAttribute(const void *value, CUpointer_attribute attribute,
                               CUdeviceptr address) {
    CALL(NEEDS_CONTEXT, "%u, %d, %#llx", *(const unsigned *)value, attribute, address);
    REQUIRE(attribute == CU_POINTER_ATTRIBUTE_SYNC_MEMOPS && range_at(address, DEVICE_KINDS),
            INVALID_VALUE);
    return call_end(CUDA_SUCCESS);
}
