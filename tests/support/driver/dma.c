/* What libcufile.so.0 asks of libcuda.so.1: to be logged and to fail as its calls do, and to have a
 * file's bytes written to a device's memory, which no address of the process shows. */
#include "standin.h"

#include <errno.h>
#include <stdarg.h>
#include <sys/syscall.h>

#define EXPORTED __attribute__((visibility("default")))
#define PIECE ((size_t)1 << 20)

EXPORTED long standin_injected(const char *name) {
    driver_lock();
    long injected = (long)call_injected(name);
    driver_unlock();
    return injected;
}

EXPORTED void standin_log(const char *text, long result) {
    if (result)
        log_line("%ld %s %ld", (long)syscall(SYS_gettid), text, result);
    else
        log_line("%ld %s CUDA_SUCCESS", (long)syscall(SYS_gettid), text);
}

/* Return the bytes of device memory from an address on, 0 if there is none. */
EXPORTED size_t standin_device_run(CUdeviceptr address) {
    driver_lock();
    struct range *range = range_at(address, DEVICE_KINDS);
    size_t run = range && range->device >= 0 ? range->nbytes - (address - range->address) : 0;
    driver_unlock();
    return run;
}

/* Read to device memory. Returns the bytes; less at the file's end; -1 with errno. */
EXPORTED ssize_t standin_read(int fd, CUdeviceptr to, size_t nbytes, off_t position) {
    size_t done = 0;
    while (done < nbytes) {
        size_t run = nbytes - done < PIECE ? nbytes - done : PIECE;
        driver_lock();
        struct range *range = range_at(to + done, DEVICE_KINDS);
        char *at = range ? range_touch(range->owner, to + done, true, &run, &range) : NULL;
        driver_unlock();
        if (!at) return errno = EFAULT, -1;
        ssize_t got = pread(fd, at, run, position + (off_t)done);
        driver_lock();
        range_leave(range);
        driver_unlock();
        if (got < 0) return -1;
        done += (size_t)got;
        if ((size_t)got < run) break;
    }
    return (ssize_t)done;
}
