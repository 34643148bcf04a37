/* Executables. A graph that runs runs each node after those that edges name, and edges alone give
 * an order. */
#include "kernels.h"

struct replay {
    CUgraph graph;
    CUgraphExec exec;
    uint64_t number;
};

/* Choose among nodes that may run: MX_STANDIN_GRAPH_ORDER. */
static size_t choose(const size_t *ready, size_t count) {
    static uint64_t state;
    size_t chosen = 0;
    if (strcmp(settings.graph_order, "created") && strcmp(settings.graph_order, "reverse")) {
        if (!state) state = strtoull(settings.graph_order, NULL, 10) * 2 + 1;
        state = state * 6364136223846793005u + 1442695040888963407u;
        return (size_t)(state >> 33) % count;
    }
    for (size_t i = 1; i < count; i++)
        if (*settings.graph_order == 'c' ? ready[i] < ready[chosen] : ready[i] > ready[chosen])
            chosen = i;
    return chosen;
}

static void run_set(CUgraphNode node) {
    const CUDA_MEMSET_NODE_PARAMS *set = &node->set;
    for (size_t row = 0; row < set->height; row++)
        memory_move(node->context, &(struct move){.target = set->dst + row * set->pitch,
                                                  .nbytes = set->width * set->elementSize,
                                                  .value = set->value,
                                                  .element = (uint8_t)set->elementSize});
}

/* Return where a side of a copy begins. */
static CUdeviceptr begin(CUmemorytype type, const void *host, CUdeviceptr device, bool *pageable) {
    uintptr_t at = type == CU_MEMORYTYPE_HOST ? (uintptr_t)host : device;
    *pageable = type == CU_MEMORYTYPE_HOST && !range_at(at, HOST_KINDS);
    return at;
}

static void run_copy(CUgraphNode node) {
    const CUDA_MEMCPY3D *copy = &node->copy;
    struct move move = {.nbytes = copy->WidthInBytes};
    CUdeviceptr from = begin(copy->srcMemoryType, copy->srcHost, copy->srcDevice, &move.from_host);
    CUdeviceptr to = begin(copy->dstMemoryType, copy->dstHost, copy->dstDevice, &move.to_host);
    for (size_t z = 0; z < copy->Depth; z++)
        for (size_t y = 0; y < copy->Height; y++) {
            move.source = from + copy->srcXInBytes +
                          ((z + copy->srcZ) * copy->srcHeight + y + copy->srcY) * copy->srcPitch;
            move.target = to + copy->dstXInBytes +
                          ((z + copy->dstZ) * copy->dstHeight + y + copy->dstY) * copy->dstPitch;
            memory_move(node->context, &move);
        }
}

static void run_graph(CUcontext context, CUgraph graph);

static void run_node(CUcontext context, CUgraphNode node) {
    CUevent event = node->event;
    switch ((int)node->type) {
    case CU_GRAPH_NODE_TYPE_KERNEL: kernel_run(node->context, &node->kernel); break;
    case CU_GRAPH_NODE_TYPE_MEMSET: run_set(node); break;
    case CU_GRAPH_NODE_TYPE_MEMCPY: run_copy(node); break;
    case CU_GRAPH_NODE_TYPE_GRAPH: run_graph(context, node->child); break;
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD: event->happened = ++event->recorded; break;
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
        WAIT_WHILE(event->happened < event->recorded && !context->broken);
        break;
    case CU_GRAPH_NODE_TYPE_HOST:
        driver_unlock();
        node->host.fn(node->host.userData);
        driver_lock();
    }
    driver_changed();
}

