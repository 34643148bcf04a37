/* libnvidia-ml.so.1: what nvidia-ml-py asks of it for the GPUs of the machine and their links. It
 * shows all GPUs, whatever CUDA_VISIBLE_DEVICES says, as NVML does. */
#include "standin.h"

#include <errno.h>

/* There is no nvml.h in the packages of the tests: what follows is as NVML's reference has it. */
#define RESULTS(EACH)                                                                              \
    EACH(SUCCESS, 0, "Success")                                                                    \
    EACH(ERROR_UNINITIALIZED, 1, "Uninitialized")                                                  \
    EACH(ERROR_INVALID_ARGUMENT, 2, "Invalid Argument")                                            \
    EACH(ERROR_NOT_SUPPORTED, 3, "Not Supported")                                                  \
    EACH(ERROR_NO_PERMISSION, 4, "Insufficient Permissions")                                       \
    EACH(ERROR_NOT_FOUND, 6, "Not Found")                                                          \
    EACH(ERROR_DRIVER_NOT_LOADED, 9, "Driver Not Loaded")
#define CODE(name, code, text) NVML_##name = code,
typedef enum { RESULTS(CODE) } Result;

/* An unsigned number as the handle: one more than the GPU's index, and a bit for its instance. */
typedef void *Device;
#define INSTANCE_SHIFT 8
#define DEVICE(gpu, instance)                                                                      \
    ((Device)(uintptr_t)((gpu) + 1 + (((instance) + 1) << INSTANCE_SHIFT)))
#define GPU(device) ((int)((uintptr_t)(device) & 0xff) - 1)
#define INSTANCE(device) ((int)((uintptr_t)(device) >> INSTANCE_SHIFT) - 1)

typedef struct {
    char busIdLegacy[16];
    unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} PciInfo;

typedef struct {
    unsigned long long total, free, used;
} Memory;

#define API __attribute__((visibility("default"))) Result
#define KNOWN(device)                                                                              \
    do {                                                                                           \
        if (!users) return NVML_ERROR_UNINITIALIZED;                                               \
        if (GPU(device) < 0 || GPU(device) >= settings.devices)                                    \
            return NVML_ERROR_INVALID_ARGUMENT;                                                    \
    } while (0)

enum { LANES_TO_SWITCHES = 18, LANES_TO_A_GPU = 4, ONE_HOST_BRIDGE = 30, SYSTEM = 50 };
static int users;

API nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    settings_read();
    if (settings.root) {
        char path[4096];
        snprintf(path, sizeof path, "%s/dev/nvidiactl", settings.root);
        if (access(path, R_OK | W_OK))
            return errno == EACCES ? NVML_ERROR_NO_PERMISSION : NVML_ERROR_DRIVER_NOT_LOADED;
    }
    users++;
    return NVML_SUCCESS;
}

API nvmlShutdown(void) {
    if (!users) return NVML_ERROR_UNINITIALIZED;
    users--;
    return NVML_SUCCESS;
}

__attribute__((visibility("default"))) const char *nvmlErrorString(Result error) {
#define TEXT(name, code, text) [code] = text,
    static const char *const texts[] = {RESULTS(TEXT)};
    const char *text = (size_t)error < sizeof texts / sizeof *texts ? texts[error] : NULL;
    return text ? text : "Unknown Error";
}

API nvmlSystemGetDriverVersion(char *version, unsigned size) {
    snprintf(version, size, "580.95.05");
    return users ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
}

API nvmlDeviceGetCount_v2(unsigned *count) {
    *count = (unsigned)settings.devices;
    return users ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
}

API nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *device) {
    *device = DEVICE(index, -1);
    KNOWN(*device);
    return NVML_SUCCESS;
}

API nvmlDeviceGetUUID(Device device, char *uuid, unsigned size) {
    KNOWN(device);
    char text[37];
    settings_uuid_text(GPU(device), INSTANCE(device), text);
    snprintf(uuid, size, "%s-%s", INSTANCE(device) < 0 ? "GPU" : "MIG", text);
    return NVML_SUCCESS;
}

API nvmlDeviceGetHandleByUUID(const char *uuid, Device *device) {
    if (!users) return NVML_ERROR_UNINITIALIZED;
    for (int gpu = 0; gpu < settings.devices; gpu++) {
        for (int instance = -1; instance < settings.mig_instances; instance++) {
            char text[64];
            nvmlDeviceGetUUID(*device = DEVICE(gpu, instance), text, sizeof text);
            if (!strcmp(text, uuid)) return NVML_SUCCESS;
        }
    }
    return NVML_ERROR_NOT_FOUND;
}

