/* Graphs as processes build them. */
#include "kernels.h"

/* -- handles ---------------------------------------------------------------------------------- */

#define BUCKETS 4096

static struct handle *buckets[BUCKETS];

static struct handle **bucket_of(const void *handle) {
    return &buckets[(uintptr_t)handle / sizeof(void *) * 2654435761u / 64 % BUCKETS];
}

void handle_add(struct handle *handle, enum graph_handles kind) {
    struct handle **bucket = bucket_of(handle);
    *handle = (struct handle){*bucket, kind};
    *bucket = handle;
}

void *handle_of(const void *handle, enum graph_handles kind) {
    struct handle *at = *bucket_of(handle);
    while (at && at != handle)
        at = at->next;
    return at && at->kind == kind ? at : NULL;
}

/* -- edges ------------------------------------------------------------------------------------ */

bool edges_add(struct edges *edges, CUgraphNode from, CUgraphEdgeData data) {
    for (size_t i = 0; i < edges->count; i++)
        if (edges->at[i].from == from) return false;
    edges->at = realloc(edges->at, (edges->count + 1) * sizeof *edges->at);
    edges->at[edges->count++] = (struct edge){from, data};
    return true;
}

bool is_plain(const CUgraphEdgeData *data) {
    static const CUgraphEdgeData plain;
    return !memcmp(data, &plain, sizeof plain);
}

/* "Only kernel nodes define non-zero ports." */
static bool is_edge(CUgraphNode from, CUgraphNode to, const CUgraphEdgeData *data) {
    CUgraphEdgeData other = *data;
    other.from_port = other.type = 0;
    bool kernels = from->type == CU_GRAPH_NODE_TYPE_KERNEL && to->type == from->type;
    bool programmatic = data->type == CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC;
    return is_plain(&other) && (programmatic ? kernels && data->from_port && data->from_port <= 2
                                             : !data->type && !data->from_port);
}

/* -- graphs and nodes ------------------------------------------------------------------------- */

CUgraph graph_new(void) {
    CUgraph graph = calloc(1, sizeof *graph);
    handle_add(&graph->handle, GRAPH);
    return graph;
}

static CUgraphNode node_put(CUgraph graph, CUgraphNode node) {
    node->graph = graph;
    node->index = graph->count;
    if (!(graph->count & (graph->count - 1)))
        graph->nodes = realloc(graph->nodes, (2 * graph->count + 1) * sizeof node);
    return graph->nodes[graph->count++] = node;
}

CUgraphNode node_add(CUgraph graph, CUgraphNodeType type, const struct edges *before) {
    CUgraphNode node = calloc(1, sizeof *node);
    node->type = type;
    node->context = context_current();
    for (size_t i = 0; before && i < before->count; i++)
        edges_add(&node->before, before->at[i].from, before->at[i].data);
    handle_add(&node->handle, NODE);
    return node_put(graph, node);
}

CUgraph graph_copy(CUgraph graph) {
    CUgraph copy = calloc(1, sizeof *copy);
    for (size_t i = 0; i < graph->count; i++) {
        CUgraphNode node = malloc(sizeof *node), from = graph->nodes[i];
        *node = *from;
        node->handle = (struct handle){0};
        node->before = (struct edges){0};
        if (from->attributes) {
            node->attributes = malloc(MOST_ATTRIBUTES * sizeof *node->attributes);
            memcpy(node->attributes, from->attributes, MOST_ATTRIBUTES * sizeof *node->attributes);
        }
        if (from->child) node->child = graph_copy(from->child);
        node_put(copy, node);
    }
    for (size_t i = 0; i < graph->count; i++)
        for (size_t at = 0; at < graph->nodes[i]->before.count; at++) {
            struct edge *edge = &graph->nodes[i]->before.at[at];
            edges_add(&copy->nodes[i]->before, copy->nodes[edge->from->index], edge->data);
        }
    return copy;
}

CUgraph graph_give(CUgraph copy, bool owned) {
    copy->owned = owned;
    handle_add(&copy->handle, GRAPH);
    for (size_t i = 0; i < copy->count; i++) {
        handle_add(&copy->nodes[i]->handle, NODE);
        if (copy->nodes[i]->child) graph_give(copy->nodes[i]->child, true);
    }
    return copy;
}

void graph_end(CUgraph graph) {
    bool given = graph->handle.kind;
    graph->handle.kind = 0;
    for (size_t i = 0; i < graph->count; i++) {
        CUgraphNode node = graph->nodes[i];
        node->handle.kind = 0;
        if (node->child) graph_end(node->child);
        free(node->before.at);
        node->before = (struct edges){0};
        free(node->attributes);
        if (!given) free(node);
    }
    free(graph->nodes);
    graph->nodes = NULL;
    if (!given) free(graph);
}

