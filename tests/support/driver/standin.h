/* A stand-in for NVIDIA's driver: libcuda.so.1 and libnvidia-ml.so.1 over host memory.
 *
 * The real cuda-bindings and nvidia-ml-py load both through LD_LIBRARY_PATH. Devices are made up,
 * device memory is memfds, streams are threads, kernels are C. Where CUDA's documentation leaves
 * a choice, the stand-in takes the one that is harder on its caller:
 *
 * - A device address has no access (PROT_NONE) for the process: a stray host access is a SIGSEGV.
 *   The driver uses another map of the same memory. Freed addresses are not used again.
 * - Fresh memory, device or pinned, is full of 0xA5; device memory from 16 GiB on is sparse.
 * - Work is checked when it runs. An address that its device may not touch breaks the context for
 *   good; so does memory that was unmapped while work for it was queued.
 * - A page is registered once, and a copy does not cross the end of a registration.
 * - Memory of another device needs peer access, or cuMemSetAccess, or a legacy handle.
 * - Memory of a GPU that CUDA_VISIBLE_DEVICES hides opens on a peer of it, since CUDA 10.1 (NCCL
 *   relies on that), and is on device -2 (CU_DEVICE_INVALID).
 * - A graph lists its nodes last first, and runs those that no edge orders in another order than
 *   they were made; pageable memory is not captured. Graphs with nodes that allocate, that are
 *   conditional or that wait for words can be made and looked at; they are not instantiated.
 * - A forked child of a process that called cuInit gets CUDA_ERROR_NOT_INITIALIZED.
 *
 * Settings are read from the environment by cuInit and nvmlInit. A flag is "1" or absent.
 *
 *   MX_STANDIN_DEVICES             GPUs of the machine; 2. CUDA_VISIBLE_DEVICES picks among them,
 *                                  by number or UUID, as with the real driver
 *   MX_STANDIN_VERSION             the driver's version; that of cuda.h
 *   MX_STANDIN_COMPUTE_CAPABILITY  of each GPU, times ten; 90
 *   MX_STANDIN_MEMORY_BYTES        memory of each GPU, which each process counts by itself; 8 GiB
 *   MX_STANDIN_PEERS               "all", "none" or pairs of GPUs: "0-1,2-3"; all
 *   MX_STANDIN_NVLINK              what NVML says: "switch", "none" or pairs; switch
 *   MX_STANDIN_NO_VMM              flag: there is no virtual memory management
 *   MX_STANDIN_MIG                 MIG instances of each GPU; 0. A process sees the first of each
 *   MX_STANDIN_ROOT                the folder of dev/nvidiactl, without which NVML does not start;
 *                                  "" for the machine's own; if absent nothing is asked for
 *   MX_STANDIN_LOG                 a folder: each process writes its calls to PID.log there, one
 *                                  a line: "THREAD CALL(ARGUMENTS) RESULT"; other lines begin "#"
 *   MX_STANDIN_KERNELS             a library of kernels (kernels.py); without it no module loads
 *   MX_STANDIN_HOST_ACCESS         flag: device addresses are accessible to the process
 *   MX_STANDIN_REUSE_ADDRESSES     flag: freed addresses are used again at once
 *   MX_STANDIN_PROTECT             flag: while shared memory is registered, the process may not
 *                                  touch it if it is registered READ_ONLY, else only read it; the
 *                                  driver moves its bytes by another map. Private memory is as ever
 *
 * Stricter, each by itself:
 *
 *   MX_STANDIN_FAIL                "CALL:N:ERROR,...": the N-th call of that name in a process
 *                                  fails with that error, a name or a number; all from the N-th
 *                                  on if it is negative. CALL "work" counts the operations that
 *                                  streams run, "*" all calls and operations: "*:-9:..." is a GPU
 *                                  that is lost. ILLEGAL_ADDRESS breaks the context
 *   MX_STANDIN_LATE_US             each operation of a stream starts that many microseconds late
 *   MX_STANDIN_ONE_QUEUE           flag: all streams share one hardware queue, first come first run
 *   MX_STANDIN_CAPTURE             "global" or "thread_local": another thread captures all the time
 *   MX_STANDIN_GRAPH_ORDER         which node a graph runs next, of those that may run: "reverse"
 *                                  (the last that was made), "created" (the first), or a seed by
 *                                  which one is drawn; reverse
 *   MX_STANDIN_LOAD_SYNCS          flag: cuModuleLoadData waits for the context's work
 *   MX_STANDIN_SMALL_IN_BLOCKS     flag: allocations under 1 MiB share blocks of 2 MiB; who opens
 *                                  the handle of one sees its whole block
 *   MX_STANDIN_HIDDEN_REFUSED      flag: memory of GPUs that are not visible does not open, as where
 *                                  a container has no device file of them
 *   MX_STANDIN_NO_READ_ONLY        flag: no device registers memory READ_ONLY
 *   MX_STANDIN_NO_HOST_NUMA        flag: no host memory is made by cuMemCreate
 *   MX_STANDIN_LOCK_BYTES          how much memory can be registered at a time; all of it
 *   MX_STANDIN_EXPORTER_DEATH      flag: memory opened by a legacy handle is gone with its exporter
 */
