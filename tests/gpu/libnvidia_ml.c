/* A test double of libnvidia-ml.so.1 for the real bindings: what it says is set by the environment.
   FAKE_GPUS: how many. FAKE_INIT, FAKE_UUID_ERROR: error codes. FAKE_LINKS: "0-2,1-3". FAKE_MIG: index of a GPU in two slices. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { int index; int slice; } device_t;
static device_t devices[16], slices[16][2];
static int number(const char *name, int fallback) { const char *text = getenv(name); return text ? atoi(text) : fallback; }

int nvmlInit_v2(void) { return number("FAKE_INIT", 0); }
int nvmlInitWithFlags(unsigned flags) { return number("FAKE_INIT", 0); }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { static char text[64]; snprintf(text, sizeof text, "fake error %d", code); return text; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = number("FAKE_GPUS", 0); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, device_t **device) {
    if ((int)index >= number("FAKE_GPUS", 0)) return 6;
    devices[index].index = index; devices[index].slice = -1; *device = &devices[index]; return 0;
}
int nvmlDeviceGetUUID(device_t *device, char *uuid, unsigned length) {
    if (number("FAKE_UUID_ERROR", 0)) return number("FAKE_UUID_ERROR", 0);
    if (device->slice < 0) snprintf(uuid, length, "GPU-fake-%d", device->index);
    else snprintf(uuid, length, "MIG-fake-%d-%d", device->index, device->slice);
    return 0;
}
int nvmlDeviceGetName(device_t *device, char *name, unsigned length) { snprintf(name, length, "Fake H%d", device->index); return 0; }
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2_t;
static unsigned long long size_of(device_t *device) { return device->slice < 0 ? 80ull << 30 : 20ull << 30; }
int nvmlDeviceGetMemoryInfo(device_t *device, memory_t *memory) {
    memory->total = size_of(device); memory->free = memory->total / 2; memory->used = memory->total / 2; return 0;
}
int nvmlDeviceGetMemoryInfo_v2(device_t *device, memory_v2_t *memory) {
    if (getenv("FAKE_OLD_MEMORY")) return 3;
    memory->total = size_of(device); memory->reserved = 1 << 20; memory->free = memory->total / 4; memory->used = 0; return 0;
}
int nvmlDeviceGetMigMode(device_t *device, unsigned *current, unsigned *pending) {
    if (number("FAKE_MIG", -1) < 0) return 3;
    *current = *pending = device->index == number("FAKE_MIG", -1); return 0;
}
int nvmlDeviceGetMaxMigDeviceCount(device_t *device, unsigned *count) { *count = 7; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(device_t *device, unsigned slice, device_t **found) {
    if (slice > 1) return 6;
    slices[device->index][slice].index = device->index; slices[device->index][slice].slice = slice;
    *found = &slices[device->index][slice]; return 0;
}
int nvmlDeviceGetP2PStatus(device_t *a, device_t *b, int what, int *status) {
    const char *links = getenv("FAKE_LINKS"); char one[16], other[16];
    if (!links) return 3;
    snprintf(one, sizeof one, "%d-%d", a->index, b->index); snprintf(other, sizeof other, "%d-%d", b->index, a->index);
    *status = strstr(links, one) || strstr(links, other) ? 0 : 5; return 0;
}
int nvmlDeviceGetNumaNodeId(device_t *device, unsigned *node) { *node = device->index / 2; return 0; }
