/* The part of the CUDA driver that copies and page-locks, over CPU memory: it checks every argument as the driver's
 * documentation demands, and does the work before it returns. Not thread-safe. Functions that begin with stand_in are
 * for tests. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_FOUND = 500,
    ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713,
};
enum { MEMORY_TYPE = 2, RANGE_START = 11, RANGE_SIZE = 12 };
enum { PAGE = 4096, MAX_RANGES = 1024 };

typedef struct {
    uintptr_t start;
    size_t size;
} range_t;

typedef struct {
    int source_order;
    int source_location[2];
    int destination_location[2];
    unsigned flags;
} attributes_t;

static range_t host[MAX_RANGES], device[MAX_RANGES];
static int num_host, num_device;

static struct {
    int version;           /* of CUDA, as the driver tells it */
    int has_failure_index; /* whether the signature before 13.0 is there */
    int tells_ranges;
    size_t lockable; /* bytes */
    void *stream;    /* the only one there is */
    long failing_copy;
    int failing_status;
} settings;

static struct {
    int calls;
    int source_order;
    size_t copies;
} seen;

void stand_in_reset(int version, int has_failure_index, void *stream) {
    num_host = num_device = 0;
    memset(&settings, 0, sizeof settings);
    memset(&seen, 0, sizeof seen);
    settings.version = version;
    settings.has_failure_index = has_failure_index;
    settings.tells_ranges = 1;
    settings.lockable = SIZE_MAX;
    settings.stream = stream;
    settings.failing_copy = -1;
}

void stand_in_limit(size_t lockable) { settings.lockable = lockable; }
void stand_in_hide_ranges(void) { settings.tells_ranges = 0; }

static void add(range_t *ranges, int *count, uintptr_t start, size_t size) {
    if (*count == MAX_RANGES)
        abort();
    ranges[(*count)++] = (range_t){start, size};
}

void stand_in_device_memory(uintptr_t start, size_t size) { add(device, &num_device, start, size); }
void stand_in_host_memory(uintptr_t start, size_t size) { add(host, &num_host, start, size); }
int stand_in_registrations(void) { return num_host; }
int stand_in_calls(void) { return seen.calls; }
int stand_in_source_order(void) { return seen.source_order; }
size_t stand_in_copies(void) { return seen.copies; }

void stand_in_fail(long copy, int status) {
    settings.failing_copy = copy;
    settings.failing_status = status;
}

static int within(const range_t *ranges, int count, uintptr_t start, size_t size) {
    for (int i = 0; i < count; i++)
        if (start >= ranges[i].start && size <= ranges[i].size && start - ranges[i].start <= ranges[i].size - size)
            return 1;
    return 0;
}

static int refuse(size_t *failed, size_t index, int status) {
    if (failed)
        *failed = index;
    return status;
}

static int batch(const uintptr_t *to, const uintptr_t *from, const size_t *sizes, size_t count,
                 const attributes_t *attributes, const size_t *applies_from, size_t num_attributes, size_t *failed,
                 void *stream) {
    seen.calls++;
    if (!to || !from || !sizes || !count || !attributes || !applies_from)
        return refuse(failed, SIZE_MAX, INVALID_VALUE);
    if (num_attributes != 1 || applies_from[0] != 0 || !stream || stream != settings.stream)
        return refuse(failed, SIZE_MAX, INVALID_VALUE);
    if (attributes->source_order < 1 || attributes->source_order > 3 || attributes->flags)
        return refuse(failed, SIZE_MAX, INVALID_VALUE);
    if (attributes->source_location[0] || attributes->source_location[1] || attributes->destination_location[0] ||
        attributes->destination_location[1])
        return refuse(failed, SIZE_MAX, INVALID_VALUE);
    for (size_t i = 0; i < count; i++) {
        if ((long)i == settings.failing_copy)
            return refuse(failed, i, settings.failing_status);
        if (!sizes[i] || !within(device, num_device, to[i], sizes[i]) || !within(host, num_host, from[i], sizes[i]))
            return refuse(failed, i, INVALID_VALUE);
        for (size_t j = 0; j < i; j++)
            if (to[i] < to[j] + sizes[j] && to[j] < to[i] + sizes[i])
                return refuse(failed, i, INVALID_VALUE);
    }
    for (size_t i = count; i-- > 0;) /* the copies of a batch are made in no particular order */
        memcpy((void *)to[i], (const void *)from[i], sizes[i]);
    seen.source_order = attributes->source_order;
    seen.copies = count;
    return SUCCESS;
}

