/* The part of the CUDA driver that copies, page-locks and orders, over CPU memory: it checks every argument as the
 * driver's documentation demands. What a stream gets is done before the call returns, unless the stream is held or
 * waits for one that is. Streams and events may be used on several threads, all else on one. Functions that begin with
 * stand_in are for tests. */

#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713,
    UNKNOWN = 999,
};
enum { MEMORY_TYPE = 2, RANGE_START = 11, RANGE_SIZE = 12 };
enum { PAGE = 4096, MAX_RANGES = 1024, MAX_STREAMS = 8, MAX_EVENTS = 1 << 17, MAX_CALLS = 1 << 14, MAX_ARGS = 6 };
enum { PATIENCE = 20 }; /* seconds that a wait for an event takes at most */

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
    long failing_copy;
    int failing_status;
    char failing_call[64];     /* a name, or empty for any */
    long spared_calls;         /* of those, before */
    long failing_calls;        /* so many fail */
    int failing_calls_status;
} settings;

static struct {
    int calls;
    int source_order;
    size_t copies;
    int too_early; /* memory that was freed while the device was going to write to it */
} seen;

/* -- streams, events and what was called ----------------------------------------------------------------------- */

typedef struct operation {
    struct operation *next;
    enum { COPIES, RECORD, WAIT } kind;
    long event, number; /* which record of it */
    size_t count;
    uintptr_t *to, *from;
    size_t *sizes;
} operation_t;

typedef struct {
    void *handle;
    int is_held;
    operation_t *first, **end;
} stream_t;

typedef struct {
    int is_there;
    long recorded, reached; /* numbers of records */
} event_t;

typedef struct {
    const char *name;
    int num_args;
    uint64_t args[MAX_ARGS];
    size_t count; /* of a batch */
    uintptr_t *copies;
} call_t;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static stream_t streams[MAX_STREAMS];
static int num_streams;
static event_t events[MAX_EVENTS]; /* handles are numbers, never used again */
static long num_events = 1;
static call_t calls[MAX_CALLS];
static int num_calls;
static range_t allocated[MAX_RANGES];
static int num_allocated;

static stream_t *find_stream(const void *handle) {
    for (int i = 0; i < num_streams; i++)
        if (streams[i].handle == handle)
            return &streams[i];
    return NULL;
}

static void pop(stream_t *stream) {
    operation_t *done = stream->first;
    stream->first = done->next;
    if (!stream->first)
        stream->end = &stream->first;
    free(done->to);
    free(done->from);
    free(done->sizes);
    free(done);
}

/* Does all that can be done now. */
static void go_on(void) {
    for (int moved = 1; moved;) {
        moved = 0;
        for (int i = 0; i < num_streams; i++)
            while (streams[i].first && !streams[i].is_held) {
                operation_t *next = streams[i].first;
                if (next->kind == WAIT && events[next->event].reached < next->number)
                    break;
                if (next->kind == RECORD)
                    events[next->event].reached = next->number;
                for (size_t j = next->count; j-- > 0;) /* the copies of a batch are made in no particular order */
                    memcpy((void *)next->to[j], (const void *)next->from[j], next->sizes[j]);
                pop(&streams[i]);
                moved = 1;
            }
    }
    pthread_cond_broadcast(&changed);
}

static void put(stream_t *stream, operation_t operation) {
    operation_t *added = malloc(sizeof *added);
    *added = operation;
    added->next = NULL;
    *stream->end = added;
    stream->end = &added->next;
    go_on();
}

static void *copy_of(const void *memory, size_t size) {
    void *copied = malloc(size);
    memcpy(copied, memory, size);
    return copied;
}

static void put_copies(stream_t *stream, const uintptr_t *to, const uintptr_t *from, const size_t *sizes,
                       size_t count) {
    operation_t copies = {.kind = COPIES, .count = count};
    copies.to = copy_of(to, count * sizeof *to);
    copies.from = copy_of(from, count * sizeof *from);
    copies.sizes = copy_of(sizes, count * sizeof *sizes);
    put(stream, copies);
}

