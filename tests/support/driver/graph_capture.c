/* Stream capture: what the captured streams are given becomes nodes, what they and events order
 * becomes edges. A call that breaks its rules invalidates the capture. */
#include "graphs.h"

/* Never freed, since events remember it. */
struct capture {
    struct capture *next;
    CUgraph graph;
    CUstream origin;
    CUstreamCaptureMode mode;
    pthread_t thread;
    bool ended, invalidated, pretended;
    cuuint64_t id;
};

/* A stream or an event that a capture has, and what the next node of it comes after. */
struct captured {
    struct captured *next;
    const void *what;
    struct capture *capture;
    struct edges after;
    CUgraphNode *told; /* what cuStreamGetCaptureInfo handed out */
    CUgraphEdgeData *told_data;
};

static struct capture *captures;
static struct captured *streams, *events;
static __thread CUstreamCaptureMode interaction = CU_STREAM_CAPTURE_MODE_GLOBAL;

static struct captured **find(struct captured **list, const void *what) {
    while (*list && (*list)->what != what)
        list = &(*list)->next;
    return list;
}

static void take(struct captured **list, const void *what, struct capture *capture) {
    struct captured *made = calloc(1, sizeof *made);
    *made = (struct captured){*list, what, .capture = capture};
    *list = made;
}

static void release(struct captured **at) {
    struct captured *old = *at;
    *at = old->next;
    free(old->after.at);
    free(old->told);
    free(old->told_data);
    free(old);
}

static void extend(struct captured *into, const struct edges *after) {
    for (size_t i = 0; i < after->count; i++)
        edges_add(&into->after, after->at[i].from, after->at[i].data);
}

