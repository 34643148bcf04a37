/* Part of each library of kernels: how a kernel's threads run, and reach memory. */
#include "launch.h"

#include <setjmp.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

struct thread {
    struct launch *launch;
    uint32_t x, block_x, block_y, block_z;
    void (*body)(struct thread *thread);
    ucontext_t start; /* how it begins; after that `here` is where it goes on */
    jmp_buf here;
    bool begun, ended;
};

#define STACK_BYTES ((size_t)128 << 10)

/* Return where `nbytes` at an address are; NULL if they can't be touched, and the launch fails. */
static inline void *reach(struct thread *thread, uint64_t address, unsigned nbytes, bool write) {
    struct launch *launch = thread->launch;
    struct window *at = &launch->windows[write][address >> 16 & (WINDOWS - 1)];
    if (address < at->begin || address + nbytes > at->end) {
        size_t run = nbytes;
        char *memory = address % nbytes ? NULL : launch->find(launch, address, write, &run);
        if (!memory || run < nbytes) {
            launch->failed = true;
            return NULL;
        }
        *at = (struct window){address, address + run, memory};
    }
    return at->memory + (address - at->begin);
}

static _Thread_local struct thread *running;
static _Thread_local jmp_buf scheduler;

static void enter(void) {
    running->body(running);
    running->ended = true;
    _longjmp(scheduler, 1);
}

static inline void barrier(struct thread *thread) {
    if (!_setjmp(thread->here)) _longjmp(scheduler, 1);
}

/* Run a thread up to its next barrier. Jumps, since swapcontext takes two calls of the kernel. */
static __attribute__((noinline)) void resume(struct thread *thread) {
    running = thread;
    if (_setjmp(scheduler)) return;
    if (thread->begun) _longjmp(thread->here, 1);
    thread->begun = true;
    setcontext(&thread->start);
}

/* Threads of a block with barriers are coroutines: each runs up to the next barrier in turn. */
static inline void run_turns(struct thread *threads, uint32_t count, char *stacks) {
    for (uint32_t x = 0; x < count; x++) {
        getcontext(&threads[x].start);
        threads[x].start.uc_stack.ss_sp = stacks + x * STACK_BYTES;
        threads[x].start.uc_stack.ss_size = STACK_BYTES;
        makecontext(&threads[x].start, enter, 0);
    }
    for (uint32_t live = count; live && !threads->launch->failed;) {
        live = 0;
        for (uint32_t x = 0; x < count; x++) {
            if (threads[x].ended) continue;
            resume(&threads[x]);
            live += !threads[x].ended;
        }
    }
}

static inline void run_grid(struct launch *launch, void (*body)(struct thread *), bool barriers) {
    uint32_t count = launch->threads, blocks = launch->grid_x * launch->grid_y * launch->grid_z;
    struct thread *threads = malloc(count * sizeof *threads);
    char *stacks = barriers ? malloc(count * STACK_BYTES) : NULL;
    launch->shared = malloc(launch->shared_nbytes);
    for (uint32_t block = 0; block < blocks && !launch->failed; block++) {
        uint32_t x = block % launch->grid_x, rest = block / launch->grid_x;
        uint32_t y = rest % launch->grid_y, z = rest / launch->grid_y;
        for (uint32_t at = 0; at < count; at++)
            threads[at] = (struct thread){launch, at, x, y, z, .body = body};
        memset(launch->shared, 0xA5, launch->shared_nbytes);
        if (barriers) run_turns(threads, count, stacks);
        for (uint32_t at = 0; at < count && !barriers && !launch->failed; at++)
            body(&threads[at]);
    }
    free(launch->shared);
    free(threads);
    free(stacks);
}