static void run_graph(CUcontext context, CUgraph graph) {
    size_t *waits = calloc(graph->count + 1, sizeof *waits), count = 0, edges = 0;
    size_t *ready = calloc(graph->count + 1, sizeof *ready);
    size_t *first = calloc(graph->count + 2, sizeof *first); /* of those after each node */
    for (size_t i = 0; i < graph->count; i++) {
        waits[i] = graph->nodes[i]->before.count;
        if (!waits[i]) ready[count++] = i;
        for (size_t at = 0; at < waits[i]; at++, edges++)
            first[graph->nodes[i]->before.at[at].from->index + 2]++;
    }
    for (size_t i = 2; i < graph->count + 2; i++)
        first[i] += first[i - 1];
    size_t *after = calloc(edges + 1, sizeof *after);
    for (size_t i = 0; i < graph->count; i++)
        for (size_t at = 0; at < waits[i]; at++)
            after[first[graph->nodes[i]->before.at[at].from->index + 1]++] = i;
    while (count && work_begins(context)) {
        size_t chosen = choose(ready, count), node = ready[chosen];
        ready[chosen] = ready[--count];
        run_node(context, graph->nodes[node]);
        for (size_t at = first[node]; at < first[node + 1]; at++)
            if (!--waits[after[at]]) ready[count++] = after[at];
    }
    free(waits);
    free(ready);
    free(first);
    free(after);
}

/* "Each launch is ordered behind both any previous work in hStream and any previous launches of
 * hGraphExec." */
static void run_replay(CUcontext context, void *argument) {
    struct replay *replay = argument;
    WAIT_WHILE(replay->exec->done < replay->number - 1 && !context->broken);
    run_graph(context, replay->graph);
    replay->exec->done = replay->number;
    if (!--replay->graph->uses && replay->exec->runs != replay->graph) graph_end(replay->graph);
    driver_changed();
}

/* -- executables ------------------------------------------------------------------------------ */

#define FIND_EXEC(handle) FIND(exec, (CUgraphExec)handle_of(handle, EXEC), INVALID_VALUE)

/* Return what instantiation has against a graph. Its nodes are taken away from a count of edges:
 * those in a cycle stay. */
static CUresult check(CUgraph graph) {
    size_t left = graph->count, before = 0;
    bool *gone = calloc(graph->count + 1, 1);
    CUresult result = CUDA_SUCCESS;
    while (left != before) {
        before = left;
        for (size_t i = 0; i < graph->count; i++) {
            bool ready = !gone[i];
            for (size_t at = 0; ready && at < graph->nodes[i]->before.count; at++)
                ready = gone[graph->nodes[i]->before.at[at].from->index];
            gone[i] |= ready;
            left -= ready;
        }
    }
    free(gone);
    for (size_t i = 0; i < graph->count && !result; i++) {
        const CUgraphNode node = graph->nodes[i];
        const struct kernel_copy *kernel = &node->kernel;
        unsigned cluster[3] = {0};
        if (node->attributes)
            memcpy(cluster, &node->attributes[CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION],
                   sizeof cluster);
        if (*cluster && (!cluster[1] || !cluster[2] || kernel->with.gridDimX % cluster[0] ||
                         kernel->with.gridDimY % cluster[1] || kernel->with.gridDimZ % cluster[2]))
            result = CUDA_ERROR_INVALID_CLUSTER_SIZE;
        if (node->type > CU_GRAPH_NODE_TYPE_EVENT_RECORD) result = CUDA_ERROR_NOT_SUPPORTED;
        if (node->child && !result) result = check(node->child);
    }
    return left ? CUDA_ERROR_INVALID_VALUE : result;
}

CUresult cuGraphInstantiate(CUgraphExec *out, CUgraph handle, Flags flags) {
    CALL(NEEDS_CONTEXT, "%p, %llu", handle, flags);
    FIND_GRAPH(handle);
    REQUIRE(out && flags <= 15, INVALID_VALUE);
    REQUIRE(!(flags & CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH), NOT_SUPPORTED);
    CUresult refused = check(graph);
    if (refused) return call_end(refused);
    CUgraphExec exec = calloc(1, sizeof *exec);
    exec->runs = graph_copy(graph);
    exec->of = graph;
    handle_add(&exec->handle, EXEC);
    GIVE(out, exec);
}

CUresult cuGraphExecDestroy(CUgraphExec handle) {
    CALL(NEEDS_DRIVER, "%p", handle);
    FIND_EXEC(handle);
    exec->handle.kind = 0;
    if (!exec->runs->uses) graph_end(exec->runs);
    FINISH(exec->runs = NULL);
}