/* Lists a call; what it is to fail with, if it is. */
static int enter(const char *name, int num_args, ...) {
    call_t *call = &calls[num_calls++];
    if (num_calls == MAX_CALLS)
        abort();
    *call = (call_t){.name = name, .num_args = num_args};
    va_list args;
    va_start(args, num_args);
    for (int i = 0; i < num_args; i++)
        call->args[i] = va_arg(args, uint64_t);
    va_end(args);
    if (!settings.failing_calls || (settings.failing_call[0] && strcmp(settings.failing_call, name)))
        return SUCCESS;
    if (settings.spared_calls) {
        settings.spared_calls--;
        return SUCCESS;
    }
    settings.failing_calls--;
    return settings.failing_calls_status;
}

static int leave(int status) {
    pthread_mutex_unlock(&mutex);
    return status;
}

#define ENTER(...)                    \
    pthread_mutex_lock(&mutex);       \
    int failed_ = enter(__VA_ARGS__); \
    if (failed_)                      \
        return leave(failed_)
#define ARG(value) ((uint64_t)(uintptr_t)(value))

void stand_in_forget_calls(void) {
    while (num_calls)
        free(calls[--num_calls].copies);
}

int stand_in_num_calls(void) { return num_calls; }
const char *stand_in_call_name(int number) { return calls[number].name; }
int stand_in_call_num_args(int number) { return calls[number].num_args; }
uint64_t stand_in_call_arg(int number, int arg) { return calls[number].args[arg]; }
size_t stand_in_call_num_copies(int number) { return calls[number].count; }
uint64_t stand_in_call_copy(int number, size_t which) { return calls[number].copies[which]; }
int stand_in_allocations(void) { return num_allocated; }
int stand_in_too_early(void) { return seen.too_early; }

int stand_in_events(void) {
    int count = 0;
    for (long i = 0; i < num_events; i++)
        count += events[i].is_there;
    return count;
}

/* Has so many calls fail, of those of a name or of all (""), after some that do not; -1 for all that come. */
void stand_in_fail_calls(const char *name, long spared, long count, int status) {
    strncpy(settings.failing_call, name, sizeof settings.failing_call - 1);
    settings.spared_calls = spared;
    settings.failing_calls = count;
    settings.failing_calls_status = status;
}

void stand_in_stream(void *handle) {
    if (num_streams == MAX_STREAMS)
        abort();
    stream_t *stream = &streams[num_streams++];
    *stream = (stream_t){.handle = handle};
    stream->end = &stream->first;
}

void stand_in_hold(void *stream, int is_held) {
    pthread_mutex_lock(&mutex);
    find_stream(stream)->is_held = is_held;
    go_on();
    pthread_mutex_unlock(&mutex);
}

/* -- memory ---------------------------------------------------------------------------------------------------- */

