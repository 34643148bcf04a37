/* The settings of both libraries, and the identity of the GPUs that both show. */
#include "standin.h"

struct settings settings;

static long number(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text ? strtol(text, NULL, 10) : otherwise;
}

static bool flag(const char *name) {
    const char *text = getenv(name);
    return text && !strcmp(text, "1");
}

static const char *word(const char *name, const char *otherwise) {
    const char *text = getenv(name);
    /* A copy: the process may change its environment later. */
    return strdup(text ? text : otherwise);
}

void settings_read(void) {
    long devices = number("MX_STANDIN_DEVICES", 2);
    settings = (struct settings){
        .devices = (int)(devices < MAX_DEVICES ? devices : MAX_DEVICES),
        .version = (int)number("MX_STANDIN_VERSION", CUDA_VERSION),
        .compute_capability = (int)number("MX_STANDIN_COMPUTE_CAPABILITY", 90),
        .memory_bytes = (size_t)number("MX_STANDIN_MEMORY_BYTES", 8L << 30),
        .lock_bytes = (size_t)number("MX_STANDIN_LOCK_BYTES", -1),
        .mig_instances = (int)number("MX_STANDIN_MIG", 0),
        .late_us = number("MX_STANDIN_LATE_US", 0),
        .vmm = !flag("MX_STANDIN_NO_VMM"),
        .host_access = flag("MX_STANDIN_HOST_ACCESS"),
        .reuse_addresses = flag("MX_STANDIN_REUSE_ADDRESSES"),
        .protect = flag("MX_STANDIN_PROTECT"),
        .host_numa = !flag("MX_STANDIN_NO_VMM") && !flag("MX_STANDIN_NO_HOST_NUMA"),
        .no_read_only = flag("MX_STANDIN_NO_READ_ONLY"),
        .one_queue = flag("MX_STANDIN_ONE_QUEUE"),
        .load_syncs = flag("MX_STANDIN_LOAD_SYNCS"),
        .small_in_blocks = flag("MX_STANDIN_SMALL_IN_BLOCKS"),
        .hidden_refused = flag("MX_STANDIN_HIDDEN_REFUSED"),
        .exporter_death = flag("MX_STANDIN_EXPORTER_DEATH"),
        .peers = word("MX_STANDIN_PEERS", "all"),
        .nvlink = word("MX_STANDIN_NVLINK", "switch"),
        .log_folder = word("MX_STANDIN_LOG", ""),
        .fail = word("MX_STANDIN_FAIL", ""),
        .capture = word("MX_STANDIN_CAPTURE", ""),
        .graph_order = word("MX_STANDIN_GRAPH_ORDER", "reverse"),
        .kernels = word("MX_STANDIN_KERNELS", ""),
        .root = getenv("MX_STANDIN_ROOT") ? word("MX_STANDIN_ROOT", "") : NULL,
    };
}

bool settings_linked(const char *list, int gpu, int other) {
    if (gpu == other || !strcmp(list, "none")) return false;
    if (!strcmp(list, "all") || !strcmp(list, "switch")) return true;
    for (const char *at = list; at; at = strchr(at, ',')) {
        int first, second;
        at += *at == ',';
        if (sscanf(at, "%d-%d", &first, &second) == 2 &&
            ((first == gpu && second == other) || (first == other && second == gpu)))
            return true;
    }
    return false;
}

void settings_uuid(int gpu, int instance, unsigned char bytes[16]) {
    static const unsigned char common[16] = "mx stand-in GPU";
    memcpy(bytes, common, 16);
    bytes[14] = (unsigned char)(instance + 1);
    bytes[15] = (unsigned char)gpu;
}

void settings_uuid_text(int gpu, int instance, char text[37]) {
    unsigned char bytes[16];
    settings_uuid(gpu, instance, bytes);
    for (int i = 0; i < 16; i++)
        text += sprintf(text, "%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", bytes[i]);
}