CUresult cuGraphCreate(CUgraph *out, unsigned flags) {
    CALL(NEEDS_DRIVER, "%u", flags);
    REQUIRE(out && !flags, INVALID_VALUE);
    GIVE(out, graph_new());
}

CUresult cuGraphDestroy(CUgraph handle) {
    CALL(NEEDS_DRIVER, "%p", handle);
    FIND_GRAPH(handle);
    REQUIRE(!graph->owned, INVALID_VALUE);
    FINISH(graph_end(graph));
}

CUresult cuGraphClone(CUgraph *out, CUgraph handle) {
    CALL(NEEDS_DRIVER, "%p", handle);
    FIND_GRAPH(handle);
    REQUIRE(out, INVALID_VALUE);
    GIVE(out, graph_give(graph_copy(graph), false));
}

/* -- building --------------------------------------------------------------------------------- */

/* Add a node to a graph, after others of it; NULL if one is none or is twice. */
static CUgraphNode node_after(CUgraph handle, CUgraphNodeType type, const CUgraphNode *before,
                              const CUgraphEdgeData *data, size_t count) {
    CUgraph graph = handle_of(handle, GRAPH);
    struct edges edges = {0};
    struct CUgraphNode_st made = {.type = type};
    bool good = graph && (before || !count);
    for (size_t i = 0; good && i < count; i++) {
        CUgraphNode node = handle_of(before[i], NODE);
        CUgraphEdgeData plain = {0}, edge = data ? data[i] : plain;
        good = node && node->graph == graph && is_edge(node, &made, &edge) &&
               edges_add(&edges, node, edge);
    }
    CUgraphNode node = good ? node_add(graph, type, &edges) : NULL;
    free(edges.at);
    return node;
}