#ifndef STANDIN_H
#define STANDIN_H

#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Everything else is hidden (-fvisibility=hidden): only what cuda.h declares is exported. */
#pragma GCC visibility push(default)
#include <cuda.h>
#pragma GCC visibility pop

#define MAX_DEVICES 16
#define GRANULARITY ((size_t)2 << 20)
#define GARBAGE 0xA5
#define SPARSE ((size_t)16 << 30) /* more is not in the host's memory until it is touched */

/* -- settings.c: also part of libnvidia-ml ---------------------------------------------------- */

struct settings {
    int devices;
    int version;
    int compute_capability;
    size_t memory_bytes, lock_bytes;
    int mig_instances;
    long late_us;
    bool vmm, host_access, reuse_addresses, protect, no_read_only, host_numa;
    bool one_queue, load_syncs, small_in_blocks, hidden_refused, exporter_death;
    const char *peers, *nvlink, *log_folder, *fail, *capture, *root, *kernels, *graph_order;
};
extern struct settings settings;

void settings_read(void);
/* Return true if a list says that two GPUs of the machine are linked. */
bool settings_linked(const char *list, int gpu, int other);
/* The UUID of a GPU of the machine, or of its MIG instance if `instance` >= 0, as 16 bytes and as
 * text without prefix. */
void settings_uuid(int gpu, int instance, unsigned char bytes[16]);
void settings_uuid_text(int gpu, int instance, char text[37]);

/* -- calls.c: what all calls share ------------------------------------------------------------ */

enum needs {
    NEEDS_DRIVER = 0,  /* cuInit */
    NEEDS_CONTEXT = 1, /* a current context that is not broken */
    UNSAFE = 2,        /* a potentially unsafe call, as stream capture defines it */
};

/* Begin a call: check what it needs, and take the driver's lock, which call_end gives back. All
 * state is behind this one lock. */
#define CALL(needs, ...)                                                                           \
    do {                                                                                           \
        CUresult begun = call_begin(__func__, needs, __VA_ARGS__);                                 \
        if (begun != CUDA_SUCCESS) return call_end(begun);                                         \
    } while (0)
