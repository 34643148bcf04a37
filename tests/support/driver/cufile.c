/* libcufile.so.0: what cuda.bindings.cufile asks of it to read files into device memory.
 *
 * It is found where the setting CUFILE is given (build.py): "direct", as with nvidia-fs; "compat",
 * without it, where the library copies through the host; or "refused", where it may not do that
 * either. It is harder on its caller than the documentation says: what is read, and where to, has
 * to be aligned to 4 KiB, and to be in registered memory. MX_STANDIN_FAIL has its calls, too. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

/* There is no cufile.h in the packages of the tests: what follows is as cuda.bindings has it. */
enum {
    NOT_INITIALIZED = 5001,
    POINTER_INVALID = 5012,
    POINTER_RANGE = 5014,
    INVALID_FILE_TYPE = 5018,
    DIO_NOT_SET = 5020,
    INVALID_VALUE = 5022,
    MEMORY_ALREADY_REGISTERED = 5023,
    MEMORY_NOT_REGISTERED = 5024,
    DRIVER_ALREADY_OPEN = 5026,
    HANDLE_NOT_REGISTERED = 5027,
    HANDLE_ALREADY_REGISTERED = 5028,
    FAILS = 1, /* injected: see cuFileRead */
    LIES = 2,
    OPAQUE_FD = 1,
    NVME_SUPPORTED = 1 << 3,
    ALLOW_COMPAT = 1 << 1,
    PAGE = 4096,
};
typedef struct {
    int error, cuda_error;
} Result;
typedef struct {
    int type;
    union {
        int fd;
        void *other;
    } handle;
    const void *operations;
} Description;
typedef struct {
    unsigned major, minor;
    size_t poll, most_direct;
    unsigned status, control, features, cache, per_buffer, pinned, batch, timeout;
} Properties;
struct entry { /* a handle by its descriptor, or registered memory by its address */
    struct entry *next;
    uintptr_t key;
    size_t nbytes;
};

/* Of libcuda.so.1 (dma.c). */
long standin_injected(const char *name);
void standin_log(const char *text, long result);
size_t standin_device_run(unsigned long long address);
ssize_t standin_read(int fd, unsigned long long to, size_t nbytes, off_t position);

#define API(type) __attribute__((visibility("default"))) type
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct entry *handles, *buffers;
static bool is_open;

static const char *mode(void) {
    const char *found = getenv("MX_STANDIN_CUFILE");
    return found ? found : "direct";
}

static long said(const char *name, long result, const char *format, ...) {
    char text[200];
    int length = snprintf(text, sizeof text, "%s(", name);
    va_list arguments;
    va_start(arguments, format);
    length += vsnprintf(text + length, sizeof text - (size_t)length - 1, format, arguments);
    va_end(arguments);
    strcpy(text + length, ")");
    standin_log(text, result);
    return result;
}

static struct entry *known(struct entry *list, uintptr_t key) {
    while (list && list->key != key)
        list = list->next;
    return list;
}

static struct entry *add(struct entry **list, uintptr_t key, size_t nbytes) {
    struct entry *made = malloc(sizeof *made);
    *made = (struct entry){*list, key, nbytes};
    return *list = made;
}

static bool drop(struct entry **list, uintptr_t key) {
    while (*list && (*list)->key != key)
        list = &(*list)->next;
    struct entry *found = *list;
    if (found) *list = found->next;
    free(found);
    return found;
}

/* The error of a call before it does anything. */
static int begin(const char *name) {
    pthread_mutex_lock(&lock);
    int injected = (int)standin_injected(name);
    return injected ? injected : is_open ? 0 : NOT_INITIALIZED;
}

#define END(error, ...)                                                                            \
    do {                                                                                           \
        pthread_mutex_unlock(&lock);                                                               \
        return (Result){(int)said(__func__, error, __VA_ARGS__), 0};                               \
    } while (0)

API(Result) cuFileDriverOpen(void) {
    int error = begin(__func__);
    if (error == NOT_INITIALIZED && strcmp(mode(), "refused")) error = 0;
    if (!error && is_open) error = DRIVER_ALREADY_OPEN;
    is_open |= !error;
    END(error, " ");
}

