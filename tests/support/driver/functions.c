/* What loaded kernels are and may be given, and libraries: modules that belong to no context. */
#include "kernels.h"

#define FIND_IMAGE(handle, kind) FIND(loaded, image_of(handle, kind), INVALID_HANDLE)

CUresult cuLibraryLoadData(CUlibrary *out, const void *image, CUjit_option *options, void **values,
                           unsigned count, CUlibraryOption *more, void **more_values,
                           unsigned more_count) {
    (void)options, (void)values, (void)more, (void)more_values;
    CALL(NEEDS_DRIVER | UNSAFE, "%p, %u, %u", image, count, more_count);
    REQUIRE(image && !count && !more_count, INVALID_VALUE);
    FIND(loaded, image_load(image, NULL), NO_BINARY_FOR_GPU);
    GIVE(out, IMAGE_HANDLE(loaded, LIBRARY));
}

CUresult cuLibraryUnload(CUlibrary library) {
    CALL(UNSAFE, "%p", library);
    FIND_IMAGE(library, LIBRARY);
    FINISH(loaded->unloaded = true);
}

void modules_end_context(CUcontext context) {
    for (struct loaded *at = images; at; at = at->next)
        at->unloaded |= at->context == context;
}

CUresult cuModuleUnload(CUmodule module) {
    CALL(NEEDS_CONTEXT | UNSAFE, "%p", module);
    FIND_IMAGE(module, MODULE);
    REQUIRE(loaded->context, INVALID_HANDLE); /* a library's goes with it */
    FINISH(loaded->unloaded = true);
}

/* A call that says one thing of what a handle is. */
#define SAYS(name, type, handle_type, kind, needs, value)                                          \
    CUresult name(type *out, handle_type handle) {                                                 \
        CALL(needs, "%p", handle);                                                                 \
        FIND_IMAGE(handle, kind);                                                                  \
        GIVE(out, value);                                                                          \
    }
#define IMAGE(kind) IMAGE_HANDLE(loaded, kind)

SAYS(cuLibraryGetKernelCount, unsigned, CUlibrary, LIBRARY, NEEDS_DRIVER, 1)
SAYS(cuLibraryGetModule, CUmodule, CUlibrary, LIBRARY, NEEDS_CONTEXT, IMAGE(MODULE))
SAYS(cuKernelGetLibrary, CUlibrary, CUkernel, KERNEL, NEEDS_DRIVER, IMAGE(LIBRARY))
SAYS(cuKernelGetFunction, CUfunction, CUkernel, KERNEL, NEEDS_CONTEXT, IMAGE(FUNCTION))
SAYS(cuKernelGetName, const char *, CUkernel, KERNEL, NEEDS_DRIVER, loaded->kernel->name)
SAYS(cuFuncGetName, const char *, CUfunction, FUNCTION, NEEDS_DRIVER, loaded->kernel->name)
SAYS(cuFuncGetModule, CUmodule, CUfunction, FUNCTION, NEEDS_DRIVER, IMAGE(MODULE))

CUresult cuLibraryEnumerateKernels(CUkernel *kernels, unsigned count, CUlibrary library) {
    CALL(NEEDS_DRIVER, "%p, %u", library, count);
    FIND_IMAGE(library, LIBRARY);
    if (count) *kernels = IMAGE(KERNEL);
    return call_end(CUDA_SUCCESS);
}

CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name) {
    CALL(NEEDS_DRIVER, "%p, %s", library, name);
    FIND_IMAGE(library, LIBRARY);
    REQUIRE(!strcmp(loaded->kernel->name, name), NOT_FOUND);
    GIVE(kernel, IMAGE(KERNEL));
}