CUresult cuGraphLaunch(CUgraphExec handle, CUstream on) {
    CALL(NEEDS_CONTEXT, "%p, %p", handle, on);
    FIND_EXEC(handle);
    FIND(stream, stream_of(on), INVALID_HANDLE);
    CAPTURE(stream, GRAPH, node->child = graph_give(graph_copy(exec->runs), true));
    struct replay *replay = malloc(sizeof *replay);
    *replay = (struct replay){exec->runs, exec, ++exec->queued};
    exec->runs->uses++;
    FINISH(stream_queue(stream, run_replay, replay));
}

static void nothing(CUcontext context, void *data) {
    (void)context;
    (void)data;
}

CUresult cuGraphUpload(CUgraphExec handle, CUstream on) {
    CALL(NEEDS_CONTEXT, "%p, %p", handle, on);
    FIND_EXEC(handle);
    FIND_STREAM(stream, on);
    FINISH(stream_queue(stream, nothing, NULL));
}

/* "The modifications only affect future launches of hGraphExec. Already enqueued or running
 * launches of hGraphExec are not affected by this call." */
static CUgraph to_change(CUgraphExec exec) {
    if (exec->runs->uses) exec->runs = graph_copy(exec->runs);
    return exec->runs;
}

CUresult cuGraphExecKernelNodeSetParams(CUgraphExec handle, CUgraphNode of,
                                        const CUDA_KERNEL_NODE_PARAMS *with) {
    CALL(NEEDS_DRIVER, "%p, %p", handle, of);
    FIND_EXEC(handle);
    FIND_NODE_OF(of, KERNEL);
    REQUIRE(node->graph == exec->of && node->index < exec->runs->count, INVALID_VALUE);
    struct kernel_copy copy;
    CUresult kept = kernel_of(&copy, with);
    if (kept) return call_end(kept);
    REQUIRE(copy.with.ctx == exec->runs->nodes[node->index]->context, INVALID_VALUE);
    FINISH(to_change(exec)->nodes[node->index]->kernel = copy);
}

/* Compare a graph with what an executable runs. */
static CUgraphExecUpdateResultInfo difference(CUgraph runs, CUgraph graph) {
    CUgraphExecUpdateResultInfo found = {.result = CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED};
    if (runs->count != graph->count) return found;
    for (size_t i = 0; i < graph->count; i++) {
        CUgraphNode was = runs->nodes[i], is = graph->nodes[i];
        found.errorNode = is;
        bool copies = is->type == CU_GRAPH_NODE_TYPE_MEMCPY;
        if (was->before.count != is->before.count) return found;
        for (size_t at = 0; at < is->before.count; at++) {
            const struct edge *first = &was->before.at[at], *second = &is->before.at[at];
            found.errorFromNode = second->from;
            if (first->from->index != second->from->index ||
                memcmp(&first->data, &second->data, sizeof first->data))
                return found;
        }
        found.errorFromNode = NULL;
        if (was->type != is->type)
            return found.result = CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED, found;
        if (was->context != is->context ||
            (copies && (was->copy.srcMemoryType != is->copy.srcMemoryType ||
                        was->copy.dstMemoryType != is->copy.dstMemoryType)))
            return found.result = CU_GRAPH_EXEC_UPDATE_ERROR_PARAMETERS_CHANGED, found;
        if (is->child) {
            CUgraphExecUpdateResultInfo within = difference(was->child, is->child);
            if (within.result) return within;
        }
    }
    return (CUgraphExecUpdateResultInfo){.result = CU_GRAPH_EXEC_UPDATE_SUCCESS};
}

CUresult cuGraphExecUpdate(CUgraphExec handle, CUgraph to, CUgraphExecUpdateResultInfo *found) {
    CALL(NEEDS_DRIVER, "%p, %p", handle, to);
    FIND_EXEC(handle);
    FIND_GRAPH(to);
    REQUIRE(found, INVALID_VALUE);
    *found = difference(exec->runs, graph);
    REQUIRE(!found->result, GRAPH_EXEC_UPDATE_FAILURE);
    CUresult refused = check(graph);
    if (refused) return call_end(refused);
    if (!exec->runs->uses) graph_end(exec->runs);
    FINISH(exec->runs = graph_copy(graph));
}