API nvmlDeviceGetName(Device device, char *name, unsigned size) {
    KNOWN(device);
    snprintf(name, size, "Stand-in GPU%s", INSTANCE(device) < 0 ? "" : " MIG 1g.10gb");
    return NVML_SUCCESS;
}

API nvmlDeviceGetCudaComputeCapability(Device device, int *major, int *minor) {
    KNOWN(device);
    *major = settings.compute_capability / 10;
    *minor = settings.compute_capability % 10;
    return NVML_SUCCESS;
}

/* A call that says one thing of a GPU. */
#define SAYS(name, type, value)                                                                    \
    API nvmlDevice##name(Device device, type *out) {                                               \
        KNOWN(device);                                                                             \
        *out = value;                                                                              \
        return NVML_SUCCESS;                                                                       \
    }

SAYS(GetMemoryInfo, Memory, ((Memory){settings.memory_bytes, settings.memory_bytes, 0}))
SAYS(GetMaxPcieLinkGeneration, unsigned, 5)
SAYS(GetMaxPcieLinkWidth, unsigned, 16)
SAYS(IsMigDeviceHandle, unsigned, INSTANCE(device) >= 0)

static PciInfo pci_info(int gpu) {
    PciInfo info = {.bus = 0x19u + (unsigned)gpu};
    snprintf(info.busIdLegacy, sizeof info.busIdLegacy, "0000:%02X:00.0", info.bus & 0xff);
    snprintf(info.busId, sizeof info.busId, "00000000:%02X:00.0", info.bus & 0xff);
    return info;
}

SAYS(GetPciInfo_v3, PciInfo, pci_info(GPU(device)))

/* -- links ------------------------------------------------------------------------------------ */

static bool switched(void) { return !strcmp(settings.nvlink, "switch"); }

/* Return the GPU that a lane ends at, -1 for a switch, -2 if the lane is not active. */
static int far_end(int gpu, unsigned lane) {
    if (switched()) return lane < LANES_TO_SWITCHES ? -1 : -2;
    for (int other = 0; other < settings.devices; other++) {
        if (!settings_linked(settings.nvlink, gpu, other)) continue;
        if (lane < LANES_TO_A_GPU) return other;
        lane -= LANES_TO_A_GPU;
    }
    return -2;
}

/* A call that says one thing of a lane, if it knows that. */
#define SAYS_OF_LANE(name, type, known, value)                                                     \
    API nvmlDeviceGetNvLink##name(Device device, unsigned lane, type *out) {                       \
        KNOWN(device);                                                                             \
        int far = far_end(GPU(device), lane);                                                      \
        *out = value;                                                                              \
        return known ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;                                    \
    }

SAYS_OF_LANE(State, unsigned, true, far != -2)
SAYS_OF_LANE(Version, unsigned, far != -2, 5)                          /* NVLink 4.0 */
SAYS_OF_LANE(RemoteDeviceType, unsigned, far != -2, far == -1 ? 2 : 0) /* a switch, a GPU */
SAYS_OF_LANE(RemotePciInfo_v2, PciInfo, far >= 0, pci_info(far))

API nvmlDeviceGetP2PStatus(Device device, Device other, unsigned capability, unsigned *status) {
    KNOWN(device);
    KNOWN(other);
    /* Capability 2 is NVLink; 0 and 1 are reads and writes. */
    const char *list = capability == 2 ? settings.nvlink : settings.peers;
    *status = settings_linked(list, GPU(device), GPU(other)) ? 0 : 1;
    return NVML_SUCCESS;
}

API nvmlDeviceGetTopologyCommonAncestor(Device device, Device other, unsigned *level) {
    KNOWN(device);
    KNOWN(other);
    *level = GPU(device) / 4 == GPU(other) / 4 ? ONE_HOST_BRIDGE : SYSTEM;
    return NVML_SUCCESS;
}

/* -- MIG -------------------------------------------------------------------------------------- */

API nvmlDeviceGetMigMode(Device device, unsigned *current, unsigned *pending) {
    KNOWN(device);
    *current = *pending = settings.mig_instances > 0;
    return NVML_SUCCESS;
}

API nvmlDeviceGetMigDeviceHandleByIndex(Device device, unsigned index, Device *instance) {
    KNOWN(device);
    if ((int)index >= settings.mig_instances) return NVML_ERROR_NOT_FOUND;
    *instance = DEVICE(GPU(device), (int)index);
    return NVML_SUCCESS;
}
