/* Streams and events by threads: a thread for each hardware queue, which runs what was queued in
 * order, under the driver's lock but for the moving of bytes. */
#include "standin.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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
    bool sets;
    bool from_host, to_host; /* pageable memory, which no device knows */
    CUevent event;
    CUstream other;
    uint64_t number;
    CUhostFn function;
    void *data;
    void (*call)(CUcontext, void *);
    void *staged; /* freed with the work */
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
        while (!queue->first && !queue->ending)
            driver_wait();
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
    *stream =
        (struct CUstream_st){.next = streams, .context = context, .queue = queue, .flags = flags};
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
    while (stream->done < number)
        driver_wait();
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

static void run_wait_stream(struct work *work) {
    while (work->other->done < work->number && !work->stream->context->broken)
        driver_wait();
}

/* The legacy default stream waits for the blocking streams of its context, and they for it (CUDA
 * driver API, stream synchronization behavior). */
static void queue_work(CUstream stream, struct work work) {
    CUcontext context = stream->context;
    for (CUstream at = streams; at && !(stream->flags & CU_STREAM_NON_BLOCKING); at = at->next) {
        bool one_is_default = at == context->default_stream || stream == context->default_stream;
        if (at != stream && at->context == context && one_is_default &&
            !(at->flags & CU_STREAM_NON_BLOCKING) && at->done < at->queued)
            append(stream,
                   (struct work){.run = run_wait_stream, .other = at, .number = at->queued});
    }
    append(stream, work);
}

static void run_call(struct work *work) { work->call(work->stream->context, work->staged); }

void stream_queue(CUstream stream, void (*call)(CUcontext, void *), void *data) {
    queue_work(stream, (struct work){.run = run_call, .call = call, .staged = data});
}

/* -- streams ---------------------------------------------------------------------------------- */

CUresult cuStreamCreate(CUstream *stream, unsigned flags) {
    CALL(NEEDS_CONTEXT, "%u", flags);
    REQUIRE(!(flags & ~(unsigned)CU_STREAM_NON_BLOCKING), CUDA_ERROR_INVALID_VALUE);
    *stream = stream_new(context_current(), flags);
    return call_end(*stream ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY);
}

/* "In case the device is still doing work in the stream hStream when cuStreamDestroy() is called,
 * the function will return immediately and the resources associated with hStream will be released
 * automatically once the device has completed all work in hStream." */
CUresult cuStreamDestroy(CUstream handle) {
    CALL(NEEDS_CONTEXT, "%p", (void *)handle);
    CUstream stream = stream_of(handle);
    REQUIRE(stream && stream != context_current()->default_stream, CUDA_ERROR_INVALID_HANDLE);
    stream_end(stream);
    return call_end(CUDA_SUCCESS);
}