static CUresult invalidate(struct capture *capture, CUresult error) {
    if (capture->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    capture->invalidated = true;
    log_line("# the capture is invalidated");
    return error;
}

/* -- what captures forbid --------------------------------------------------------------------- */

/* The capture of another thread that MX_STANDIN_CAPTURE asks for. */
static void pretend(void) {
    static struct capture pretended = {.pretended = true};
    if (pretended.id || !*settings.capture) return;
    pretended.mode = strcmp(settings.capture, "global") ? CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
                                                        : CU_STREAM_CAPTURE_MODE_GLOBAL;
    pretended.id = 1;
    pretended.next = captures;
    captures = &pretended;
}

static bool is_mine(const struct capture *capture) {
    return !capture->pretended && pthread_equal(capture->thread, pthread_self());
}

/* cuThreadExchangeStreamCaptureMode, GLOBAL: "If the local thread has an ongoing capture sequence
 * that was not initiated with RELAXED at cuStreamBeginCapture, or if any other thread has a
 * concurrent capture sequence initiated with GLOBAL, this thread is prohibited from potentially
 * unsafe API calls." THREAD_LOCAL: "Concurrent capture sequences in other threads are ignored."
 * RELAXED: "The local thread is not prohibited from potentially unsafe API calls." */
bool capture_forbids(void) {
    pretend();
    bool forbidden = false;
    for (struct capture *at = captures; at; at = at->next) {
        if (at->ended || interaction == CU_STREAM_CAPTURE_MODE_RELAXED) continue;
        bool forbids = is_mine(at) ? at->mode != CU_STREAM_CAPTURE_MODE_RELAXED
                                   : at->mode == CU_STREAM_CAPTURE_MODE_GLOBAL &&
                                         interaction == CU_STREAM_CAPTURE_MODE_GLOBAL;
        if (forbids) invalidate(at, CUDA_SUCCESS);
        forbidden |= forbids;
    }
    return forbidden;
}

static struct captured *captured_of(CUstream stream) { return *find(&streams, stream); }

/* Return a capture that the legacy default stream would wait for: it waits for the blocking streams
 * of its context, and can't be captured. */
static struct capture *implied(CUstream stream) {
    if (stream != stream->context->default_stream) return NULL;
    for (struct captured *at = streams; at; at = at->next) {
        const CUstream other = (CUstream)at->what;
        if (other->context == stream->context && !(other->flags & CU_STREAM_NON_BLOCKING))
            return at->capture;
    }
    return NULL;
}

CUresult capture_refuses(CUstream stream) {
    struct captured *captured = captured_of(stream);
    if (captured) return invalidate(captured->capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    struct capture *capture = implied(stream);
    if (capture) invalidate(capture, CUDA_SUCCESS);
    return capture ? CUDA_ERROR_STREAM_CAPTURE_IMPLICIT : CUDA_SUCCESS;
}

/* "It is also invalid to query or synchronize a broader handle which encompasses an active stream
 * capture, such as a device or context handle" (CUDA programming guide, prohibited operations). */
CUresult capture_refuses_any(CUcontext context) {
    for (struct captured *at = streams; at; at = at->next)
        if (((CUstream)at->what)->context == context) return capture_refuses((CUstream)at->what);
    return CUDA_SUCCESS;
}

/* "The operation is not permitted on an event which was last recorded in a capturing stream." */
CUresult capture_refuses_event(CUevent event) {
    struct captured *captured = *find(&events, event);
    if (!captured) return CUDA_SUCCESS;
    if (!captured->capture->ended) invalidate(captured->capture, CUDA_SUCCESS);
    return CUDA_ERROR_CAPTURED_EVENT;
}

/* "Sets the calling thread's stream capture interaction mode to the value contained in *mode, and
 * overwrites *mode with the previous mode for the thread." */
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    CALL(NEEDS_DRIVER, "%d", *mode);
    REQUIRE(*mode <= CU_STREAM_CAPTURE_MODE_RELAXED, INVALID_VALUE);
    CUstreamCaptureMode before = interaction;
    interaction = *mode;
    GIVE(mode, before);
}

/* -- what is captured ------------------------------------------------------------------------- */

CUresult capture_takes(CUstream stream, CUgraphNodeType type, CUgraphNode *node) {
    struct captured *captured = captured_of(stream);
    *node = NULL;
    if (!captured) return capture_refuses(stream);
    if (captured->capture->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    *node = node_add(captured->capture->graph, type, &captured->after);
    (*node)->context = stream->context;
    captured->after.count = 0;
    edges_add(&captured->after, *node, (CUgraphEdgeData){0});
    return CUDA_SUCCESS;
}

CUresult capture_records(CUstream stream, CUevent event, bool external, bool *taken) {
    struct captured *captured = captured_of(stream), **marked = find(&events, event);
    CUgraphNode node = NULL;
    *taken = captured;
    if (!captured && external) return CUDA_ERROR_INVALID_VALUE;
    if (!captured || external) {
        CUresult held = capture_takes(stream, CU_GRAPH_NODE_TYPE_EVENT_RECORD, &node);
        if (node) node->event = event;
        if (!held && !captured && *marked) release(marked);
        return held;
    }
    if (captured->capture->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (*marked) release(marked);
    take(&events, event, captured->capture);
    extend(events, &captured->after);
    return CUDA_SUCCESS;
}

/* A stream that waits for a captured event is captured from then on: a fork, or a join. */
CUresult capture_waits(CUstream stream, CUevent event, bool external, bool *taken) {
    struct captured *captured = captured_of(stream), *marked = *find(&events, event);
    CUgraphNode node;
    *taken = captured || marked;
    if (external) {
        if (!captured) return CUDA_ERROR_INVALID_VALUE;
        CUresult held = capture_takes(stream, CU_GRAPH_NODE_TYPE_WAIT_EVENT, &node);
        if (node) node->event = event;
        return held;
    }
    if (!marked)
        return captured ? invalidate(captured->capture, CUDA_ERROR_STREAM_CAPTURE_ISOLATION)
                        : capture_refuses(stream);
    if (marked->capture->ended) {
        if (captured) invalidate(captured->capture, CUDA_SUCCESS);
        return CUDA_ERROR_CAPTURED_EVENT;
    }
    if (captured && captured->capture != marked->capture) {
        invalidate(captured->capture, CUDA_SUCCESS);
        return invalidate(marked->capture, CUDA_ERROR_STREAM_CAPTURE_MERGE);
    }
    if (marked->capture->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (stream == stream->context->default_stream)
        return invalidate(marked->capture, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    if (!captured) take(&streams, stream, marked->capture);
    extend(captured_of(stream), &marked->after);
    return CUDA_SUCCESS;
}

/* -- beginning and end ------------------------------------------------------------------------ */

CUresult cuStreamBeginCapture(CUstream handle, CUstreamCaptureMode mode) {
    static cuuint64_t last_id = 1;
    CALL(NEEDS_CONTEXT, "%p, %d", handle, mode);
    FIND(stream, stream_of(handle), INVALID_HANDLE);
    REQUIRE(mode <= CU_STREAM_CAPTURE_MODE_RELAXED, INVALID_VALUE);
    /* "Capture may not be initiated if stream is CU_STREAM_LEGACY." */
    REQUIRE(stream != stream->context->default_stream, STREAM_CAPTURE_UNSUPPORTED);
    REQUIRE(!captured_of(stream), ILLEGAL_STATE);
    struct capture *capture = calloc(1, sizeof *capture);
    *capture =
        (struct capture){captures, graph_new(), stream, mode, pthread_self(), .id = ++last_id};
    capture->graph->owned = true;
    captures = capture;
    FINISH(take(&streams, stream, capture));
}

/* Return true if a node, or one that comes after it, is among those. */
static bool all_joined(const struct capture *capture) {
    bool *joined = calloc(capture->graph->count + 1, 1), all = true;
    const struct edges *last = &captured_of(capture->origin)->after;
    for (size_t i = 0; i < last->count; i++)
        joined[last->at[i].from->index] = true;
    for (size_t i = capture->graph->count; i-- > 0;)
        for (size_t at = 0; at < capture->graph->nodes[i]->before.count; at++)
            joined[capture->graph->nodes[i]->before.at[at].from->index] |= joined[i];
    for (struct captured *at = streams; at; at = at->next)
        for (size_t i = 0; at->capture == capture && i < at->after.count; i++)
            all &= joined[at->after.at[i].from->index];
    free(joined);
    return all;
}

/* "If the mode argument to cuStreamBeginCapture was not CU_STREAM_CAPTURE_MODE_RELAXED, this call
 * must be from the same thread as cuStreamBeginCapture." */
CUresult cuStreamEndCapture(CUstream handle, CUgraph *graph) {
    CALL(NEEDS_CONTEXT, "%p", handle);
    FIND(stream, stream_of(handle), INVALID_HANDLE);
    FIND(captured, captured_of(stream), ILLEGAL_STATE);
    struct capture *capture = captured->capture;
    REQUIRE(capture->mode == CU_STREAM_CAPTURE_MODE_RELAXED || is_mine(capture),
            STREAM_CAPTURE_WRONG_THREAD);
    if (stream != capture->origin)
        return call_end(invalidate(capture, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED));
    CUresult result = capture->invalidated   ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
                      : !all_joined(capture) ? CUDA_ERROR_STREAM_CAPTURE_UNJOINED
                                             : CUDA_SUCCESS;
    for (struct captured **at = &streams; *at;)
        if ((*at)->capture == capture)
            release(at);
        else
            at = &(*at)->next;
    capture->ended = true;
    capture->graph->owned = false;
    if (result) graph_end(capture->graph);
    *graph = result ? NULL : capture->graph;
    return call_end(result);
}

static CUstreamCaptureStatus status_of(const struct captured *captured) {
    return !captured                        ? CU_STREAM_CAPTURE_STATUS_NONE
           : captured->capture->invalidated ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                            : CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus *status) {
    CALL(NEEDS_CONTEXT, "%p", handle);
    FIND(stream, stream_of(handle), INVALID_HANDLE);
    REQUIRE(!implied(stream), STREAM_CAPTURE_IMPLICIT);
    GIVE(status, status_of(captured_of(stream)));
}

/* "The array pointer is valid until the next API call which operates on the stream or until end of
 * capture." */
CUresult cuStreamGetCaptureInfo_v3(CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *id,
                                   CUgraph *graph, const CUgraphNode **after,
                                   const CUgraphEdgeData **data, size_t *count) {
    CALL(NEEDS_CONTEXT, "%p", handle);
    FIND(stream, stream_of(handle), INVALID_HANDLE);
    REQUIRE(status, INVALID_VALUE);
    REQUIRE(!implied(stream), STREAM_CAPTURE_IMPLICIT);
    struct captured *captured = captured_of(stream);
    *status = status_of(captured);
    if (*status != CU_STREAM_CAPTURE_STATUS_ACTIVE) return call_end(CUDA_SUCCESS);
    size_t nodes = captured->after.count;
    captured->told = realloc(captured->told, (nodes + 1) * sizeof *captured->told);
    captured->told_data = realloc(captured->told_data, (nodes + 1) * sizeof *captured->told_data);
    for (size_t i = 0; i < nodes; i++) {
        captured->told[i] = captured->after.at[i].from;
        captured->told_data[i] = captured->after.at[i].data;
        REQUIRE(!after || data || is_plain(&captured->told_data[i]), LOSSY_QUERY);
    }
    if (id) *id = captured->capture->id;
    if (graph) *graph = captured->capture->graph;
    if (after) *after = captured->told;
    if (data) *data = captured->told_data;
    if (count) *count = nodes;
    return call_end(CUDA_SUCCESS);
}

#if CUDA_VERSION < 13000
CUresult cuStreamGetCaptureInfo_v2(CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *id,
                                   CUgraph *graph, const CUgraphNode **after, size_t *count) {
    return cuStreamGetCaptureInfo_v3(handle, status, id, graph, after, NULL, count);
}
#endif

/* -- work that captures alone know ------------------------------------------------------------ */

/* Addresses without memory behind them: a graph that allocates is not instantiated here. */
CUresult cuMemAllocAsync(CUdeviceptr *address, size_t nbytes, CUstream handle) {
    CALL(NEEDS_CONTEXT, "%zu, %p", nbytes, handle);
    FIND(stream, stream_of(handle), INVALID_HANDLE);
    REQUIRE(address && nbytes, INVALID_VALUE);
    CAPTURE(stream, MEM_ALLOC, *address = addresses_reserve(round_up(nbytes, GRANULARITY), 0));
    return call_end(CUDA_ERROR_NOT_SUPPORTED);
}

static CUmemorytype type_of(CUdeviceptr address) {
    return range_at(address, HOST_KINDS) ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
}

void node_moves(CUgraphNode node, const struct move *move) {
    node->set = (CUDA_MEMSET_NODE_PARAMS){move->target,
                                          0,
                                          move->value,
                                          move->element,
                                          move->nbytes / (move->element ? move->element : 1),
                                          1};
    node->copy = (CUDA_MEMCPY3D){.srcMemoryType = type_of(move->source),
                                 .srcHost = (void *)(uintptr_t)move->source,
                                 .srcDevice = move->source,
                                 .dstMemoryType = type_of(move->target),
                                 .dstHost = (void *)(uintptr_t)move->target,
                                 .dstDevice = move->target,
                                 .WidthInBytes = move->nbytes,
                                 .Height = 1,
                                 .Depth = 1};
}
