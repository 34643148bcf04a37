/* Streams and events by threads: a thread for each hardware queue, which runs what was queued in
 * order, under the driver's lock but for the moving of bytes. */
#include "standin.h"

#include <signal.h>

/* A copy looks its addresses up again after so many bytes, so that memory that is unmapped
 * meanwhile is missed. */
#define PIECE ((size_t)1 << 20)
#define POLL_US 50

struct queue {
    struct work *first, **last;
    bool ending;
};

/* Streams and events are never freed, so that a stale handle is found out, not followed. */
struct CUstream_st {
    CUstream next;
    CUcontext context;
    struct queue *queue;
    unsigned flags;
    uint64_t queued, done;
    bool destroyed;
};

struct CUevent_st {
    CUevent next;
    CUcontext context;
    uint64_t recorded, happened;
    bool destroyed;
};

struct work {
    struct work *next;
    CUstream stream;
    void (*run)(struct work *);
    CUdeviceptr target, source;
    size_t nbytes;
    unsigned value;
    bool sets, from_host, to_host; /* pageable memory, which no device knows */
    uint64_t *counter, number;     /* of an event or another stream, */
    CUcontext whose;               /* which is of that context */
    CUhostFn function;
    void (*call)(CUcontext, void *);
    void *data, *staged; /* that is freed with the work */
};

static CUstream streams;
static CUevent events;
static struct queue *shared_queue; /* with MX_STANDIN_ONE_QUEUE */

/* -- queues ----------------------------------------------------------------------------------- */

static void sleep_unlocked(long us) {
    driver_unlock();
    usleep((useconds_t)us);
    driver_lock();
}

static void *run_queue(void *argument) {
    struct queue *queue = argument;
    driver_lock();
    for (;;) {
        WAIT_WHILE(!queue->first && !queue->ending);
        struct work *work = queue->first;
        if (!work) break;
        queue->first = work->next;
        if (!queue->first) queue->last = &queue->first;
        CUcontext context = work->stream->context;
        if (settings.late_us) sleep_unlocked(settings.late_us);
        /* What a broken context has queued is dropped: its waiters get the error. */
        CUresult injected = context->broken ? CUDA_SUCCESS : call_injected("work");
        if (injected) context_break(context, injected, "MX_STANDIN_FAIL");
        if (!context->broken) work->run(work);
        work->stream->done++;
        free(work->staged);
        free(work);
        driver_changed();
    }
    driver_unlock();
    free(queue);
    return NULL;
}