CUresult cuStreamSynchronize(CUstream handle) {
    CALL(NEEDS_CONTEXT | UNSAFE, "%p", (void *)handle);
    CUstream stream = stream_of(handle);
    REQUIRE(stream, CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(!capture_has(stream), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    wait_for_stream(stream);
    return call_end(stream->context->broken);
}

CUresult cuStreamQuery(CUstream handle) {
    CALL(NEEDS_CONTEXT | UNSAFE, "%p", (void *)handle);
    CUstream stream = stream_of(handle);
    REQUIRE(stream, CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(!capture_has(stream), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    return call_end(stream->done < stream->queued ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS);
}

static void run_function(struct work *work) {
    driver_unlock();
    work->function(work->data);
    driver_lock();
}

CUresult cuLaunchHostFunc(CUstream handle, CUhostFn function, void *data) {
    CALL(NEEDS_CONTEXT, "%p", (void *)handle);
    CUstream stream = stream_of(handle);
    REQUIRE(stream, CUDA_ERROR_INVALID_HANDLE);
    queue_work(stream, (struct work){.run = run_function, .function = function, .data = data});
    return call_end(CUDA_SUCCESS);
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
    events = *event;
    return call_end(CUDA_SUCCESS);
}

/* "An event may be destroyed before it is complete. In this case, the call does not block on
 * completion of the event." */
CUresult cuEventDestroy(CUevent handle) {
    CALL(NEEDS_CONTEXT, "%p", (void *)handle);
    CUevent event = event_of(handle);
    REQUIRE(event, CUDA_ERROR_INVALID_HANDLE);
    event->destroyed = true;
    return call_end(CUDA_SUCCESS);
}

static void run_record(struct work *work) {
    if (work->event->happened < work->number) work->event->happened = work->number;
}

/* "hEvent and hStream must be from the same context". */
CUresult cuEventRecord(CUevent handle, CUstream on) {
    CALL(NEEDS_CONTEXT, "%p, %p", (void *)handle, (void *)on);
    CUevent event = event_of(handle);
    CUstream stream = stream_of(on);
    REQUIRE(event && stream, CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(event->context == stream->context, CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(!capture_has(stream), CUDA_ERROR_NOT_SUPPORTED);
    queue_work(stream,
               (struct work){.run = run_record, .event = event, .number = ++event->recorded});
    return call_end(CUDA_SUCCESS);
}

/* "Before the first call to cuEventRecord(), an event represents an empty set of work, so for
 * example cuEventQuery() would return CUDA_SUCCESS." */
CUresult cuEventQuery(CUevent handle) {
    CALL(NEEDS_CONTEXT | UNSAFE, "%p", (void *)handle);
    CUevent event = event_of(handle);
    REQUIRE(event, CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(!event->context->broken, event->context->broken);
    return call_end(event->happened < event->recorded ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS);
}

CUresult cuEventSynchronize(CUevent handle) {
    CALL(NEEDS_CONTEXT | UNSAFE, "%p", (void *)handle);
    CUevent event = event_of(handle);
    REQUIRE(event, CUDA_ERROR_INVALID_HANDLE);
    uint64_t number = event->recorded;
    while (event->happened < number && !event->context->broken)
        driver_wait();
    return call_end(event->context->broken);
}

static void run_wait_event(struct work *work) {
    while (work->event->happened < work->number && !work->stream->context->broken &&
           !work->event->context->broken)
        driver_wait();
}

/* "hEvent may be from a different context or device than hStream." */
CUresult cuStreamWaitEvent(CUstream on, CUevent handle, unsigned flags) {
    CALL(NEEDS_CONTEXT, "%p, %p, %u", (void *)on, (void *)handle, flags);
    CUevent event = event_of(handle);
    CUstream stream = stream_of(on);
    REQUIRE(event && stream, CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(!capture_has(stream), CUDA_ERROR_NOT_SUPPORTED);
    queue_work(stream,
               (struct work){.run = run_wait_event, .event = event, .number = event->recorded});
    return call_end(CUDA_SUCCESS);
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
    CALL(NEEDS_CONTEXT, "%p, %#llx, %u, %u", (void *)handle, (unsigned long long)address, value,
         flags);
    CUstream stream = stream_of(handle);
    REQUIRE(stream, CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(address % sizeof(uint32_t) == 0, CUDA_ERROR_INVALID_VALUE);
    /* GEQ is the only condition that there is here. */
    REQUIRE(!capture_has(stream) && flags == CU_STREAM_WAIT_VALUE_GEQ, CUDA_ERROR_NOT_SUPPORTED);
    queue_work(stream, (struct work){.run = run_wait_word, .source = address, .value = value});
    return call_end(CUDA_SUCCESS);
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
    CUdeviceptr host = work.from_host ? work.source : work.target;
    if ((work.from_host || work.to_host) && range_at(host, HOST_KINDS))
        work.from_host = work.to_host = false;
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

enum host { NO_HOST, FROM_HOST, TO_HOST };

static struct work copy(CUdeviceptr to, CUdeviceptr from, size_t nbytes, enum host host) {
    return (struct work){.run = run_copy, to, from, nbytes, .from_host = host == FROM_HOST,
                         .to_host = host == TO_HOST};
}

CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t nbytes, CUstream stream) {
    CALL(NEEDS_CONTEXT, "%#llx, %p, %zu, %p", (unsigned long long)to, from, nbytes, (void *)stream);
    return call_end(queue_copy(stream, copy(to, (uintptr_t)from, nbytes, FROM_HOST), false));
}

CUresult cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t nbytes, CUstream stream) {
    CALL(NEEDS_CONTEXT, "%p, %#llx, %zu, %p", to, (unsigned long long)from, nbytes, (void *)stream);
    return call_end(queue_copy(stream, copy((uintptr_t)to, from, nbytes, TO_HOST), false));
}

CUresult cuMemcpyHtoD(CUdeviceptr to, const void *from, size_t nbytes) {
    CALL(NEEDS_CONTEXT | UNSAFE, "%#llx, %p, %zu", (unsigned long long)to, from, nbytes);
    return call_end(queue_copy(NULL, copy(to, (uintptr_t)from, nbytes, FROM_HOST), true));
}

CUresult cuMemcpyDtoH(void *to, CUdeviceptr from, size_t nbytes) {
    CALL(NEEDS_CONTEXT | UNSAFE, "%p, %#llx, %zu", to, (unsigned long long)from, nbytes);
    return call_end(queue_copy(NULL, copy((uintptr_t)to, from, nbytes, TO_HOST), true));
}

CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t nbytes, CUstream stream) {
    CALL(NEEDS_CONTEXT, "%#llx, %#llx, %zu, %p", (unsigned long long)to, (unsigned long long)from,
         nbytes, (void *)stream);
    return call_end(queue_copy(stream, copy(to, from, nbytes, NO_HOST), false));
}

/* What is not known of an address is pageable. */
CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t nbytes, CUstream stream) {
    CALL(NEEDS_CONTEXT, "%#llx, %#llx, %zu, %p", (unsigned long long)to, (unsigned long long)from,
         nbytes, (void *)stream);
    struct work work = copy(to, from, nbytes, NO_HOST);
    work.from_host = !range_at(from, DEVICE_KINDS | HOST_KINDS);
    work.to_host = !range_at(to, DEVICE_KINDS | HOST_KINDS);
    return call_end(queue_copy(stream, work, false));
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t nbytes, CUstream stream) {
    CALL(NEEDS_CONTEXT, "%#llx, %u, %zu, %p", (unsigned long long)to, value, nbytes,
         (void *)stream);
    struct work work = {.run = run_copy, to, 0, nbytes, value, .sets = true};
    return call_end(queue_copy(stream, work, false));
}