void stand_in_reset(int version, int has_failure_index, void *stream) {
    for (int i = 0; i < num_streams; i++)
        while (streams[i].first)
            pop(&streams[i]);
    num_streams = 0;
    for (long i = 0; i < num_events; i++)
        events[i].is_there = 0;
    while (num_allocated)
        free((void *)allocated[--num_allocated].start);
    stand_in_forget_calls();
    num_host = num_device = 0;
    memset(&settings, 0, sizeof settings);
    memset(&seen, 0, sizeof seen);
    settings.version = version;
    settings.has_failure_index = has_failure_index;
    settings.tells_ranges = 1;
    settings.lockable = SIZE_MAX;
    settings.failing_copy = -1;
    stand_in_stream(stream);
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

static int check_batch(const uintptr_t *to, const uintptr_t *from, const size_t *sizes, size_t count,
                 const attributes_t *attributes, const size_t *applies_from, size_t num_attributes, size_t *failed,
                 void *stream) {
    if (!to || !from || !sizes || !count || !attributes || !applies_from)
        return refuse(failed, SIZE_MAX, INVALID_VALUE);
    if (num_attributes != 1 || applies_from[0] != 0 || !stream || !find_stream(stream))
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
    return SUCCESS;
}

static int batch(const uintptr_t *to, const uintptr_t *from, const size_t *sizes, size_t count,
                 const attributes_t *attributes, const size_t *applies_from, size_t num_attributes, size_t *failed,
                 void *stream) {
    seen.calls++;
    ENTER("cuMemcpyBatchAsync", 2, ARG(stream), ARG(attributes ? attributes->source_order : 0));
    call_t *call = &calls[num_calls - 1];
    call->count = count;
    call->copies = malloc(3 * count * sizeof *call->copies);
    for (size_t i = 0; i < count; i++) {
        call->copies[3 * i] = to[i];
        call->copies[3 * i + 1] = from[i];
        call->copies[3 * i + 2] = sizes[i];
    }
    int status = check_batch(to, from, sizes, count, attributes, applies_from, num_attributes, failed, stream);
    if (status)
        return leave(status);
    put_copies(find_stream(stream), to, from, sizes, count);
    seen.source_order = attributes->source_order;
    seen.copies = count;
    return leave(SUCCESS);
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
    ENTER("cuCtxGetCurrent", 0);
    *context = &settings;
    return leave(SUCCESS);
}

int cuCtxPushCurrent_v2(void *context) {
    ENTER("cuCtxPushCurrent_v2", 0);
    return leave(context == &settings ? SUCCESS : INVALID_VALUE);
}

int cuCtxPopCurrent_v2(void **context) {
    ENTER("cuCtxPopCurrent_v2", 0);
    *context = &settings;
    return leave(SUCCESS);
}

int cuEventCreate(void **event, unsigned flags) {
    ENTER("cuEventCreate", 1, ARG(flags));
    if (num_events == MAX_EVENTS)
        abort();
    events[num_events] = (event_t){.is_there = 1};
    *event = (void *)num_events++;
    return leave(SUCCESS);
}

static event_t *find_event(void *event) {
    intptr_t number = (intptr_t)event;
    return number > 0 && number < num_events && events[number].is_there ? &events[number] : NULL;
}

int cuEventDestroy_v2(void *event) {
    ENTER("cuEventDestroy_v2", 1, ARG(event));
    event_t *known = find_event(event);
    if (!known)
        return leave(INVALID_HANDLE);
    known->is_there = 0;
    return leave(SUCCESS);
}

int cuEventRecord(void *event, void *stream) {
    ENTER("cuEventRecord", 2, ARG(event), ARG(stream));
    event_t *known = find_event(event);
    if (!known || !find_stream(stream))
        return leave(INVALID_HANDLE);
    put(find_stream(stream), (operation_t){.kind = RECORD, .event = (long)event, .number = ++known->recorded});
    return leave(SUCCESS);
}

int cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
    ENTER("cuStreamWaitEvent", 2, ARG(stream), ARG(event));
    event_t *known = find_event(event);
    if (!known || !find_stream(stream))
        return leave(INVALID_HANDLE);
    if (flags)
        return leave(INVALID_VALUE);
    put(find_stream(stream), (operation_t){.kind = WAIT, .event = (long)event, .number = known->recorded});
    return leave(SUCCESS);
}

int cuEventSynchronize(void *event) {
    ENTER("cuEventSynchronize", 1, ARG(event));
    event_t *known = find_event(event);
    if (!known)
        return leave(INVALID_HANDLE);
    long number = known->recorded;
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += PATIENCE;
    while (known->reached < number)
        if (pthread_cond_timedwait(&changed, &mutex, &until))
            return leave(UNKNOWN);
    return leave(SUCCESS);
}