static int batch_12_8(const uintptr_t *to, const uintptr_t *from, const size_t *sizes, size_t count,
                      const attributes_t *attributes, const size_t *applies_from, size_t num_attributes,
                      size_t *failed, void *stream) {
    if (!failed)
        return INVALID_VALUE;
    return batch(to, from, sizes, count, attributes, applies_from, num_attributes, failed, stream);
}

static int batch_13_0(const uintptr_t *to, const uintptr_t *from, const size_t *sizes, size_t count,
                      const attributes_t *attributes, const size_t *applies_from, size_t num_attributes,
                      void *stream) {
    return batch(to, from, sizes, count, attributes, applies_from, num_attributes, NULL, stream);
}

int cuDriverGetVersion(int *version) {
    *version = settings.version;
    return SUCCESS;
}

int cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status) {
    *function = NULL;
    if (flags || !status || strcmp(symbol, "cuMemcpyBatchAsync") || version > settings.version)
        return NOT_FOUND;
    if (version >= 13000)
        *function = (void *)batch_13_0;
    else if (version >= 12080 && settings.has_failure_index)
        *function = (void *)batch_12_8;
    return *function ? SUCCESS : NOT_FOUND;
}

int cuGetErrorName(int status, const char **name) {
    switch (status) {
    case INVALID_VALUE: *name = "CUDA_ERROR_INVALID_VALUE"; break;
    case OUT_OF_MEMORY: *name = "CUDA_ERROR_OUT_OF_MEMORY"; break;
    case ALREADY_REGISTERED: *name = "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"; break;
    case NOT_REGISTERED: *name = "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"; break;
    default: *name = NULL; return INVALID_VALUE;
    }
    return SUCCESS;
}

int cuCtxGetCurrent(void **context) {
    *context = &settings;
    return SUCCESS;
}

int cuMemHostRegister_v2(void *memory, size_t size, unsigned flags) {
    uintptr_t start = (uintptr_t)memory, end = start + size;
    size_t locked = 0;
    if (!memory || !size || flags != 1)
        return INVALID_VALUE;
    for (int i = 0; i < num_host; i++) {
        uintptr_t first = host[i].start / PAGE * PAGE, last = (host[i].start + host[i].size + PAGE - 1) / PAGE * PAGE;
        if (start < last && first < end)
            return ALREADY_REGISTERED;
        locked += host[i].size;
    }
    if (size > settings.lockable - locked)
        return OUT_OF_MEMORY;
    add(host, &num_host, start, size);
    return SUCCESS;
}

int cuMemHostUnregister(void *memory) {
    for (int i = 0; i < num_host; i++)
        if (host[i].start == (uintptr_t)memory) {
            host[i] = host[--num_host];
            return SUCCESS;
        }
    return NOT_REGISTERED;
}

int cuPointerGetAttribute(void *value, int attribute, uint64_t address) {
    for (int i = 0; i < num_host; i++)
        if (within(&host[i], 1, address, 1)) {
            if (attribute == MEMORY_TYPE)
                *(unsigned *)value = 1;
            else if (!settings.tells_ranges)
                return INVALID_VALUE;
            else if (attribute == RANGE_START)
                *(uint64_t *)value = host[i].start;
            else if (attribute == RANGE_SIZE)
                *(uint64_t *)value = host[i].size;
            else
                return INVALID_VALUE;
            return SUCCESS;
        }
    return INVALID_VALUE;
}
