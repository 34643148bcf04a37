/* Modules and launches. A cubin loads if the library of kernels that MX_STANDIN_KERNELS names has
 * its bytes; what runs is the library's translation of it (kernels.py). */
#include "launch.h"
#include "standin.h"

#include <dlfcn.h>

#define MOST_PARAMETERS 16

/* A module is its one kernel, and so is the function in it. */
#define KERNEL(handle) ((struct kernel *)(handle))

struct run {
    struct launch launch;
    const struct kernel *kernel;
    CUcontext context;
    struct range **touched; /* until it ends: memory that is unmapped meanwhile stays till then */
    size_t touches;
    uint64_t parameters[MOST_PARAMETERS];
};

static struct kernel *kernels(void) {
    static struct kernel *found;
    if (!found && *settings.kernels) {
        void *library = dlopen(settings.kernels, RTLD_NOW | RTLD_LOCAL);
        found = library ? dlsym(library, "kernels") : NULL;
        if (!found) log_line("# %s", dlerror());
    }
    return found;
}

/* An image has no length: it is compared no further than its first other byte. */
static bool is_image(const unsigned char *image, const struct kernel *kernel) {
    size_t at = 0;
    while (at < kernel->cubin_nbytes && image[at] == kernel->cubin[at])
        at++;
    return at == kernel->cubin_nbytes;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    CALL(NEEDS_CONTEXT | UNSAFE, "%p", image);
    if (settings.load_syncs) streams_drain(context_current());
    struct kernel *at = kernels();
    while (at && at->name && !is_image(image, at))
        at++;
    REQUIRE(at && at->name, NO_BINARY_FOR_GPU);
    GIVE(module, (CUmodule)at);
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    CALL(NEEDS_CONTEXT, "%p, %s", module, name);
    REQUIRE(module, INVALID_HANDLE);
    REQUIRE(!strcmp(KERNEL(module)->name, name), NOT_FOUND);
    GIVE(function, (CUfunction)module);
}

static char *find(struct launch *launch, uint64_t address, bool write, size_t *nbytes) {
    struct run *run = (struct run *)launch;
    struct range *range;
    *nbytes = SIZE_MAX;
    driver_lock();
    char *memory = range_touch(run->context, address, write, nbytes, &range);
    if (memory) {
        run->touched = realloc(run->touched, (run->touches + 1) * sizeof range);
        run->touched[run->touches++] = range;
    }
    driver_unlock();
    return memory;
}

static void run_kernel(CUcontext context, void *argument) {
    struct run *run = argument;
    run->context = context;
    driver_unlock();
    run->kernel->run(&run->launch);
    driver_lock();
    for (size_t at = 0; at < run->touches; at++)
        range_leave(run->touched[at]);
    free(run->touched);
    if (run->launch.failed) context_break(context, CUDA_ERROR_ILLEGAL_ADDRESS, run->kernel->name);
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                        unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                        CUstream handle, void **parameters, void **extra) {
    CALL(NEEDS_CONTEXT, "%p, %ux%ux%u, %ux%ux%u, %u, %p", function, grid_x, grid_y, grid_z, block_x,
         block_y, block_z, shared_bytes, handle);
    CUstream stream = stream_of(handle);
    REQUIRE(function && stream, INVALID_HANDLE);
    REQUIRE(grid_x && grid_y && grid_z && block_x && block_x <= 1024, INVALID_VALUE);
    /* What mx's kernels don't need is not translated. */
    REQUIRE(block_y == 1 && block_z == 1 && !shared_bytes && !extra, NOT_SUPPORTED);
    REQUIRE(KERNEL(function)->parameters <= MOST_PARAMETERS, NOT_SUPPORTED);
    REQUIRE(!capture_has(stream), NOT_SUPPORTED);
    struct run *run = calloc(1, sizeof *run);
    run->kernel = KERNEL(function);
    run->launch = (struct launch){run->parameters, grid_x, grid_y, grid_z, block_x, .find = find};
    /* "The number of kernel parameters and their offsets and sizes" are copied by this call. */
    for (unsigned at = 0; at < KERNEL(function)->parameters; at++)
        memcpy(&run->parameters[at], parameters[at], sizeof run->parameters[at]);
    FINISH(stream_queue(stream, run_kernel, run));
}
