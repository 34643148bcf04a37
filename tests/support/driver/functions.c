/* What is known of loaded kernels, and libraries: modules that belong to no context. */
#include "kernels.h"

CUresult cuLibraryLoadData(CUlibrary *out, const void *image, CUjit_option *options, void **values,
                           unsigned count, CUlibraryOption *more, void **more_values,
                           unsigned more_count) {
    (void)options, (void)values, (void)more, (void)more_values;
    CALL(NEEDS_DRIVER | UNSAFE, "%p, %u, %u", image, count, more_count);
    REQUIRE(image && !count && !more_count, INVALID_VALUE);
    FIND(loaded, image_load(image, NULL), NO_BINARY_FOR_GPU);
    GIVE(out, IMAGE_HANDLE(loaded, LIBRARY));
}

#define FIND_IMAGE(handle, kind) FIND(loaded, image_of(handle, kind), INVALID_HANDLE)

CUresult cuLibraryUnload(CUlibrary library) {
    CALL(UNSAFE, "%p", library);
    FIND_IMAGE(library, LIBRARY);
    FINISH(loaded->unloaded = true);
}

CUresult cuLibraryGetKernelCount(unsigned *count, CUlibrary library) {
    CALL(NEEDS_DRIVER, "%p", library);
    FIND_IMAGE(library, LIBRARY);
    GIVE(count, 1);
}

CUresult cuLibraryEnumerateKernels(CUkernel *kernels, unsigned count, CUlibrary library) {
    CALL(NEEDS_DRIVER, "%p, %u", library, count);
    FIND_IMAGE(library, LIBRARY);
    if (count) *kernels = IMAGE_HANDLE(loaded, KERNEL);
    return call_end(CUDA_SUCCESS);
}

CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name) {
    CALL(NEEDS_DRIVER, "%p, %s", library, name);
    FIND_IMAGE(library, LIBRARY);
    REQUIRE(!strcmp(loaded->kernel->name, name), NOT_FOUND);
    GIVE(kernel, IMAGE_HANDLE(loaded, KERNEL));
}

CUresult cuLibraryGetModule(CUmodule *module, CUlibrary library) {
    CALL(NEEDS_CONTEXT, "%p", library);
    FIND_IMAGE(library, LIBRARY);
    GIVE(module, IMAGE_HANDLE(loaded, MODULE));
}

CUresult cuKernelGetLibrary(CUlibrary *library, CUkernel kernel) {
    CALL(NEEDS_DRIVER, "%p", kernel);
    FIND_IMAGE(kernel, KERNEL);
    GIVE(library, IMAGE_HANDLE(loaded, LIBRARY));
}

CUresult cuKernelGetFunction(CUfunction *function, CUkernel kernel) {
    CALL(NEEDS_CONTEXT, "%p", kernel);
    FIND_IMAGE(kernel, KERNEL);
    GIVE(function, IMAGE_HANDLE(loaded, FUNCTION));
}

CUresult cuKernelGetName(const char **name, CUkernel kernel) {
    CALL(NEEDS_DRIVER, "%p", kernel);
    FIND_IMAGE(kernel, KERNEL);
    GIVE(name, loaded->kernel->name);
}

CUresult cuFuncGetName(const char **name, CUfunction function) {
    CALL(NEEDS_DRIVER, "%p", function);
    FIND_IMAGE(function, FUNCTION);
    GIVE(name, loaded->kernel->name);
}

CUresult cuFuncGetModule(CUmodule *module, CUfunction function) {
    CALL(NEEDS_DRIVER, "%p", function);
    FIND_IMAGE(function, FUNCTION);
    GIVE(module, IMAGE_HANDLE(loaded, MODULE));
}

CUresult cuModuleGetFunctionCount(unsigned *count, CUmodule module) {
    CALL(NEEDS_DRIVER, "%p", module);
    FIND_IMAGE(module, MODULE);
    GIVE(count, 1);
}

CUresult cuModuleEnumerateFunctions(CUfunction *functions, unsigned count, CUmodule module) {
    CALL(NEEDS_DRIVER, "%p, %u", module, count);
    FIND_IMAGE(module, MODULE);
    if (count) *functions = IMAGE_HANDLE(loaded, FUNCTION);
    return call_end(CUDA_SUCCESS);
}

static CUresult parameter(const struct loaded *loaded, size_t at, size_t *offset, size_t *nbytes) {
    REQUIRE(offset && at < loaded->kernel->parameters, INVALID_VALUE);
    if (nbytes) *nbytes = loaded->kernel->layout[at][1];
    GIVE(offset, loaded->kernel->layout[at][0]);
}

CUresult cuFuncGetParamInfo(CUfunction function, size_t at, size_t *offset, size_t *nbytes) {
    CALL(NEEDS_DRIVER, "%p, %zu", function, at);
    FIND_IMAGE(function, FUNCTION);
    return parameter(loaded, at, offset, nbytes);
}

CUresult cuKernelGetParamInfo(CUkernel kernel, size_t at, size_t *offset, size_t *nbytes) {
    CALL(NEEDS_DRIVER, "%p, %zu", kernel, at);
    FIND_IMAGE(kernel, KERNEL);
    return parameter(loaded, at, offset, nbytes);
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    CALL(NEEDS_DRIVER, "%d, %p", attribute, function);
    FIND_IMAGE(function, FUNCTION);
    REQUIRE(value && attribute < CU_FUNC_ATTRIBUTE_MAX, INVALID_VALUE);
    GIVE(value, attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? (int)loaded->kernel->threads
                : attribute == CU_FUNC_ATTRIBUTE_BINARY_VERSION      ? settings.compute_capability
                                                                     : 0);
}
