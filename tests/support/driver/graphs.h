/* What those that record, keep and run graphs share, and streams with them. */
#ifndef GRAPHS_H
#define GRAPHS_H

#include "standin.h"

#define MOST_PARAMETERS 32
/* Words of all parameters: structures are passed by value. */
#define MOST_WORDS 192
#define MOST_ATTRIBUTES 32

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

/* A kernel and its parameters' values, each at its offset. */
struct kernel_copy {
    struct loaded *loaded;
    CUDA_KERNEL_NODE_PARAMS with;
    uint64_t values[MOST_WORDS];
    void *pointers[MOST_PARAMETERS];
};

enum graph_handles { GRAPH = 1, NODE, EXEC };

/* Graphs, nodes and executables begin with this; those that a process was given are never freed. */
struct handle {
    struct handle *next;
    enum graph_handles kind; /* 0 after it was destroyed */
};

struct edge {
    CUgraphNode from;
    CUgraphEdgeData data;
};

struct edges {
    struct edge *at;
    size_t count;
};

struct CUgraphNode_st {
    struct handle handle;
    CUgraph graph;
    size_t index; /* in it */
    CUgraphNodeType type;
    struct edges before;
    CUcontext context;
    struct kernel_copy kernel;
    CUDA_MEMSET_NODE_PARAMS set;
    CUDA_MEMCPY3D copy;
    CUDA_HOST_NODE_PARAMS host;
    CUevent event;
    CUgraph child;
    CUlaunchAttributeValue *attributes; /* of a kernel: NULL as long as all are 0 */
};

struct CUgraph_st {
    struct handle handle;
    CUgraphNode *nodes; /* in the order in which they were added */
    size_t count;
    bool owned; /* by a node, or by a capture */
    int uses;   /* of what an executable runs */
};

struct CUgraphExec_st {
    struct handle handle;
    CUgraph runs; /* a copy that has no handles */
    CUgraph of;   /* whose nodes name those of the copy; it may be destroyed since */
    uint64_t queued, done;
};

/* -- graphs.c */

void handle_add(struct handle *handle, enum graph_handles kind);
/* Return what a process means by a handle, NULL if it is none of that kind. */
void *handle_of(const void *handle, enum graph_handles kind);

#define FIND_GRAPH(handle) FIND(graph, (CUgraph)handle_of(handle, GRAPH), INVALID_VALUE)
#define FIND_NODE(handle) FIND(node, (CUgraphNode)handle_of(handle, NODE), INVALID_VALUE)
#define FIND_NODE_OF(handle, kind)                                                                 \
    FIND_NODE(handle);                                                                             \
    REQUIRE(node->type == CU_GRAPH_NODE_TYPE_##kind, INVALID_VALUE)

CUgraph graph_new(void);
/* Return a copy that is no handle yet, nor are its nodes and the graphs within it. */
CUgraph graph_copy(CUgraph graph);
/* Make handles of a copy. */
CUgraph graph_give(CUgraph copy, bool owned);
/* Destroy a graph's handles, or free a copy that has none. */
void graph_end(CUgraph graph);
CUgraphNode node_add(CUgraph graph, CUgraphNodeType type, const struct edges *before);
/* Add an edge unless there is one between the two. */
bool edges_add(struct edges *edges, CUgraphNode from, CUgraphEdgeData data);
bool is_plain(const CUgraphEdgeData *data);
/* Copy what a kernel node is given, with the context that it is for. */
CUresult kernel_of(struct kernel_copy *copy, const CUDA_KERNEL_NODE_PARAMS *with);
/* Fill a node with a launch. */
void node_launches(CUgraphNode node, const struct kernel_copy *copy, const CUlaunchConfig *config);
bool kernel_attribute_is_known(CUlaunchAttributeID attribute);

/* -- graph_capture.c */

/* Return the error of a call that can't be captured, and invalidate the capture. */
CUresult capture_refuses(CUstream stream);
CUresult capture_refuses_event(CUevent event);
/* Record an event; `taken` becomes true if a capture has the stream. */
CUresult capture_records(CUstream stream, CUevent event, bool external, bool *taken);
CUresult capture_waits(CUstream stream, CUevent event, bool external, bool *taken);

/* Find a stream that no capture has, or end the call with an error. */
#define FIND_STREAM(stream, handle)                                                                \
    FIND(stream, stream_of(handle), INVALID_HANDLE);                                               \
    do {                                                                                           \
        CUresult held = capture_refuses(stream);                                                   \
        if (held) return call_end(held);                                                           \
    } while (0)

/* Fill a node with a copy or a setting. */
void node_moves(CUgraphNode node, const struct move *move);
/* Give work on a stream to the capture that has it: `node` becomes a node for it, NULL if there is
 * no such capture. */
CUresult capture_takes(CUstream stream, CUgraphNodeType type, CUgraphNode *node);
/* End a call that is captured, after filling its node. */
#define CAPTURE(stream, kind, fill)                                                                \
    do {                                                                                           \
        CUgraphNode node;                                                                          \
        CUresult taken = capture_takes(stream, CU_GRAPH_NODE_TYPE_##kind, &node);                  \
        if (taken) return call_end(taken);                                                         \
        if (node) FINISH(fill);                                                                    \
    } while (0)

#endif
