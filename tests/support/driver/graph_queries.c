/* What graphs and nodes are asked. A graph lists its nodes last first: no order is promised. */
#include "kernels.h"

/* "If nodes is NULL, the function instead returns the number in numNodes"; "if numNodes is higher
 * than the actual number of nodes, the remaining entries in nodes will be set to NULL". */
CUresult cuGraphGetNodes(CUgraph handle, CUgraphNode *nodes, size_t *count) {
    CALL(NEEDS_DRIVER, "%p", handle);
    FIND_GRAPH(handle);
    for (size_t i = 0; nodes && i < *count; i++)
        nodes[i] = i < graph->count ? graph->nodes[graph->count - 1 - i] : NULL;
    if (!nodes || *count > graph->count) *count = graph->count;
    return call_end(CUDA_SUCCESS);
}

/* Write edges to one node after those to others, as far as there is room; false if edges that are
 * not plain have no place to be told. */
static bool tell(CUgraphNode node, CUgraphNode *from, CUgraphNode *to, CUgraphEdgeData *data,
                 size_t room, size_t *found) {
    for (size_t i = 0; i < node->before.count; i++, ++*found) {
        const struct edge *edge = &node->before.at[i];
        if (*found >= room) continue;
        if (!data && !is_plain(&edge->data)) return false;
        from[*found] = edge->from;
        if (to) to[*found] = node;
        if (data) data[*found] = edge->data;
    }
    return true;
}

static CUresult tell_all(CUgraphNode *nodes, size_t nodes_count, CUgraphNode *from, CUgraphNode *to,
                         CUgraphEdgeData *data, size_t *count) {
    size_t room = from ? *count : 0, found = 0;
    for (size_t i = nodes_count; i-- > 0;)
        REQUIRE(tell(nodes[i], from, to, data, room, &found), LOSSY_QUERY);
    for (size_t i = found; i < room; i++) {
        from[i] = NULL;
        if (to) to[i] = NULL;
    }
    GIVE(count, from && found > room ? room : found);
}

CUresult cuGraphGetEdges_v2(CUgraph handle, CUgraphNode *from, CUgraphNode *to,
                            CUgraphEdgeData *data, size_t *count) {
    CALL(NEEDS_DRIVER, "%p", handle);
    FIND_GRAPH(handle);
    REQUIRE(!from == !to && count && (from || !data), INVALID_VALUE);
    return tell_all(graph->nodes, graph->count, from, to, data, count);
}

CUresult cuGraphNodeGetDependencies_v2(CUgraphNode handle, CUgraphNode *from, CUgraphEdgeData *data,
                                       size_t *count) {
    CALL(NEEDS_DRIVER, "%p", handle);
    FIND_NODE(handle);
    REQUIRE(count && (from || !data), INVALID_VALUE);
    return tell_all(&node, 1, from, NULL, data, count);
}

/* Before CUDA 13 the plain names are calls without the data of edges. */
#if CUDA_VERSION < 13000
CUresult cuGraphGetEdges(CUgraph graph, CUgraphNode *from, CUgraphNode *to, size_t *count) {
    return cuGraphGetEdges_v2(graph, from, to, NULL, count);
}

CUresult cuGraphNodeGetDependencies(CUgraphNode node, CUgraphNode *from, size_t *count) {
    return cuGraphNodeGetDependencies_v2(node, from, NULL, count);
}

CUresult cuGraphAddDependencies(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to,
                                size_t count) {
    return cuGraphAddDependencies_v2(graph, from, to, NULL, count);
}
#endif

/* "The kernelParams array and the argument values it points to are owned by the node." */
CUresult cuGraphKernelNodeGetParams(CUgraphNode handle, CUDA_KERNEL_NODE_PARAMS *with) {
    CALL(NEEDS_DRIVER, "%p", handle);
    FIND_NODE_OF(handle, KERNEL);
    const struct kernel *kernel = node->kernel.loaded->kernel;
    for (size_t i = 0; i < kernel->parameters; i++)
        node->kernel.pointers[i] = (char *)node->kernel.values + kernel->layout[i][0];
    node->kernel.with.kernelParams = node->kernel.pointers;
    GIVE(with, node->kernel.with);
}

/* A call that says one thing of a node. */
#define SAYS(name, find, type, value)                                                              \
    CUresult name(CUgraphNode handle, type *out) {                                                 \
        CALL(NEEDS_DRIVER, "%p", handle);                                                          \
        find;                                                                                      \
        GIVE(out, value);                                                                          \
    }

SAYS(cuGraphNodeGetType, FIND_NODE(handle), CUgraphNodeType, node->type)
SAYS(cuGraphMemsetNodeGetParams, FIND_NODE_OF(handle, MEMSET), CUDA_MEMSET_NODE_PARAMS, node->set)
SAYS(cuGraphMemcpyNodeGetParams, FIND_NODE_OF(handle, MEMCPY), CUDA_MEMCPY3D, node->copy)
SAYS(cuGraphChildGraphNodeGetGraph, FIND_NODE_OF(handle, GRAPH), CUgraph, node->child)

/* Those that cuda.h says are valid for graph nodes, and for the order of launches. */
bool kernel_attribute_is_known(CUlaunchAttributeID attribute) {
#define BIT(name) (1u << CU_LAUNCH_ATTRIBUTE_##name)
    static const unsigned known =
        BIT(ACCESS_POLICY_WINDOW) | BIT(COOPERATIVE) | BIT(CLUSTER_DIMENSION) | BIT(PRIORITY) |
        BIT(CLUSTER_SCHEDULING_POLICY_PREFERENCE) | BIT(PROGRAMMATIC_STREAM_SERIALIZATION) |
        BIT(MEM_SYNC_DOMAIN_MAP) | BIT(MEM_SYNC_DOMAIN) | BIT(PREFERRED_CLUSTER_DIMENSION) |
        BIT(PREFERRED_SHARED_MEMORY_CARVEOUT);
    return attribute < MOST_ATTRIBUTES && known >> attribute & 1;
}

#define IS_NODE_ATTRIBUTE(attribute)                                                               \
    (kernel_attribute_is_known(attribute) &&                                                       \
     (attribute) != CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)

CUresult cuGraphKernelNodeGetAttribute(CUgraphNode handle, CUkernelNodeAttrID attribute,
                                       CUkernelNodeAttrValue *value) {
    CALL(NEEDS_DRIVER, "%p, %d", handle, attribute);
    FIND_NODE_OF(handle, KERNEL);
    REQUIRE(value && IS_NODE_ATTRIBUTE(attribute), INVALID_VALUE);
    memset(value, 0, sizeof *value);
    if (node->attributes) *value = node->attributes[attribute];
    return call_end(CUDA_SUCCESS);
}

CUresult cuGraphKernelNodeSetAttribute(CUgraphNode handle, CUkernelNodeAttrID attribute,
                                       const CUkernelNodeAttrValue *value) {
    CALL(NEEDS_DRIVER, "%p, %d", handle, attribute);
    FIND_NODE_OF(handle, KERNEL);
    REQUIRE(value && IS_NODE_ATTRIBUTE(attribute), INVALID_VALUE);
    CUlaunchAttribute only = {.id = attribute, .value = *value};
    CUlaunchConfig config = {.attrs = &only, .numAttrs = 1};
    struct kernel_copy same = node->kernel;
    FINISH(node_launches(node, &same, &config));
}