static struct queue *queue_new(void) {
    struct queue *queue = calloc(1, sizeof *queue);
    queue->last = &queue->first;
    pthread_t thread;
    /* Signals are for the process's own threads. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool started = !pthread_create(&thread, NULL, run_queue, queue);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!started) {
        free(queue);
        return NULL;
    }
    pthread_detach(thread);
    return queue;
}

static CUstream stream_new(CUcontext context, unsigned flags) {
    if (settings.one_queue && !shared_queue) shared_queue = queue_new();
    struct queue *queue = settings.one_queue ? shared_queue : queue_new();
    if (!queue) return NULL;
    CUstream stream = calloc(1, sizeof *stream);
    *stream = (struct CUstream_st){streams, context, queue, .flags = flags};
    return streams = stream;
}

/* Return the stream behind a handle, NULL if there is none: 0 and CU_STREAM_LEGACY are the default
 * stream of the current context. */
CUstream stream_of(CUstream handle) {
    if (!handle || handle == CU_STREAM_LEGACY) {
        CUcontext context = context_current();
        if (!context->default_stream) context->default_stream = stream_new(context, 0);
        return context->default_stream;
    }
    for (CUstream at = streams; at; at = at->next)
        if (at == handle && !at->destroyed) return at;
    return NULL;
}

static void wait_for_stream(CUstream stream) {
    uint64_t number = stream->queued;
    WAIT_WHILE(stream->done < number);
}

void streams_drain(CUcontext context) {
    for (CUstream at = streams; at; at = at->next)
        if (at->context == context) wait_for_stream(at);
}

static void stream_end(CUstream stream) {
    stream->destroyed = true;
    if (stream->queue != shared_queue) stream->queue->ending = true;
    driver_changed();
}

void streams_end_context(CUcontext context) {
    for (CUstream at = streams; at; at = at->next)
        if (at->context == context && !at->destroyed) stream_end(at);
}

static void append(CUstream stream, struct work work) {
    struct work *made = malloc(sizeof *made);
    *made = work;
    made->next = NULL;
    made->stream = stream;
    stream->queued++;
    *stream->queue->last = made;
    stream->queue->last = &made->next;
    driver_changed();
}

static void run_wait(struct work *work) {
    WAIT_WHILE(*work->counter < work->number && !work->stream->context->broken &&
               !work->whose->broken);
}

/* The legacy default stream waits for the blocking streams of its context, and they for it (CUDA
 * driver API, stream synchronization behavior). */
static CUresult queue_work(CUstream stream, struct work work) {
    CUcontext context = stream->context;
    for (CUstream at = streams; at && !(stream->flags & CU_STREAM_NON_BLOCKING); at = at->next) {
        bool one_is_default = at == context->default_stream || stream == context->default_stream;
        if (at != stream && at->context == context && one_is_default &&
            !(at->flags & CU_STREAM_NON_BLOCKING) && at->done < at->queued)
            append(stream, (struct work){.run = run_wait,
                                         .counter = &at->done,
                                         .whose = context,
                                         .number = at->queued});
    }
    append(stream, work);
    return CUDA_SUCCESS;
}

#define QUEUE(stream, ...) return call_end(queue_work(stream, (struct work){__VA_ARGS__}))

static void run_call(struct work *work) { work->call(work->stream->context, work->staged); }

void stream_queue(CUstream stream, void (*call)(CUcontext, void *), void *data) {
    queue_work(stream, (struct work){.run = run_call, .call = call, .staged = data});
}

/* -- streams ---------------------------------------------------------------------------------- */

CUresult cuStreamCreate(CUstream *stream, unsigned flags) {
    CALL(NEEDS_CONTEXT, "%u", flags);
    REQUIRE(!(flags & ~(unsigned)CU_STREAM_NON_BLOCKING), INVALID_VALUE);
    *stream = stream_new(context_current(), flags);
    return call_end(*stream ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY);
}

/* "In case the device is still doing work in the stream hStream when cuStreamDestroy() is called,
 * the function will return immediately and the resources associated with hStream will be released
 * automatically once the device has completed all work in hStream." */
CUresult cuStreamDestroy(CUstream handle) {
    CALL(NEEDS_CONTEXT, "%p", handle);
    CUstream stream = stream_of(handle);
    REQUIRE(stream && stream != context_current()->default_stream, INVALID_HANDLE);
    FINISH(stream_end(stream));
}

/* Find a stream that nothing captures, or end the call with an error. */
#define FIND_STREAM(stream, handle, captured)                                                      \
    FIND(stream, stream_of(handle), INVALID_HANDLE);                                               \
    REQUIRE(!capture_has(stream), captured)

CUresult cuStreamSynchronize(CUstream handle) {
    CALL(NEEDS_CONTEXT | UNSAFE, "%p", handle);
    FIND_STREAM(stream, handle, STREAM_CAPTURE_UNSUPPORTED);
    wait_for_stream(stream);
    return call_end(stream->context->broken);
}

CUresult cuStreamQuery(CUstream handle) {
    CALL(NEEDS_CONTEXT | UNSAFE, "%p", handle);
    FIND_STREAM(stream, handle, STREAM_CAPTURE_UNSUPPORTED);
    return call_end(stream->done < stream->queued ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS);
}

static void run_function(struct work *work) {
    driver_unlock();
    work->function(work->data);
    driver_lock();
}

CUresult cuLaunchHostFunc(CUstream handle, CUhostFn function, void *data) {
    CALL(NEEDS_CONTEXT, "%p", handle);
    FIND(stream, stream_of(handle), INVALID_HANDLE);
    QUEUE(stream, .run = run_function, .function = function, .data = data);
}

/* -- events ----------------------------------------------------------------------------------- */

static CUevent event_of(CUevent handle) {
    for (CUevent at = events; at; at = at->next)
        if (at == handle && !at->destroyed) return at;
    return NULL;
}

CUresult cuEventCreate(CUevent *event, unsigned flags) {
    CALL(NEEDS_CONTEXT, "%#x", flags);
    *event = calloc(1, sizeof **event);
    **event = (struct CUevent_st){.next = events, .context = context_current()};
    FINISH(events = *event);
}

/* "An event may be destroyed before it is complete. In this case, the call does not block on
 * completion of the event." */
CUresult cuEventDestroy(CUevent handle) {
    CALL(NEEDS_CONTEXT, "%p", handle);
    FIND(event, event_of(handle), INVALID_HANDLE);
    FINISH(event->destroyed = true);
}

static void run_record(struct work *work) {
    if (*work->counter < work->number) *work->counter = work->number;
}

/* "hEvent and hStream must be from the same context". */
CUresult cuEventRecord(CUevent handle, CUstream on) {
    CALL(NEEDS_CONTEXT, "%p, %p", handle, on);
    CUevent event = event_of(handle);
    FIND_STREAM(stream, on, NOT_SUPPORTED);
    REQUIRE(event && event->context == stream->context, INVALID_HANDLE);
    QUEUE(stream, .run = run_record, .counter = &event->happened, .number = ++event->recorded);
}

/* "Before the first call to cuEventRecord(), an event represents an empty set of work, so for
 * example cuEventQuery() would return CUDA_SUCCESS." */
CUresult cuEventQuery(CUevent handle) {
    CALL(NEEDS_CONTEXT | UNSAFE, "%p", handle);
    FIND(event, event_of(handle), INVALID_HANDLE);
    if (event->context->broken) return call_end(event->context->broken);
    return call_end(event->happened < event->recorded ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS);
}

CUresult cuEventSynchronize(CUevent handle) {
    CALL(NEEDS_CONTEXT | UNSAFE, "%p", handle);
    FIND(event, event_of(handle), INVALID_HANDLE);
    uint64_t number = event->recorded;
    WAIT_WHILE(event->happened < number && !event->context->broken);
    return call_end(event->context->broken);
}

/* "hEvent may be from a different context or device than hStream." */
CUresult cuStreamWaitEvent(CUstream on, CUevent handle, unsigned flags) {
    CALL(NEEDS_CONTEXT, "%p, %p, %u", on, handle, flags);
    CUevent event = event_of(handle);
    FIND_STREAM(stream, on, NOT_SUPPORTED);
    REQUIRE(event, INVALID_HANDLE);
    QUEUE(stream, .run = run_wait, .counter = &event->happened, .whose = event->context,
          .number = event->recorded);
}

static void run_wait_word(struct work *work) {
    CUcontext context = work->stream->context;
    while (!context->broken) {
        size_t run = sizeof(uint32_t);
        struct range *range;
        char *at = range_touch(context, work->source, false, &run, &range);
        if (!at) {
            context_break(context, CUDA_ERROR_ILLEGAL_ADDRESS, "a word that a stream waits for");
            return;
        }
        unsigned found = __atomic_load_n((unsigned *)at, __ATOMIC_ACQUIRE);
        range_leave(range);
        if ((int)(found - work->value) >= 0) return;
        sleep_unlocked(POLL_US);
    }
}

CUresult cuStreamWaitValue32(CUstream handle, CUdeviceptr address, cuuint32_t value,
                             unsigned flags) {
    CALL(NEEDS_CONTEXT, "%p, %#llx, %u, %u", handle, address, value, flags);
    FIND(stream, stream_of(handle), INVALID_HANDLE);
    REQUIRE(address % sizeof(uint32_t) == 0, INVALID_VALUE);
    /* GEQ is the only condition that there is here. */
    REQUIRE(!capture_has(stream) && flags == CU_STREAM_WAIT_VALUE_GEQ, NOT_SUPPORTED);
    QUEUE(stream, .run = run_wait_word, .source = address, .value = value);
}

/* -- copies ----------------------------------------------------------------------------------- */

/* Find one side of a copy; `run` becomes what lies there in one piece. */
static char *side(struct work *work, CUdeviceptr address, bool pageable, bool write, size_t *run,
                  struct range **range) {
    *range = NULL;
    if (pageable) return (char *)(uintptr_t)address;
    char *at = range_touch(work->stream->context, address, write, run, range);
    if (!at)
        context_break(work->stream->context, CUDA_ERROR_ILLEGAL_ADDRESS,
                      write ? "a write" : "a read");
    return at;
}

/* A copy, or a setting to the value. */
static void run_copy(struct work *work) {
    for (size_t done = 0; done < work->nbytes;) {
        size_t run = work->nbytes - done < PIECE ? work->nbytes - done : PIECE;
        struct range *into = NULL, *from = NULL;
        char *target = NULL, *source = NULL;
        if (!work->sets)
            source = side(work, work->source + done, work->from_host, false, &run, &from);
        if (source || work->sets)
            target = side(work, work->target + done, work->to_host, true, &run, &into);
        driver_unlock();
        if (target && source)
            memmove(target, source, run);
        else if (target)
            memset(target, (int)work->value, run);
        driver_lock();
        if (into) range_leave(into);
        if (from) range_leave(from);
        if (!target) break;
        done += run;
    }
}

/* Queue a copy, under the lock. Pinned memory is read and written when the copy runs. Pageable
 * memory is staged after the stream's earlier work, and a copy to it returns when it is complete:
 * the driver may do both (CUDA driver API, API synchronization behavior). */
static CUresult queue_copy(CUstream handle, struct work work, bool wait) {
    CUstream stream = stream_of(handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (capture_has(stream)) return CUDA_ERROR_NOT_SUPPORTED;
    if (!work.nbytes) return CUDA_SUCCESS;
    if (work.from_host) {
        wait_for_stream(stream);
        work.staged = malloc(work.nbytes);
        memcpy(work.staged, (void *)(uintptr_t)work.source, work.nbytes);
        work.source = (uintptr_t)work.staged;
    }
    queue_work(stream, work);
    if (!wait && !work.to_host) return CUDA_SUCCESS;
    wait_for_stream(stream);
    return stream->context->broken;
}

/* ANY: what is not known of an address is pageable. */
enum hosts { NO_HOST, FROM_HOST, TO_HOST, ANY };

static CUresult copy(const char *name, CUdeviceptr to, CUdeviceptr from, size_t nbytes,
                     CUstream stream, enum hosts hosts, bool wait) {
    unsigned needs = NEEDS_CONTEXT | (wait ? UNSAFE : 0);
    CUresult begun = call_begin(name, needs, "%#llx, %#llx, %zu, %p", to, from, nbytes, stream);
    if (begun) return call_end(begun);
    struct work work = {.run = run_copy, .target = to, .source = from, .nbytes = nbytes};
    unsigned known = hosts == ANY ? DEVICE_KINDS | HOST_KINDS : HOST_KINDS;
    work.from_host = hosts & FROM_HOST && !range_at(from, known);
    work.to_host = hosts & TO_HOST && !range_at(to, known);
    return call_end(queue_copy(stream, work, wait));
}

#define COPIES(name, to_type, from_type, hosts)                                                    \
    CUresult name(to_type to, from_type from, size_t nbytes, CUstream stream) {                    \
        return copy(__func__, (uintptr_t)to, (uintptr_t)from, nbytes, stream, hosts, false);       \
    }
#define COPIES_AND_WAITS(name, to_type, from_type, hosts)                                          \
    CUresult name(to_type to, from_type from, size_t nbytes) {                                     \
        return copy(__func__, (uintptr_t)to, (uintptr_t)from, nbytes, NULL, hosts, true);          \
    }

COPIES(cuMemcpyHtoDAsync, CUdeviceptr, const void *, FROM_HOST)
COPIES(cuMemcpyDtoHAsync, void *, CUdeviceptr, TO_HOST)
COPIES(cuMemcpyDtoDAsync, CUdeviceptr, CUdeviceptr, NO_HOST)
COPIES_AND_WAITS(cuMemcpyHtoD, CUdeviceptr, const void *, FROM_HOST)
COPIES_AND_WAITS(cuMemcpyDtoH, void *, CUdeviceptr, TO_HOST)

COPIES(cuMemcpyAsync, CUdeviceptr, CUdeviceptr, ANY)

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t nbytes, CUstream stream) {
    CALL(NEEDS_CONTEXT, "%#llx, %u, %zu, %p", to, value, nbytes, stream);
    struct work work = {.run = run_copy, to, 0, nbytes, value, .sets = true};
    return call_end(queue_copy(stream, work, false));
}