/* End the call with an error unless the condition holds. */
#define REQUIRE(condition, error)                                                                  \
    do {                                                                                           \
        if (!(condition)) return call_end(CUDA_ERROR_##error);                                     \
    } while (0)

/* Find what the call is about, or end it with an error. */
#define FIND(name, found, error)                                                                   \
    __auto_type name = found;                                                                      \
    REQUIRE(name, error)
/* The last that a call does, and what it gives. */
#define FINISH(action) return (action), call_end(CUDA_SUCCESS)
#define GIVE(out, value) FINISH(*(out) = (value))

CUresult call_begin(const char *name, unsigned needs, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
CUresult call_end(CUresult result);
/* Return the error that MX_STANDIN_FAIL wants for this occasion. */
CUresult call_injected(const char *name);
void log_line(const char *format, ...) __attribute__((format(printf, 1, 2)));

void driver_lock(void);
void driver_unlock(void);
/* Give the lock up until any state has changed (driver_changed). */
void driver_wait(void);
void driver_changed(void);
#define WAIT_WHILE(condition)                                                                      \
    while (condition)                                                                              \
    driver_wait()

/* -- devices.c: devices and contexts ---------------------------------------------------------- */

struct CUctx_st {
    int device; /* its ordinal in this process */
    int retained;
    unsigned long long id; /* another one after it was reset */
    unsigned peers;        /* bits of the ordinals that it may access */
    CUresult broken;       /* the error that every call returns from now on */
    CUstream default_stream;
    size_t limits[CU_LIMIT_MAX];
};

/* The process that called cuInit, 0 before. A forked child finds its parent here. */
extern pid_t driver_process;

CUcontext context_current(void);
bool context_exists(CUcontext context);
void context_break(CUcontext context, CUresult error, const char *why);
int device_count(void);
/* The GPU of the machine behind an ordinal, and back: CU_DEVICE_INVALID if it is not visible. */
int device_gpu(int device);
int device_of_gpu(int gpu);
bool device_reaches(int device, int gpu);

/* -- memory.c: device memory and what is known of addresses ----------------------------------- */

/* Memory of a GPU: a memfd, and the driver's own map of it. */
struct backing {
    struct backing *next;
    int fd;
    ino_t inode; /* which memory it is, in every process */
    int gpu;     /* of the machine, */
    int device;  /* and its ordinal here, or CU_DEVICE_INVALID */
    size_t nbytes;
    char *alias;
    int uses;    /* ranges, and handles of cuMemCreate */
    int handles; /* handles of cuMemCreate and its like; 0 for memory of cuMemAlloc */
    bool exportable;
    bool counted;      /* against the device's memory: not what another process made */
    uintptr_t address; /* of a block of small allocations */
    size_t filled;
    int exporter; /* a pidfd of the process that exported it by a legacy handle, or -1 */
};

enum kind { ALLOCATED = 1, OPENED = 2, MAPPED = 4, PINNED = 8, REGISTERED = 16, RESERVED = 32 };
#define DEVICE_KINDS (ALLOCATED | OPENED | MAPPED)
#define HOST_KINDS (PINNED | REGISTERED)

/* Addresses with memory behind them, which do not overlap, or reserved for it. */
struct range {
    struct range *next;
    enum kind kind;
    uintptr_t address;
    size_t nbytes;
    int device;
    struct backing *backing; /* of device memory */
    size_t offset;
    unsigned readers, writers; /* bits of devices, by cuMemSetAccess or a legacy handle */
    CUcontext owner;
    int opens; /* how often a legacy handle was opened */
    uintptr_t opened;
    bool read_only; /* registered so */
    char *alias;    /* another map of registered memory, */
    int protection; /* and that of the process's own before */
    int busy; /* operations that are touching it now */
    unsigned long long id;
};

typedef CUmemGenericAllocationHandle Handle;
typedef unsigned long long Flags; /* of calls that know none */

struct backing *backing_new(int device, size_t nbytes, const char *purpose);
/* Take over the descriptor of another process's memory; NULL if it is none of that purpose. */
struct backing *backing_adopt(int fd, const char *purpose);
void backing_drop(struct backing *backing);
struct backing *backing_find(Handle handle);

struct range *range_add(enum kind kind, uintptr_t address, size_t nbytes, int device);
/* Return the range of one of the kinds that an address is in, or NULL. */
struct range *range_at(uintptr_t address, unsigned kinds);
extern struct range *ranges;
bool range_overlaps(uintptr_t address, size_t nbytes);
/* Forget a range and drop its backing, after the operations that are touching it. */
void range_remove(struct range *range);
/* The same, and give its addresses back. */
void range_free(struct range *range);
/* Return where the driver finds what a context's device sees at `address`, shorten `run` to what
 * lies there in one piece, and mark the range as busy; NULL if that device may not touch it. */
char *range_touch(CUcontext context, uintptr_t address, bool write, size_t *run,
                  struct range **range);
void range_leave(struct range *range);
/* Free what begins at an address. "This API may perform implicit synchronization": it does. */
CUresult drain_and_free(uintptr_t address, enum kind kind, CUresult error);
size_t page(void);

/* Return aligned addresses without access, or 0. */
uintptr_t addresses_reserve(size_t nbytes, uintptr_t wanted);
void addresses_release(uintptr_t address, size_t nbytes);
/* Let the process see memory at its device address, if the settings want that. */
void addresses_show(uintptr_t address, size_t nbytes, int fd, bool host);
void addresses_hide(uintptr_t address, size_t nbytes, bool host);
void memory_end_context(CUcontext context);
void modules_end_context(CUcontext context);

/* -- host.c ----------------------------------------------------------------------------------- */

/* Give the process its registered memory back. */
void range_unalias(struct range *range);
/* Return true if a copy from or to registered memory would cross its end. */
bool host_is_split(uintptr_t address, size_t nbytes);

/* -- streams.c -------------------------------------------------------------------------------- */

/* A copy, or with an element's size a setting to its value. */
struct move {
    CUdeviceptr target, source;
    size_t nbytes;
    unsigned value, element;
    bool from_host, to_host; /* pageable memory, which no device knows */
};

/* Move bytes, under the lock, and break the context if it may not touch them. */
void memory_move(CUcontext context, const struct move *move);
/* Begin an operation of a stream; false if the context is broken. */
bool work_begins(CUcontext context);
/* Wait for all work that a context has queued. */
void streams_drain(CUcontext context);
void streams_end_context(CUcontext context);
CUstream stream_of(CUstream handle);
CUevent event_of(CUevent handle);
/* Queue a call, under the lock, with a context and data that is freed after it. */
void stream_queue(CUstream stream, void (*call)(CUcontext, void *), void *data);

/* -- graph_capture.c -------------------------------------------------------------------------- */

/* Return true if stream capture forbids this thread an unsafe call, and invalidate the capture. */
bool capture_forbids(void);
/* Return the error of a call that no stream of a context may be captured in. */
CUresult capture_refuses_any(CUcontext context);

static inline size_t round_up(size_t nbytes, size_t multiple) {
    return (nbytes + multiple - 1) / multiple * multiple;
}

#endif
