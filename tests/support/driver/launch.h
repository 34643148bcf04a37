/* What the stand-in and a library of kernels (kernels.py makes it) share; without cuda.h, which the
 * library does not need. */
#ifndef LAUNCH_H
#define LAUNCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Memory that a launch has found: device addresses, and where the host sees them. */
struct window {
    uint64_t begin, end;
    char *memory;
};

#define WINDOWS 64
#define MOST_THREADS 1024

struct launch {
    const uint64_t *parameters;
    uint32_t grid_x, grid_y, grid_z, threads;
    uint32_t shared_nbytes;
    /* Return where the host sees an address, and how many bytes lie there in one piece; NULL if the
     * device may not touch it. */
    char *(*find)(struct launch *launch, uint64_t address, bool write, size_t *nbytes);
    struct window windows[2][WINDOWS];
    char *shared;                 /* of the block that runs */
    uint32_t lanes[MOST_THREADS]; /* what its threads tell each other */
    bool failed;
};

/* A kernel by the bytes of its cubin. */
struct kernel {
    const char *name;
    const unsigned char *cubin;
    size_t cubin_nbytes;
    unsigned parameters, threads;
    const uint32_t (*layout)[2]; /* offset and size of each parameter */
    void (*run)(struct launch *launch);
};

#endif