int cuEventQuery(void *event) {
    ENTER("cuEventQuery", 1, ARG(event));
    event_t *known = find_event(event);
    if (!known)
        return leave(INVALID_HANDLE);
    return leave(known->reached < known->recorded ? NOT_READY : SUCCESS);
}

int cuStreamQuery(void *stream) {
    ENTER("cuStreamQuery", 1, ARG(stream));
    stream_t *known = find_stream(stream);
    if (!known)
        return leave(INVALID_HANDLE);
    return leave(known->first ? NOT_READY : SUCCESS);
}

int cuMemHostAlloc(void **memory, size_t size, unsigned flags) {
    ENTER("cuMemHostAlloc", 2, ARG(size), ARG(flags));
    if (!size || flags != 1)
        return leave(INVALID_VALUE);
    if (posix_memalign(memory, PAGE, size))
        return leave(OUT_OF_MEMORY);
    memset(*memory, 0xEE, size);
    add(allocated, &num_allocated, (uintptr_t)*memory, size);
    return leave(SUCCESS);
}

int cuMemFreeHost(void *memory) {
    ENTER("cuMemFreeHost", 1, ARG(memory));
    for (int i = 0; i < num_allocated; i++)
        if (allocated[i].start == (uintptr_t)memory) {
            for (int j = 0; j < num_streams; j++)
                for (operation_t *next = streams[j].first; next; next = next->next)
                    for (size_t k = 0; k < next->count; k++)
                        seen.too_early += within(&allocated[i], 1, next->to[k], 1);
            if (!seen.too_early)
                free(memory);
            allocated[i] = allocated[--num_allocated];
            return leave(SUCCESS);
        }
    return leave(INVALID_VALUE);
}

int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t size, void *stream) {
    ENTER("cuMemcpyDtoHAsync_v2", 3, from, ARG(size), ARG(stream));
    uintptr_t target = (uintptr_t)to, source = from;
    if (!find_stream(stream))
        return leave(INVALID_HANDLE);
    if (!size || !within(device, num_device, source, size) || !within(allocated, num_allocated, target, size))
        return leave(INVALID_VALUE);
    put_copies(find_stream(stream), &target, &source, &size, 1);
    return leave(SUCCESS);
}

typedef struct {
    size_t src_x, src_y;
    unsigned src_type;
    const void *src_host;
    uint64_t src_device;
    void *src_array;
    size_t src_pitch, dst_x, dst_y;
    unsigned dst_type;
    void *dst_host;
    uint64_t dst_device;
    void *dst_array;
    size_t dst_pitch, width, height;
} copy_2d_t;

int cuMemcpy2DAsync_v2(const copy_2d_t *copy, void *stream) {
    ENTER("cuMemcpy2DAsync_v2", 5, copy->src_device, ARG(copy->src_pitch), ARG(copy->width), ARG(copy->height),
          ARG(stream));
    uintptr_t to = (uintptr_t)copy->dst_host;
    if (!find_stream(stream))
        return leave(INVALID_HANDLE);
    if (copy->src_x || copy->src_y || copy->dst_x || copy->dst_y || copy->src_type != 2 || copy->dst_type != 1)
        return leave(INVALID_VALUE);
    if (!copy->width || !copy->height || copy->src_pitch < copy->width || copy->dst_pitch < copy->width)
        return leave(INVALID_VALUE);
    if (copy->src_pitch > INT32_MAX || copy->dst_pitch > INT32_MAX)
        return leave(INVALID_VALUE);
    if (!within(device, num_device, copy->src_device, (copy->height - 1) * copy->src_pitch + copy->width) ||
        !within(allocated, num_allocated, to, (copy->height - 1) * copy->dst_pitch + copy->width))
        return leave(INVALID_VALUE);
    for (size_t row = 0; row < copy->height; row++) {
        uintptr_t target = to + row * copy->dst_pitch, source = copy->src_device + row * copy->src_pitch;
        put_copies(find_stream(stream), &target, &source, &copy->width, 1);
    }
    return leave(SUCCESS);
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