API(Result) cuFileDriverGetProperties(Properties *found) {
    int error = begin(__func__);
    bool direct = !strcmp(mode(), "direct");
    *found = (Properties){.major = direct ? 2 : 0,
                          .minor = direct ? 25 : 0,
                          .status = direct ? NVME_SUPPORTED : 0,
                          .control = ALLOW_COMPAT};
    END(error, " ");
}

static int check_file(const Description *file) {
    if (file->type != OPAQUE_FD) return INVALID_FILE_TYPE;
    int flags = fcntl(file->handle.fd, F_GETFL);
    if (flags < 0) return INVALID_VALUE;
    if (!(flags & O_DIRECT)) return DIO_NOT_SET;
    return known(handles, (uintptr_t)file->handle.fd + 1) ? HANDLE_ALREADY_REGISTERED : 0;
}

API(Result) cuFileHandleRegister(void **handle, const Description *file) {
    int error = begin(__func__);
    if (!error) error = check_file(file);
    if (!error) *handle = (void *)add(&handles, (uintptr_t)file->handle.fd + 1, 0)->key;
    END(error, "%d", file->handle.fd);
}

API(void) cuFileHandleDeregister(void *handle) {
    pthread_mutex_lock(&lock);
    bool found = drop(&handles, (uintptr_t)handle);
    pthread_mutex_unlock(&lock);
    said(__func__, found ? 0 : HANDLE_NOT_REGISTERED, "%p", handle);
}

static int check_memory(uintptr_t at, size_t nbytes, int flags) {
    if (at % PAGE || !nbytes || flags) return INVALID_VALUE;
    if (standin_device_run(at) < nbytes) return standin_device_run(at) ? POINTER_RANGE : POINTER_INVALID;
    for (struct entry *each = buffers; each; each = each->next)
        if (at < each->key + each->nbytes && each->key < at + nbytes)
            return MEMORY_ALREADY_REGISTERED;
    return 0;
}

API(Result) cuFileBufRegister(const void *base, size_t nbytes, int flags) {
    int error = begin(__func__);
    if (!error) error = check_memory((uintptr_t)base, nbytes, flags);
    if (!error) add(&buffers, (uintptr_t)base, nbytes);
    END(error, "%p, %zu", base, nbytes);
}

API(Result) cuFileBufDeregister(const void *base) {
    int error = begin(__func__);
    if (!error && !drop(&buffers, (uintptr_t)base)) error = MEMORY_NOT_REGISTERED;
    END(error, "%p", base);
}

static int check_read(void *handle, uintptr_t base, size_t nbytes, off_t position, off_t offset) {
    struct entry *buffer = known(buffers, base);
    if (!known(handles, (uintptr_t)handle)) return HANDLE_NOT_REGISTERED;
    if (!buffer) return MEMORY_NOT_REGISTERED;
    if (((uintptr_t)position | (uintptr_t)offset | nbytes) % PAGE) return INVALID_VALUE;
    return (size_t)offset + nbytes > buffer->nbytes ? POINTER_RANGE : 0;
}

/* "Returns size of bytes successfully read; -1 on error, so errno is set to indicate filesystem
 * errors; all other errors return a negative integer value of the CUfileOpError enum value." With
 * the error 1 the file system fails, with 2 nothing is read, and all is said to be. */
API(ssize_t) cuFileRead(void *handle, void *base, size_t nbytes, off_t position, off_t offset) {
    int error = begin(__func__);
    if (!error) error = check_read(handle, (uintptr_t)base, nbytes, position, offset);
    pthread_mutex_unlock(&lock);
    ssize_t got = error == LIES ? (ssize_t)nbytes : error == FAILS ? -1 : -error;
    if (!error)
        got = standin_read((int)(uintptr_t)handle - 1, (uintptr_t)base + (uintptr_t)offset, nbytes,
                           position);
    else
        errno = EIO;
    int kept = errno;
    said(__func__, got < 0 ? (long)got : 0, "%p, %p, %zd, %lld", handle, base, got,
         (long long)position);
    errno = kept;
    return got;
}

API(const char *) cufileop_status_error(int error) {
    (void)error;
    return "stand-in";
}