#define ADDS CUgraphNode *out, CUgraph handle, const CUgraphNode *before, size_t count
#define ADD(kind)                                                                                  \
    FIND(node, node_after(handle, CU_GRAPH_NODE_TYPE_##kind, before, NULL, count), INVALID_VALUE)
#define CALL_ADD(...)                                                                              \
    CALL(NEEDS_DRIVER, "%p, %zu before", handle, count);                                           \
    REQUIRE(out, INVALID_VALUE)

/* A launch that need not wait for the kernels before it to end: they say when it may begin. */
static void trigger(struct edges *before) {
    for (size_t i = 0; i < before->count; i++)
        if (before->at[i].from->type == CU_GRAPH_NODE_TYPE_KERNEL)
            before->at[i].data = (CUgraphEdgeData){
                CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC,
                .type = CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC,
            };
}

void node_launches(CUgraphNode node, const struct kernel_copy *copy, const CUlaunchConfig *config) {
    node->kernel = *copy;
    for (unsigned at = 0; config && at < config->numAttrs; at++) {
        if (!node->attributes) node->attributes = calloc(MOST_ATTRIBUTES, sizeof *node->attributes);
        const CUlaunchAttribute *attribute = &config->attrs[at];
        if (attribute->id != CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
            node->attributes[attribute->id] = attribute->value;
        else if (attribute->value.programmaticStreamSerializationAllowed)
            trigger(&node->before);
    }
}

CUresult kernel_of(struct kernel_copy *copy, const CUDA_KERNEL_NODE_PARAMS *with) {
    if (!with) return CUDA_ERROR_INVALID_VALUE;
    struct loaded *loaded = image_of(with->func, FUNCTION);
    CUcontext context = loaded ? loaded->context : with->ctx;
    if (!context) context = context_current();
    if (!context_exists(context)) return CUDA_ERROR_INVALID_CONTEXT;
    return kernel_keep(copy, with, context);
}

CUresult cuGraphAddKernelNode(ADDS, const CUDA_KERNEL_NODE_PARAMS *with) {
    CALL_ADD();
    struct kernel_copy copy;
    CUresult kept = kernel_of(&copy, with);
    if (kept) return call_end(kept);
    ADD(KERNEL);
    node_launches(node, &copy, NULL);
    node->context = copy.with.ctx;
    GIVE(out, node);
}

static bool is_set(const CUDA_MEMSET_NODE_PARAMS *set) {
    size_t element = set ? set->elementSize : 0;
    return (element == 1 || element == 2 || element == 4) && set->width && set->height &&
           set->dst % element == 0 && (element == 4 || set->value >> 8 * element == 0) &&
           (set->height == 1 || set->pitch >= set->width * element);
}

/* Arrays are no memory here. */
static bool is_copy(const CUDA_MEMCPY3D *copy) {
    return copy && copy->WidthInBytes && copy->Height && copy->Depth &&
           copy->srcMemoryType != CU_MEMORYTYPE_ARRAY && copy->dstMemoryType != CU_MEMORYTYPE_ARRAY;
}

CUresult cuGraphAddMemsetNode(ADDS, const CUDA_MEMSET_NODE_PARAMS *set, CUcontext context) {
    CALL_ADD();
    REQUIRE(is_set(set), INVALID_VALUE);
    REQUIRE(context_exists(context), INVALID_CONTEXT);
    ADD(MEMSET);
    node->set = *set;
    node->context = context;
    GIVE(out, node);
}

CUresult cuGraphAddMemcpyNode(ADDS, const CUDA_MEMCPY3D *copy, CUcontext context) {
    CALL_ADD();
    REQUIRE(is_copy(copy), INVALID_VALUE);
    REQUIRE(context_exists(context), INVALID_CONTEXT);
    ADD(MEMCPY);
    node->copy = *copy;
    node->context = context;
    GIVE(out, node);
}

/* What a node of a graph does from now on; executables that were made of it stay as they are. */
CUresult cuGraphKernelNodeSetParams(CUgraphNode of, const CUDA_KERNEL_NODE_PARAMS *with) {
    CALL(NEEDS_DRIVER, "%p, %p", of, with);
    FIND_NODE_OF(of, KERNEL);
    struct kernel_copy copy;
    CUresult kept = kernel_of(&copy, with);
    if (kept) return call_end(kept);
    node->context = copy.with.ctx;
    FINISH(node->kernel = copy);
}

CUresult cuGraphMemsetNodeSetParams(CUgraphNode of, const CUDA_MEMSET_NODE_PARAMS *set) {
    CALL(NEEDS_DRIVER, "%p, %p", of, set);
    FIND_NODE_OF(of, MEMSET);
    REQUIRE(is_set(set), INVALID_VALUE);
    FINISH(node->set = *set);
}

CUresult cuGraphMemcpyNodeSetParams(CUgraphNode of, const CUDA_MEMCPY3D *copy) {
    CALL(NEEDS_DRIVER, "%p, %p", of, copy);
    FIND_NODE_OF(of, MEMCPY);
    REQUIRE(is_copy(copy), INVALID_VALUE);
    FINISH(node->copy = *copy);
}

CUresult cuGraphAddEmptyNode(ADDS) {
    CALL_ADD();
    ADD(EMPTY);
    GIVE(out, node);
}

CUresult cuGraphAddChildGraphNode(ADDS, CUgraph child) {
    CALL_ADD();
    FIND(graph, (CUgraph)handle_of(child, GRAPH), INVALID_VALUE);
    ADD(GRAPH);
    node->child = graph_give(graph_copy(graph), true);
    GIVE(out, node);
}

CUresult cuGraphConditionalHandleCreate(CUgraphConditionalHandle *out, CUgraph handle,
                                        CUcontext context, unsigned first, unsigned flags) {
    CALL(NEEDS_DRIVER, "%p, %p, %u, %u", handle, context, first, flags);
    FIND_GRAPH(handle);
    GIVE(out, (uintptr_t)graph);
}

/* Conditional nodes alone: the others have calls of their own. They are not instantiated here. */
CUresult cuGraphAddNode_v2(CUgraphNode *out, CUgraph handle, const CUgraphNode *before,
                           const CUgraphEdgeData *data, size_t count, CUgraphNodeParams *with) {
    CALL_ADD();
    REQUIRE(with, INVALID_VALUE);
    REQUIRE(with->type == CU_GRAPH_NODE_TYPE_CONDITIONAL, NOT_SUPPORTED);
    REQUIRE(with->conditional.handle == (uintptr_t)handle && with->conditional.size, INVALID_VALUE);
    FIND(node, node_after(handle, with->type, before, data, count), INVALID_VALUE);
    node->child = graph_give(calloc(1, sizeof *node->child), true);
    with->conditional.phGraph_out = &node->child;
    GIVE(out, node);
}

CUresult cuGraphAddDependencies_v2(CUgraph handle, const CUgraphNode *from, const CUgraphNode *to,
                                   const CUgraphEdgeData *data, size_t count) {
    CALL(NEEDS_DRIVER, "%p, %zu", handle, count);
    FIND_GRAPH(handle);
    for (size_t i = 0; i < count; i++) {
        CUgraphNode first = handle_of(from[i], NODE), second = handle_of(to[i], NODE);
        CUgraphEdgeData plain = {0}, edge = data ? data[i] : plain;
        REQUIRE(first && second && first != second, INVALID_VALUE);
        REQUIRE(first->graph == graph && second->graph == graph, INVALID_VALUE);
        /* "Specifying an existing dependency will return an error." */
        REQUIRE(is_edge(first, second, &edge), INVALID_VALUE);
        REQUIRE(edges_add(&second->before, first, edge), INVALID_VALUE);
    }
    return call_end(CUDA_SUCCESS);
}
