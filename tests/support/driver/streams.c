/* Streams and events by threads: a thread for each hardware queue, which runs what was queued in
 * order, under the driver's lock but for the moving of bytes. */
#include "graphs.h"

#include <signal.h>

/* A copy looks its addresses up again after so many bytes, so that memory that is unmapped
 * meanwhile is missed. */
#define PIECE ((size_t)1 << 20)
#define POLL_US 50

struct queue {
    struct work *first, **last;
    bool ending;
};

struct work {
    struct work *next;
    CUstream stream;
    void (*run)(struct work *);
    struct move move;
    uint64_t *counter, number; /* of an event or another stream, */
    CUcontext whose;           /* which is of that context */
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

bool work_begins(CUcontext context) {
    if (settings.late_us) sleep_unlocked(settings.late_us);
    /* What a broken context has queued is dropped: its waiters get the error. */
    CUresult injected = context->broken ? CUDA_SUCCESS : call_injected("work");
    if (injected) context_break(context, injected, "MX_STANDIN_FAIL");
    return !context->broken;
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
        if (work_begins(work->stream->context)) work->run(work);
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
    FIND_STREAM(stream, handle);
    REQUIRE(stream != context_current()->default_stream, INVALID_HANDLE);
    FINISH(stream_end(stream));
}

CUresult cuStreamSynchronize(CUstream handle) {
    CALL(NEEDS_CONTEXT | UNSAFE, "%p", handle);
    FIND_STREAM(stream, handle);
    wait_for_stream(stream);
    return call_end(stream->context->broken);
}

CUresult cuStreamQuery(CUstream handle) {
    CALL(NEEDS_CONTEXT | UNSAFE, "%p", handle);
    FIND_STREAM(stream, handle);
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
    REQUIRE(function, INVALID_VALUE);
    CAPTURE(stream, HOST, node->host = ((CUDA_HOST_NODE_PARAMS){function, data}));
    QUEUE(stream, .run = run_function, .function = function, .data = data);
}

/* -- events ----------------------------------------------------------------------------------- */

CUevent event_of(CUevent handle) {
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
static CUresult record(const char *name, CUevent handle, CUstream on, unsigned flags) {
    CUresult begun = call_begin(name, NEEDS_CONTEXT, "%p, %p, %u", handle, on, flags);
    if (begun) return call_end(begun);
    FIND(stream, stream_of(on), INVALID_HANDLE);
    CUevent event = event_of(handle);
    REQUIRE(event && event->context == stream->context, INVALID_HANDLE);
    bool taken;
    CUresult refused = capture_records(stream, event, flags & CU_EVENT_RECORD_EXTERNAL, &taken);
    if (refused || taken) return call_end(refused);
    QUEUE(stream, .run = run_record, .counter = &event->happened, .number = ++event->recorded);
}

CUresult cuEventRecord(CUevent event, CUstream on) { return record(__func__, event, on, 0); }

CUresult cuEventRecordWithFlags(CUevent event, CUstream on, unsigned flags) {
    return record(__func__, event, on, flags);
}

/* "Before the first call to cuEventRecord(), an event represents an empty set of work, so for
 * example cuEventQuery() would return CUDA_SUCCESS." */
CUresult cuEventQuery(CUevent handle) {
    CALL(NEEDS_CONTEXT | UNSAFE, "%p", handle);
    FIND(event, event_of(handle), INVALID_HANDLE);
    CUresult held = capture_refuses_event(event);
    if (held) return call_end(held);
    if (event->context->broken) return call_end(event->context->broken);
    return call_end(event->happened < event->recorded ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS);
}

CUresult cuEventSynchronize(CUevent handle) {
    CALL(NEEDS_CONTEXT | UNSAFE, "%p", handle);
    FIND(event, event_of(handle), INVALID_HANDLE);
    CUresult held = capture_refuses_event(event);
    if (held) return call_end(held);
    uint64_t number = event->recorded;
    WAIT_WHILE(event->happened < number && !event->context->broken);
    return call_end(event->context->broken);
}

/* "hEvent may be from a different context or device than hStream." */
CUresult cuStreamWaitEvent(CUstream on, CUevent handle, unsigned flags) {
    CALL(NEEDS_CONTEXT, "%p, %p, %u", on, handle, flags);
    FIND(stream, stream_of(on), INVALID_HANDLE);
    FIND(event, event_of(handle), INVALID_HANDLE);
    bool taken;
    CUresult refused = capture_waits(stream, event, flags & CU_EVENT_WAIT_EXTERNAL, &taken);
    if (refused || taken) return call_end(refused);
    QUEUE(stream, .run = run_wait, .counter = &event->happened, .whose = event->context,
          .number = event->recorded);
}

static void run_wait_word(struct work *work) {
    CUcontext context = work->stream->context;
    while (!context->broken) {
        size_t run = sizeof(uint32_t);
        struct range *range;
        char *at = range_touch(context, work->move.source, false, &run, &range);
        if (!at) {
            context_break(context, CUDA_ERROR_ILLEGAL_ADDRESS, "a word that a stream waits for");
            return;
        }
        unsigned found = __atomic_load_n((unsigned *)at, __ATOMIC_ACQUIRE);
        range_leave(range);
        if ((int)(found - work->move.value) >= 0) return;
        sleep_unlocked(POLL_US);
    }
}

CUresult cuStreamWaitValue32(CUstream handle, CUdeviceptr address, cuuint32_t value,
                             unsigned flags) {
    CALL(NEEDS_CONTEXT, "%p, %#llx, %u, %u", handle, address, value, flags);
    FIND(stream, stream_of(handle), INVALID_HANDLE);
    REQUIRE(address % sizeof(uint32_t) == 0, INVALID_VALUE);
    /* GEQ is the only condition that there is here. */
    REQUIRE(flags == CU_STREAM_WAIT_VALUE_GEQ, NOT_SUPPORTED);
    CAPTURE(stream, BATCH_MEM_OP, (void)node);
    QUEUE(stream, .run = run_wait_word, .move = {.source = address, .value = value});
}

/* -- copies ----------------------------------------------------------------------------------- */

/* Find one side of a move; `run` becomes what lies there in one piece. */
static char *side(CUcontext context, CUdeviceptr address, bool pageable, bool write, size_t *run,
                  struct range **range) {
    *range = NULL;
    if (pageable) return (char *)(uintptr_t)address;
    char *at = range_touch(context, address, write, run, range);
    if (!at) context_break(context, CUDA_ERROR_ILLEGAL_ADDRESS, write ? "a write" : "a read");
    return at;
}

void memory_move(CUcontext context, const struct move *move) {
    for (size_t done = 0; done < move->nbytes;) {
        size_t run = move->nbytes - done < PIECE ? move->nbytes - done : PIECE;
        struct range *into = NULL, *from = NULL;
        char *target = NULL, *source = NULL;
        if (!move->element)
            source = side(context, move->source + done, move->from_host, false, &run, &from);
        if (source || move->element)
            target = side(context, move->target + done, move->to_host, true, &run, &into);
        driver_unlock();
        if (target && source)
            memmove(target, source, run);
        else if (target && move->element == 1)
            memset(target, (int)move->value, run);
        for (size_t at = 0; target && move->element > 1 && at < run; at++)
            target[at] = (char)(move->value >> (done + at) % move->element * 8);
        driver_lock();
        if (into) range_leave(into);
        if (from) range_leave(from);
        if (!target) break;
        done += run;
    }
}

static void run_move(struct work *work) { memory_move(work->stream->context, &work->move); }

/* Queue a move, under the lock. Pinned memory is read and written when it runs. Pageable memory is
 * staged after the stream's earlier work, and a copy to it returns when it is complete: the driver
 * may do both (CUDA driver API, API synchronization behavior), and neither can be captured. */
static CUresult queue_move(CUstream handle, struct move move, bool wait) {
    CUstream stream = stream_of(handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (!move.nbytes) return CUDA_SUCCESS;
    CUgraphNode node = NULL;
    CUresult held =
        wait || move.from_host || move.to_host
            ? capture_refuses(stream)
            : capture_takes(stream,
                            move.element ? CU_GRAPH_NODE_TYPE_MEMSET : CU_GRAPH_NODE_TYPE_MEMCPY,
                            &node);
    if (node) node_moves(node, &move);
    if (held || node) return held;
    struct work work = {.run = run_move};
    if (move.from_host) {
        wait_for_stream(stream);
        work.staged = malloc(move.nbytes);
        memcpy(work.staged, (void *)(uintptr_t)move.source, move.nbytes);
        move.source = (uintptr_t)work.staged;
    }
    work.move = move;
    queue_work(stream, work);
    if (!wait && !move.to_host) return CUDA_SUCCESS;
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
    struct move move = {to, from, .nbytes = nbytes};
    REQUIRE(!host_is_split(from, nbytes) && !host_is_split(to, nbytes), INVALID_VALUE);
    unsigned known = hosts == ANY ? DEVICE_KINDS | HOST_KINDS : HOST_KINDS;
    move.from_host = hosts & FROM_HOST && !range_at(from, known);
    move.to_host = hosts & TO_HOST && !range_at(to, known);
    return call_end(queue_move(stream, move, wait));
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
    struct move move = {to, 0, nbytes, value, .element = 1};
    return call_end(queue_move(stream, move, false));
}
