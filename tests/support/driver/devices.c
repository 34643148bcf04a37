/* Devices and their primary contexts, and how the bindings find every call. */
#include "standin.h"

#include <dlfcn.h>

#define STACK 64

pid_t driver_process;
static int count;
static int gpus[MAX_DEVICES]; /* the machine's GPU behind each ordinal */
static struct CUctx_st contexts[MAX_DEVICES];
static __thread CUcontext stack[STACK];
static __thread int depth;
static unsigned long long last_id;

CUcontext context_current(void) { return depth ? stack[depth - 1] : NULL; }
int device_count(void) { return count; }
int device_gpu(int device) { return device < 0 ? device : gpus[device]; }

int device_of_gpu(int gpu) {
    for (int i = 0; i < count; i++)
        if (gpus[i] == gpu) return i;
    return gpu == CU_DEVICE_CPU ? gpu : CU_DEVICE_INVALID;
}

bool device_reaches(int device, int gpu) {
    return settings_linked(settings.peers, gpus[device], gpu);
}

void context_break(CUcontext context, CUresult error, const char *why) {
    if (context->broken) return;
    context->broken = error;
    log_line("# the context of device %d is broken by error %d: %s", context->device, error, why);
    driver_changed();
}

static int instance(void) { return settings.mig_instances ? 0 : -1; }

/* CUDA_VISIBLE_DEVICES lists numbers or beginnings of UUIDs; what follows an invalid one is not
 * visible (CUDA programming guide, environment variables). */
static void find_devices(void) {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (!visible) {
        for (count = 0; count < settings.devices; count++)
            gpus[count] = count;
        return;
    }
    char *copy = strdup(visible), *rest = NULL;
    for (char *word = strtok_r(copy, ",", &rest); word; word = strtok_r(NULL, ",", &rest)) {
        char *end, text[37];
        int gpu = (int)strtol(word, &end, 10);
        if (*end || end == word) {
            const char *uuid = strncmp(word, "GPU-", 4) && strncmp(word, "MIG-", 4) ? "" : word + 4;
            for (gpu = 0; gpu < settings.devices; gpu++) {
                settings_uuid_text(gpu, instance(), text);
                if (*uuid && !strncmp(uuid, text, strlen(uuid))) break;
            }
        }
        if (gpu < 0 || gpu >= settings.devices || device_of_gpu(gpu) != CU_DEVICE_INVALID) break;
        gpus[count++] = gpu;
    }
    free(copy);
}

CUresult cuInit(unsigned flags) {
    if (!driver_process) {
        driver_lock();
        if (!driver_process) {
            settings_read();
            find_devices();
            for (int i = 0; i < count; i++)
                contexts[i].device = i;
            driver_process = getpid();
        }
        driver_unlock();
    }
    CALL(NEEDS_DRIVER, "%u", flags);
    REQUIRE(flags == 0, INVALID_VALUE);
    return call_end(count ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE);
}

/* It works before cuInit. */
CUresult cuDriverGetVersion(int *version) {
    if (!driver_process) settings_read();
    *version = settings.version;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    CALL(NEEDS_DRIVER, "%d", ordinal);
    REQUIRE(ordinal >= 0 && ordinal < count, INVALID_DEVICE);
    GIVE(device, ordinal);
}

#define REQUIRE_DEVICE(device) REQUIRE((device) >= 0 && (device) < count, INVALID_DEVICE)
#define CALL_DEVICE(...)                                                                           \
    CALL(NEEDS_DRIVER, __VA_ARGS__);                                                               \
    REQUIRE_DEVICE(device)
/* A call that says one thing. */
#define SAYS(name, type, needs, value)                                                             \
    CUresult name(type *out) {                                                                     \
        CALL(needs, " ");                                                                          \
        GIVE(out, value);                                                                          \
    }

CUresult cuDeviceGetName(char *name, int size, CUdevice device) {
    CALL_DEVICE("%d", device);
    FINISH(snprintf(name, (size_t)size, "Stand-in GPU%s",
                    settings.mig_instances ? " MIG 1g.10gb" : ""));
}

CUresult cuDeviceTotalMem(size_t *nbytes, CUdevice device) {
    CALL_DEVICE("%d", device);
    GIVE(nbytes, settings.memory_bytes);
}

CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    CALL_DEVICE("%d", device);
    unsigned char bytes[16];
    /* The second version: "if the device is in MIG mode, returns its MIG UUID which uniquely
     * identifies the subscribed MIG compute instance". */
    settings_uuid(gpus[device], instance(), bytes);
    FINISH(memcpy(uuid->bytes, bytes, sizeof bytes));
}

/* What was built for CUDA 12, as NIXL's UCX is, asks for the first version. */
#ifdef cuDeviceGetUuid
#undef cuDeviceGetUuid
__attribute__((visibility("default"), alias("cuDeviceGetUuid_v2")))
CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device);
#endif

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    CALL_DEVICE("%d, %d", attribute, device);
    *value = 0;
#define ATTRIBUTE(name, says)                                                                      \
    case CU_DEVICE_ATTRIBUTE_##name: *value = says; break
    switch ((int)attribute) {
        ATTRIBUTE(COMPUTE_CAPABILITY_MAJOR, settings.compute_capability / 10);
        ATTRIBUTE(COMPUTE_CAPABILITY_MINOR, settings.compute_capability % 10);
        ATTRIBUTE(VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, settings.vmm);
        ATTRIBUTE(HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, settings.vmm);
        ATTRIBUTE(UNIFIED_ADDRESSING, 1);
        ATTRIBUTE(READ_ONLY_HOST_REGISTER_SUPPORTED, !settings.no_read_only);
        ATTRIBUTE(HOST_NUMA_ID, -1);
        ATTRIBUTE(HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, settings.host_numa);
    }
    return call_end(CUDA_SUCCESS);
}

CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice other) {
    CALL_DEVICE("%d, %d", device, other);
    REQUIRE_DEVICE(other);
    GIVE(can, device_reaches(device, gpus[other]));
}

/* -- contexts --------------------------------------------------------------------------------- */

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    CALL_DEVICE("%d", device);
    if (!contexts[device].retained++) contexts[device].id = ++last_id;
    GIVE(context, &contexts[device]);
}

/* "The context is automatically reset once the last reference to it is released." It stays broken
 * if it was: to go on, "the process must be terminated and relaunched". */
CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
    CALL_DEVICE("%d", device);
    CUcontext context = &contexts[device];
    REQUIRE(context->retained, INVALID_CONTEXT);
    if (context->retained == 1) {
        streams_drain(context);
        streams_end_context(context);
        memory_end_context(context);
        modules_end_context(context);
        context->peers = 0;
        context->default_stream = NULL;
    }
    FINISH(context->retained--);
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    CALL_DEVICE("%d", device);
    REQUIRE(flags && active, INVALID_VALUE);
    *flags = 0;
    GIVE(active, contexts[device].retained > 0);
}

bool context_exists(CUcontext context) {
    return context >= contexts && context < contexts + count && context->retained;
}

CUresult cuCtxPushCurrent(CUcontext context) {
    CALL(NEEDS_DRIVER, "%p", context);
    REQUIRE(context_exists(context) && depth < STACK, INVALID_CONTEXT);
    FINISH(stack[depth++] = context);
}

/* A broken context can be popped: a thread has to be able to leave it. */
CUresult cuCtxPopCurrent(CUcontext *context) {
    CALL(NEEDS_DRIVER, " ");
    REQUIRE(depth, INVALID_CONTEXT);
    depth--;
    if (context) *context = stack[depth];
    return call_end(CUDA_SUCCESS);
}

SAYS(cuDeviceGetCount, int, NEEDS_DRIVER, count)
SAYS(cuCtxGetCurrent, CUcontext, NEEDS_DRIVER, context_current())
SAYS(cuCtxGetDevice, CUdevice, NEEDS_CONTEXT, context_current()->device)
SAYS(cuCtxGetFlags, unsigned, NEEDS_CONTEXT, 0)

CUresult cuCtxGetId(CUcontext context, unsigned long long *id) {
    CALL(NEEDS_DRIVER, "%p", context);
    context = context ? context : context_current();
    REQUIRE(context_exists(context), INVALID_CONTEXT);
    GIVE(id, context->id);
}

CUresult cuCtxSynchronize(void) {
    CALL(NEEDS_CONTEXT | UNSAFE, " ");
    CUcontext context = context_current();
    CUresult held = capture_refuses_any(context);
    if (held) return call_end(held);
    streams_drain(context);
    return call_end(context->broken);
}

CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags) {
    CALL(NEEDS_CONTEXT, "%p, %u", peer, flags);
    CUcontext context = context_current();
    REQUIRE(flags == 0, INVALID_VALUE);
    /* "Returns CUDA_ERROR_INVALID_CONTEXT if there is no current context, peerContext is not a
     * valid context, or if the current context is peerContext." */
    REQUIRE(context_exists(peer) && peer != context, INVALID_CONTEXT);
    REQUIRE(device_reaches(context->device, gpus[peer->device]), PEER_ACCESS_UNSUPPORTED);
    unsigned bit = 1u << peer->device;
    REQUIRE(!(context->peers & bit), PEER_ACCESS_ALREADY_ENABLED);
    FINISH(context->peers |= bit);
}

CUresult cuCtxSetLimit(CUlimit limit, size_t value) {
    CALL(NEEDS_CONTEXT, "%d, %zu", limit, value);
    REQUIRE((unsigned)limit < CU_LIMIT_MAX, UNSUPPORTED_LIMIT);
    FINISH(context_current()->limits[limit] = value);
}

CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
    CALL(NEEDS_CONTEXT, "%d", limit);
    REQUIRE((unsigned)limit < CU_LIMIT_MAX, UNSUPPORTED_LIMIT);
    GIVE(value, context_current()->limits[limit]);
}

/* -- the table of calls ----------------------------------------------------------------------- */

/* The bindings ask for names without versions; the latest version is what cuda.h of the same major
 * declares, and what this library exports. Where it exports two, the later one is of the release in
 * which edges got data. */
#define EDGES 12030

CUresult cuGetProcAddress(const char *name, void **function, int version, cuuint64_t flags,
                          CUdriverProcAddressQueryResult *status) {
    static const char *const suffixes[] = {"_v4", "_v3", "_v2", ""};
    (void)flags;
    Dl_info self;
    *function = NULL;
    if (!dladdr((void *)&driver_process, &self)) return CUDA_ERROR_UNKNOWN;
    /* It is loaded: this only returns its handle, which need not be closed. */
    void *library = dlopen(self.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    for (int i = 0; library && !*function && i < 4; i++) {
        char symbol[128];
        snprintf(symbol, sizeof symbol, "%s%s", name, suffixes[version < EDGES ? 3 - i : i]);
        *function = dlsym(library, symbol);
    }
    if (status)
        *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
