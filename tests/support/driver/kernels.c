/* Modules and launches. A cubin loads if the library of kernels that MX_STANDIN_KERNELS names has
 * its bytes; what runs is the library's translation of it (kernels.py). */
#include "kernels.h"

#include <dlfcn.h>

struct run {
    struct launch launch;
    struct kernel_copy copy;
    CUcontext context;
    struct range **touched; /* until it ends: memory that is unmapped meanwhile stays till then */
    size_t touches;
};

struct loaded *images;

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

struct loaded *image_load(const void *image, CUcontext context) {
    struct kernel *at = kernels();
    while (at && at->name && !is_image(image, at))
        at++;
    if (!at || !at->name) return NULL;
    struct loaded *made = calloc(1, sizeof *made);
    *made = (struct loaded){images, at, .context = context, .shared_bytes = 48 << 10};
    return images = made;
}

struct loaded *image_of(const void *handle, enum image_handles kind) {
    for (struct loaded *at = images; at; at = at->next)
        if ((uintptr_t)at + kind == (uintptr_t)handle && !at->unloaded) return at;
    return NULL;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    CALL(NEEDS_CONTEXT | UNSAFE, "%p", image);
    if (settings.load_syncs) streams_drain(context_current());
    FIND(loaded, image_load(image, context_current()), NO_BINARY_FOR_GPU);
    GIVE(module, IMAGE_HANDLE(loaded, MODULE));
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    CALL(NEEDS_CONTEXT, "%p, %s", module, name);
    FIND(loaded, image_of(module, MODULE), INVALID_HANDLE);
    REQUIRE(!strcmp(loaded->kernel->name, name), NOT_FOUND);
    GIVE(function, IMAGE_HANDLE(loaded, FUNCTION));
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

void kernel_run(CUcontext context, void *copy) {
    struct run *run = calloc(1, sizeof *run);
    run->copy = *(struct kernel_copy *)copy;
    const CUDA_KERNEL_NODE_PARAMS *with = &run->copy.with;
    run->launch = (struct launch){
        run->copy.values, with->gridDimX,       with->gridDimY, with->gridDimZ,
        with->blockDimX,  with->sharedMemBytes, .find = find,
    };
    run->context = context;
    const struct loaded *loaded = run->copy.loaded;
    if (!loaded->unloaded) {
        driver_unlock();
        loaded->kernel->run(&run->launch);
        driver_lock();
    }
    for (size_t at = 0; at < run->touches; at++)
        range_leave(run->touched[at]);
    if (run->launch.failed || loaded->unloaded)
        context_break(context, CUDA_ERROR_ILLEGAL_ADDRESS, loaded->kernel->name);
    free(run->touched);
    free(run);
}

CUresult kernel_launch(CUstream handle, const CUDA_KERNEL_NODE_PARAMS *with,
                       const CUlaunchConfig *config) {
    CUstream stream = stream_of(handle);
    REQUIRE(stream, INVALID_HANDLE);
    struct kernel_copy copy;
    CUresult kept = kernel_keep(&copy, with, stream->context);
    if (kept) return call_end(kept);
    for (unsigned at = 0; config && at < config->numAttrs; at++)
        REQUIRE(kernel_attribute_is_known(config->attrs[at].id), INVALID_VALUE);
    CAPTURE(stream, KERNEL, node_launches(node, &copy, config));
    struct kernel_copy *queued = malloc(sizeof *queued);
    *queued = copy;
    FINISH(stream_queue(stream, kernel_run, queued));
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                        unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                        CUstream handle, void **parameters, void **extra) {
    CALL(NEEDS_CONTEXT, "%p, %ux%ux%u, %ux%ux%u, %u, %p", function, grid_x, grid_y, grid_z, block_x,
         block_y, block_z, shared_bytes, handle);
    CUDA_KERNEL_NODE_PARAMS with = {function, grid_x,  grid_y,       grid_z,     block_x,
                                    block_y,  block_z, shared_bytes, parameters, .extra = extra};
    return kernel_launch(handle, &with, NULL);
}
