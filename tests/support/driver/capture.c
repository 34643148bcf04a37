/* Stream capture as far as it forbids calls; what a captured stream is given is not recorded yet,
 * and is refused. */
#include "standin.h"

static struct capture {
    bool active, invalidated, pretended;
    CUstream stream;
    CUstreamCaptureMode mode;
    pthread_t thread;
} capture;
static __thread CUstreamCaptureMode interaction = CU_STREAM_CAPTURE_MODE_GLOBAL;

/* The capture of another thread that MX_STANDIN_CAPTURE asks for. */
static void pretend(void) {
    if (capture.active || !*settings.capture) return;
    capture.active = capture.pretended = true;
    capture.mode = strcmp(settings.capture, "global") ? CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
                                                      : CU_STREAM_CAPTURE_MODE_GLOBAL;
}

/* cuThreadExchangeStreamCaptureMode, GLOBAL: "If the local thread has an ongoing capture sequence
 * that was not initiated with RELAXED at cuStreamBeginCapture, or if any other thread has a
 * concurrent capture sequence initiated with GLOBAL, this thread is prohibited from potentially
 * unsafe API calls." THREAD_LOCAL: "Concurrent capture sequences in other threads are ignored."
 * RELAXED: "The local thread is not prohibited from potentially unsafe API calls." */
bool capture_forbids(void) {
    pretend();
    if (!capture.active || interaction == CU_STREAM_CAPTURE_MODE_RELAXED) return false;
    bool mine = !capture.pretended && pthread_equal(capture.thread, pthread_self());
    bool forbidden = mine ? capture.mode != CU_STREAM_CAPTURE_MODE_RELAXED
                          : capture.mode == CU_STREAM_CAPTURE_MODE_GLOBAL &&
                                interaction == CU_STREAM_CAPTURE_MODE_GLOBAL;
    if (forbidden && !capture.invalidated) {
        capture.invalidated = true;
        log_line("# the capture is invalidated");
    }
    return forbidden;
}

bool capture_has(CUstream stream) { return capture.active && capture.stream == stream; }

/* "Sets the calling thread's stream capture interaction mode to the value contained in *mode, and
 * overwrites *mode with the previous mode for the thread." */
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    CALL(NEEDS_DRIVER, "%d", *mode);
    REQUIRE(*mode <= CU_STREAM_CAPTURE_MODE_RELAXED, INVALID_VALUE);
    CUstreamCaptureMode before = interaction;
    interaction = *mode;
    GIVE(mode, before);
}

CUresult cuStreamBeginCapture(CUstream handle, CUstreamCaptureMode mode) {
    CALL(NEEDS_CONTEXT, "%p, %d", handle, mode);
    CUstream stream = handle ? stream_of(handle) : NULL;
    /* "Capture may not be initiated if stream is CU_STREAM_LEGACY." One at a time is enough here.
     */
    REQUIRE(stream && stream != context_current()->default_stream && !capture.active,
            STREAM_CAPTURE_UNSUPPORTED);
    capture = (struct capture){true, .stream = stream, .mode = mode, .thread = pthread_self()};
    return call_end(CUDA_SUCCESS);
}

/* "If the mode argument to cuStreamBeginCapture was not CU_STREAM_CAPTURE_MODE_RELAXED, this call
 * must be from the same thread as cuStreamBeginCapture." */
CUresult cuStreamEndCapture(CUstream handle, CUgraph *graph) {
    CALL(NEEDS_CONTEXT, "%p", handle);
    REQUIRE(handle && capture_has(handle), ILLEGAL_STATE);
    REQUIRE(capture.mode == CU_STREAM_CAPTURE_MODE_RELAXED ||
                pthread_equal(capture.thread, pthread_self()),
            STREAM_CAPTURE_WRONG_THREAD);
    capture.active = false;
    capture.stream = NULL;
    *graph = NULL;
    return call_end(capture.invalidated ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS);
}

CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus *status) {
    CALL(NEEDS_CONTEXT, "%p", handle);
    FIND(stream, stream_of(handle), INVALID_HANDLE);
    GIVE(status, !capture_has(stream)  ? CU_STREAM_CAPTURE_STATUS_NONE
                 : capture.invalidated ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                       : CU_STREAM_CAPTURE_STATUS_ACTIVE);
}
