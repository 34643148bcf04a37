/* Part of each library of kernels: floats, shared memory, and what threads of a warp tell each
 * other, which mx's own kernels need not. */
#include "blocks.h"

#include <math.h>

/* Return where `nbytes` of the block's shared memory are, whose addresses begin at 0. */
static inline void *share(struct thread *thread, uint32_t address, unsigned nbytes) {
    struct launch *launch = thread->launch;
    if (address % nbytes == 0 && (uint64_t)address + nbytes <= launch->shared_nbytes)
        return launch->shared + address;
    launch->failed = true;
    return NULL;
}

/* Registers hold the bits of floats. */
static inline float to_float(uint32_t bits) {
    float found;
    memcpy(&found, &bits, sizeof found);
    return found;
}

static inline uint32_t to_bits(float number) {
    uint32_t found;
    memcpy(&found, &number, sizeof found);
    return found;
}

/* What another thread of the warp has: all threads of the block come here. */
static inline uint32_t butterfly(struct thread *thread, uint32_t value, uint32_t mask) {
    uint32_t *lanes = thread->launch->lanes, other = thread->x ^ mask;
    lanes[thread->x] = value;
    barrier(thread);
    uint32_t found = other < thread->launch->threads ? lanes[other] : value;
    barrier(thread);
    return found;
}
