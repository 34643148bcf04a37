/* Kernels that are loaded, and their launches: what modules, libraries and graphs share. */
#ifndef KERNELS_H
#define KERNELS_H

#include "graphs.h"
#include "launch.h"

/* An image that a process has loaded: a module or a library with its one kernel. Never freed, so
 * that a stale handle is found out. */
struct loaded {
    struct loaded *next;
    const struct kernel *kernel;
    CUcontext context;     /* of a module; a library belongs to none */
    unsigned shared_bytes; /* what a launch may ask for */
    bool unloaded;
};

extern struct loaded *images;

#define MOST_SHARED_BYTES (227 << 10)

/* All handles of an image are its address and a number, so that one kind is not taken for another.
 */
enum image_handles { MODULE = 1, FUNCTION, LIBRARY, KERNEL };
#define IMAGE_HANDLE(loaded, kind) ((void *)((uintptr_t)(loaded) + (kind)))

/* Return what an image's bytes load, NULL if the library of kernels does not have them. */
struct loaded *image_load(const void *image, CUcontext context);
struct loaded *image_of(const void *handle, enum image_handles kind);

/* Check and copy what a kernel of a context is launched with. */
CUresult kernel_keep(struct kernel_copy *copy, const CUDA_KERNEL_NODE_PARAMS *with,
                     CUcontext context);
/* Run a copy, under the lock, and break the context if it touches what it may not. */
void kernel_run(CUcontext context, void *copy);
/* Launch a kernel, or capture that: the rest of a call. */
CUresult kernel_launch(CUstream handle, const CUDA_KERNEL_NODE_PARAMS *with,
                       const CUlaunchConfig *config);

#endif