#define TELLS_PARAMETERS(name, handle_type, kind)                                                  \
    CUresult name(handle_type handle, size_t at, size_t *offset, size_t *nbytes) {                 \
        CALL(NEEDS_DRIVER, "%p, %zu", handle, at);                                                 \
        FIND_IMAGE(handle, kind);                                                                  \
        REQUIRE(offset && at < loaded->kernel->parameters, INVALID_VALUE);                         \
        if (nbytes) *nbytes = loaded->kernel->layout[at][1];                                       \
        GIVE(offset, loaded->kernel->layout[at][0]);                                               \
    }

TELLS_PARAMETERS(cuFuncGetParamInfo, CUfunction, FUNCTION)
TELLS_PARAMETERS(cuKernelGetParamInfo, CUkernel, KERNEL)

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    CALL(NEEDS_DRIVER, "%d, %p", attribute, function);
    FIND_IMAGE(function, FUNCTION);
    REQUIRE(value && attribute < CU_FUNC_ATTRIBUTE_MAX, INVALID_VALUE);
    switch ((int)attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: GIVE(value, (int)loaded->kernel->threads);
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION: GIVE(value, settings.compute_capability);
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: GIVE(value, (int)loaded->shared_bytes);
    }
    GIVE(value, 0);
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
    CALL(NEEDS_DRIVER, "%p, %d, %d", function, attribute, value);
    FIND_IMAGE(function, FUNCTION);
    if (attribute == CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED)
        return call_end(CUDA_SUCCESS);
    REQUIRE(attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, INVALID_VALUE);
    REQUIRE(value >= 0 && value <= MOST_SHARED_BYTES, INVALID_VALUE);
    FINISH(loaded->shared_bytes = (unsigned)value);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *of, CUfunction function, void **parameters,
                          void **extra) {
    CALL(NEEDS_CONTEXT, "%p, %ux%ux%u, %u attributes, %p", function, of->gridDimX, of->gridDimY,
         of->gridDimZ, of->numAttrs, of->hStream);
    CUDA_KERNEL_NODE_PARAMS with = {function,      of->gridDimX,  of->gridDimY,  of->gridDimZ,
                                    of->blockDimX, of->blockDimY, of->blockDimZ, of->sharedMemBytes,
                                    parameters,    .extra = extra};
    return kernel_launch(of->hStream, &with, of);
}

CUresult kernel_keep(struct kernel_copy *copy, const CUDA_KERNEL_NODE_PARAMS *with,
                     CUcontext context) {
    struct loaded *loaded = with->func ? image_of(with->func, FUNCTION) : NULL;
    /* A kernel may be launched by its own handle. */
    const void *kernel = with->func ? (void *)with->func : (void *)with->kern;
    if (!loaded) loaded = image_of(kernel, KERNEL);
    if (!loaded || (loaded->context && loaded->context != context))
        return CUDA_ERROR_INVALID_HANDLE;
    if (!with->gridDimX || !with->gridDimY || !with->gridDimZ ||
        with->blockDimX != loaded->kernel->threads || with->sharedMemBytes > loaded->shared_bytes ||
        !with->kernelParams)
        return CUDA_ERROR_INVALID_VALUE;
    /* What mx's kernels don't need is not translated. */
    if (with->blockDimY != 1 || with->blockDimZ != 1 || with->extra ||
        loaded->kernel->parameters > MOST_PARAMETERS)
        return CUDA_ERROR_NOT_SUPPORTED;
    *copy = (struct kernel_copy){.loaded = loaded, .with = *with};
    /* "The number of kernel parameters and their offsets and sizes" are copied by the call. */
    for (unsigned at = 0; at < loaded->kernel->parameters; at++)
        memcpy((char *)copy->values + loaded->kernel->layout[at][0], with->kernelParams[at],
               loaded->kernel->layout[at][1]);
    bool is_kernel = image_of(kernel, KERNEL) == loaded;
    copy->with.func = is_kernel ? NULL : (CUfunction)kernel;
    copy->with.kern = is_kernel ? (CUkernel)kernel : NULL;
    copy->with.ctx = context;
    return CUDA_SUCCESS;
}
