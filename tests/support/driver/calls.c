/* What all calls share: the lock, the log, the checks before a call, and failures on purpose. */
#include "standin.h"

#include <stdarg.h>
#include <sys/syscall.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int log_fd = -1;
static pid_t log_process;

/* The call that this thread is in. */
static __thread struct {
    char text[200];
    bool locked;
} now;

void driver_lock(void) { pthread_mutex_lock(&lock); }
void driver_unlock(void) { pthread_mutex_unlock(&lock); }
void driver_wait(void) { pthread_cond_wait(&changed, &lock); }
void driver_changed(void) { pthread_cond_broadcast(&changed); }

void log_line(const char *format, ...) {
    if (!settings.log_folder || !*settings.log_folder) return;
    if (log_process != getpid()) { /* a forked child has a log of its own */
        char path[4096];
        snprintf(path, sizeof path, "%s/%d.log", settings.log_folder, getpid());
        log_fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
        log_process = getpid();
    }
    char line[512];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(line, sizeof line - 1, format, arguments);
    va_end(arguments);
    length = length < (int)sizeof line - 1 ? length : (int)sizeof line - 2;
    line[length++] = '\n';
    /* One write, so that lines of several threads do not mix. */
    if (write(log_fd, line, (size_t)length) != length) log_process = 0;
}

/* -- errors ----------------------------------------------------------------------------------- */

#define ERROR(name) {CUDA_ERROR_##name, "CUDA_ERROR_" #name}
static const struct {
    CUresult code;
    const char *name;
} errors[] = {
    /* clang-format off */
    {CUDA_SUCCESS, "CUDA_SUCCESS"},
    ERROR(INVALID_VALUE), ERROR(OUT_OF_MEMORY), ERROR(NOT_INITIALIZED), ERROR(DEINITIALIZED),
    ERROR(NO_DEVICE), ERROR(INVALID_DEVICE), ERROR(INVALID_IMAGE), ERROR(INVALID_CONTEXT),
    ERROR(MAP_FAILED), ERROR(NOT_MAPPED), ERROR(NO_BINARY_FOR_GPU), ERROR(ECC_UNCORRECTABLE),
    ERROR(UNSUPPORTED_LIMIT), ERROR(PEER_ACCESS_UNSUPPORTED), ERROR(INVALID_HANDLE),
    ERROR(ILLEGAL_STATE), ERROR(NOT_FOUND), ERROR(NOT_READY), ERROR(ILLEGAL_ADDRESS),
    ERROR(LAUNCH_TIMEOUT), ERROR(PEER_ACCESS_ALREADY_ENABLED), ERROR(PEER_ACCESS_NOT_ENABLED),
    ERROR(CONTEXT_IS_DESTROYED), ERROR(TOO_MANY_PEERS), ERROR(HOST_MEMORY_ALREADY_REGISTERED),
    ERROR(HOST_MEMORY_NOT_REGISTERED), ERROR(HARDWARE_STACK_ERROR), ERROR(LAUNCH_FAILED),
    ERROR(NOT_PERMITTED), ERROR(NOT_SUPPORTED), ERROR(SYSTEM_DRIVER_MISMATCH),
    ERROR(OPERATING_SYSTEM), ERROR(STREAM_CAPTURE_UNSUPPORTED), ERROR(STREAM_CAPTURE_INVALIDATED),
    ERROR(STREAM_CAPTURE_UNMATCHED), ERROR(STREAM_CAPTURE_ISOLATION),
    ERROR(STREAM_CAPTURE_WRONG_THREAD), ERROR(STREAM_CAPTURE_MERGE),
    ERROR(STREAM_CAPTURE_UNJOINED), ERROR(STREAM_CAPTURE_IMPLICIT), ERROR(CAPTURED_EVENT),
    ERROR(GRAPH_EXEC_UPDATE_FAILURE), ERROR(LOSSY_QUERY), ERROR(INVALID_CLUSTER_SIZE),
    ERROR(UNKNOWN),
    /* clang-format on */
};
#define ERRORS (sizeof errors / sizeof *errors)

/* "If the error code is not recognized, CUDA_ERROR_INVALID_VALUE will be returned and *pStr will
 * be set to the NULL address." */
CUresult cuGetErrorName(CUresult error, const char **name) {
    *name = NULL;
    for (size_t i = 0; i < ERRORS; i++)
        if (errors[i].code == error) *name = errors[i].name;
    return *name ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
    static const char prefix[] = "CUDA_ERROR_";
    CUresult result = cuGetErrorName(error, text);
    if (*text && !strncmp(*text, prefix, sizeof prefix - 1)) *text += sizeof prefix - 1;
    return result;
}

static CUresult error_by_name(const char *name) {
    for (size_t i = 0; i < ERRORS; i++)
        if (!strcmp(errors[i].name, name)) return errors[i].code;
    return (CUresult)strtol(name, NULL, 10);
}

/* -- failures on purpose ---------------------------------------------------------------------- */

CUresult call_injected(const char *name) {
    static long seen[16];
    const char *at = settings.fail;
    for (int i = 0; at && *at && i < 16; at = strchr(at, ','), i++) {
        char call[64], error[64];
        long nth;
        at += *at == ',';
        if (sscanf(at, "%63[^:]:%ld:%63[^,]", call, &nth, error) != 3) continue;
        if (strcmp(call, name) && strcmp(call, "*")) continue;
        seen[i]++;
        if (nth < 0 ? seen[i] >= -nth : seen[i] == nth) return error_by_name(error);
    }
    return CUDA_SUCCESS;
}

/* "This leaves the process in an inconsistent state and any further CUDA work will return the same
 * error": that of the context, here. */
static bool breaks(CUresult error) {
    return error == CUDA_ERROR_ILLEGAL_ADDRESS || error == CUDA_ERROR_LAUNCH_FAILED ||
           error == CUDA_ERROR_LAUNCH_TIMEOUT || error == CUDA_ERROR_HARDWARE_STACK_ERROR;
}

/* -- a call ----------------------------------------------------------------------------------- */

CUresult call_begin(const char *name, unsigned needs, const char *format, ...) {
    /* cuda.h renames calls to their latest versions: cuMemAlloc to cuMemAlloc_v2. */
    const char *version = strstr(name, "_v");
    char plain[64];
    snprintf(plain, sizeof plain, "%.*s", (int)(version ? (size_t)(version - name) : strlen(name)),
             name);
    int length = snprintf(now.text, sizeof now.text, "%s(", plain);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(now.text + length, sizeof now.text - (size_t)length, format, arguments);
    va_end(arguments);
    /* Before the lock, which another thread may have held when this process was forked. */
    now.locked = driver_process == getpid();
    if (!now.locked) return CUDA_ERROR_NOT_INITIALIZED;
    driver_lock();
    if (needs & NEEDS_CONTEXT) {
        CUcontext context = context_current();
        if (!context) return CUDA_ERROR_INVALID_CONTEXT;
        if (!context->retained) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
        if (context->broken) return context->broken;
    }
    CUresult injected = call_injected(plain);
    if (injected && needs & NEEDS_CONTEXT && breaks(injected))
        context_break(context_current(), injected, "MX_STANDIN_FAIL");
    if (injected) return injected;
    if (needs & UNSAFE && capture_forbids()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    return CUDA_SUCCESS;
}

CUresult call_end(CUresult result) {
    const char *name;
    cuGetErrorName(result, &name);
    log_line("%ld %s) %s", (long)syscall(SYS_gettid), now.text, name ? name : "another error");
    if (now.locked) driver_unlock();
    now.locked = false;
    return result;
}
