/* libnvidia-ml.so.1 for tests: answers the calls that a memory tool makes from a scenario file.
 *
 * Written against NVIDIA's nvml.h, so that prototypes, structures and error codes are the real ones.
 *
 * Environment
 *   NVML_FAKE_SCENARIO  path of the scenario file; read again whenever it changes, also while the library is in use
 *   NVML_FAKE_CALLS     path of a file to which the name of each call is appended, one a line (optional)
 *
 * Scenario file: one setting a line, `key = value`; `#` starts a comment. Settings before the first section are the machine's.
 *
 *   driver = 590.48.01
 *   cuda   = 13010                  as NVML counts: 1000 * major + 10 * minor
 *   error  = FUNCTION CODE          FUNCTION answers CODE: an NVML_ERROR_ name without that prefix, or a number.
 *                                   FUNCTION is the exported name; a `*` at its end stands for anything.
 *   sleep  = FUNCTION SECONDS       FUNCTION answers only after SECONDS (a driver that hangs)
 *
 *   [gpu]                           one section for each GPU, in NVML's order
 *   name = NVIDIA H200              default "NVIDIA Example"
 *   uuid = GPU-...                  default GPU-00000000-0000-0000-0000-00000000000<index>
 *   bus  = 00000000:83:00.0         default 00000000:0<index + 1>:00.0
 *   total = 143771MiB               sizes: <number>[B|KiB|MiB|GiB], or `n/a` for all-ones (default unit: bytes)
 *   reserved = 614MiB
 *   used = 32362MiB
 *   free = 110795MiB                default total - reserved - used
 *   memory = unsupported            both memory calls answer NOT_SUPPORTED (unified memory)
 *   addressing = none|hmm|ats       default: the call answers NOT_SUPPORTED
 *   ecc = on|off                    default: NOT_SUPPORTED
 *   mig = on|off                    default: NOT_SUPPORTED
 *   retired = SINGLE DOUBLE         counts of retired pages by cause; default: NOT_SUPPORTED
 *   remapped = CORR UNC PENDING FAILURE                             default: NOT_SUPPORTED
 *   process = KIND PID SIZE [GI CI] KIND: compute, graphics, mps; SIZE as above
 *   error, sleep                    as above, for calls on this device only
 *
 *   [mig]                           a MIG device of the GPU above, in index order
 *   gi = 2    ci = 0                (two lines) instance ids, default 1 and 0
 *   uuid, name, total, reserved, used, free, process, error, sleep: as above
 *   attribute = 40448               memory size in MiB by nvmlDeviceGetAttributes_v2; default total
 *
 * The version 1 memory call counts what the driver reserves as used, as real drivers do. On a GPU whose `mig` is on, process
 * lists hold the processes of all its instances, with their ids.
 */
#define NVML_NO_UNVERSIONED_FUNC_DEFS
#include <nvml.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define MAX_GPUS 16
#define MAX_MIGS 8
#define MAX_PROCESSES 128
#define MAX_RULES 64
#define ABSENT (-1)
#define ALL_ONES UINT64_MAX

enum kind { COMPUTE, GRAPHICS, MPS };

struct rule {
    char function[96];
    int code;       /* error rules */
    double seconds; /* sleep rules */
};

struct process {
    enum kind kind;
    unsigned pid;
    unsigned long long used;
    unsigned gi, ci;
};

struct unit { /* a GPU or a MIG device */
    char name[96], uuid[96], bus[32];
    unsigned long long total, reserved, used, free;
    int free_given, memory_unsupported, addressing, ecc, mig;
    int retired_single, retired_double;
    int remapped[4];
    unsigned gi, ci;
    unsigned long long attribute;
    struct process processes[MAX_PROCESSES];
    int n_processes;
    struct rule rules[MAX_RULES];
    int n_rules;
};

struct gpu {
    struct unit self;
    struct unit migs[MAX_MIGS];
    int n_migs;
};

struct scenario {
    char driver[64];
    int cuda;
    struct gpu gpus[MAX_GPUS];
    int n_gpus;
    struct rule rules[MAX_RULES];
    int n_rules;
};

static struct scenario scenario;
static char loaded_path[4096];
static struct timespec loaded_time;
static off_t loaded_size;
static ino_t loaded_inode;
static int references;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* ---- reading the scenario ---- */

static const struct { const char *name; int code; } codes[] = {
    {"UNINITIALIZED", NVML_ERROR_UNINITIALIZED},
    {"INVALID_ARGUMENT", NVML_ERROR_INVALID_ARGUMENT},
    {"NOT_SUPPORTED", NVML_ERROR_NOT_SUPPORTED},
    {"NO_PERMISSION", NVML_ERROR_NO_PERMISSION},
    {"NOT_FOUND", NVML_ERROR_NOT_FOUND},
    {"DRIVER_NOT_LOADED", NVML_ERROR_DRIVER_NOT_LOADED},
    {"TIMEOUT", NVML_ERROR_TIMEOUT},
    {"LIBRARY_NOT_FOUND", NVML_ERROR_LIBRARY_NOT_FOUND},
    {"FUNCTION_NOT_FOUND", NVML_ERROR_FUNCTION_NOT_FOUND},
    {"GPU_IS_LOST", NVML_ERROR_GPU_IS_LOST},
    {"RESET_REQUIRED", NVML_ERROR_RESET_REQUIRED},
    {"OPERATING_SYSTEM", NVML_ERROR_OPERATING_SYSTEM},
    {"LIB_RM_VERSION_MISMATCH", NVML_ERROR_LIB_RM_VERSION_MISMATCH},
    {"ARGUMENT_VERSION_MISMATCH", NVML_ERROR_ARGUMENT_VERSION_MISMATCH},
    {"UNKNOWN", NVML_ERROR_UNKNOWN},
};

static void broken(const char *what, const char *line)
{
    fprintf(stderr, "nvml_fake: %s: %s\n", what, line);
    abort();
}

static int code_of(const char *text)
{
    for (size_t i = 0; i < sizeof codes / sizeof *codes; i++)
        if (!strcasecmp(text, codes[i].name))
            return codes[i].code;
    char *end;
    long code = strtol(text, &end, 10);
    if (end == text)
        broken("unknown error code", text);
    return (int)code;
}

static unsigned long long size_of(const char *text)
{
    if (!strncasecmp(text, "n/a", 3))
        return ALL_ONES;
    char *end;
    double number = strtod(text, &end);
    if (end == text)
        broken("not a size", text);
    unsigned long long whole = strtoull(text, NULL, 10);
    while (*end == ' ')
        end++;
    if (!strncasecmp(end, "KiB", 3))
        return (unsigned long long)(number * 1024.0);
    if (!strncasecmp(end, "MiB", 3))
        return (unsigned long long)(number * 1048576.0);
    if (!strncasecmp(end, "GiB", 3))
        return (unsigned long long)(number * 1073741824.0);
    return whole;
}

static void add_rule(struct rule *rules, int *count, const char *value, int is_sleep)
{
    char function[96], argument[64];
    if (*count == MAX_RULES || sscanf(value, "%95s %63s", function, argument) != 2)
        broken("not a rule", value);
    struct rule *rule = &rules[(*count)++];
    snprintf(rule->function, sizeof rule->function, "%s", function);
    rule->code = is_sleep ? ABSENT : code_of(argument);
    rule->seconds = is_sleep ? atof(argument) : 0;
}

static void add_process(struct unit *unit, const char *value)
{
    char kind[16], size[32];
    unsigned pid, gi = UINT32_MAX, ci = UINT32_MAX;
    if (unit->n_processes == MAX_PROCESSES || sscanf(value, "%15s %u %31s %u %u", kind, &pid, size, &gi, &ci) < 3)
        broken("not a process", value);
    struct process *process = &unit->processes[unit->n_processes++];
    process->kind = !strcmp(kind, "graphics") ? GRAPHICS : !strcmp(kind, "mps") ? MPS : COMPUTE;
    process->pid = pid;
    process->used = size_of(size);
    process->gi = gi;
    process->ci = ci;
}

static void new_unit(struct unit *unit, const char *prefix, int index)
{
    memset(unit, 0, sizeof *unit);
    snprintf(unit->name, sizeof unit->name, "NVIDIA Example");
    snprintf(unit->uuid, sizeof unit->uuid, "%s-00000000-0000-0000-0000-%012d", prefix, index);
    snprintf(unit->bus, sizeof unit->bus, "00000000:%02X:00.0", index + 1);
    unit->addressing = unit->ecc = unit->mig = unit->retired_single = unit->remapped[0] = ABSENT;
    unit->attribute = ALL_ONES;
    unit->gi = 1;
}

static int on_off(const char *value)
{
    return !strcmp(value, "on");
}

static void set_unit(struct unit *unit, const char *key, const char *value)
{
    if (!strcmp(key, "name")) snprintf(unit->name, sizeof unit->name, "%s", value);
    else if (!strcmp(key, "uuid")) snprintf(unit->uuid, sizeof unit->uuid, "%s", value);
    else if (!strcmp(key, "bus")) snprintf(unit->bus, sizeof unit->bus, "%s", value);
    else if (!strcmp(key, "total")) unit->total = size_of(value);
    else if (!strcmp(key, "reserved")) unit->reserved = size_of(value);
    else if (!strcmp(key, "used")) unit->used = size_of(value);
    else if (!strcmp(key, "free")) { unit->free = size_of(value); unit->free_given = 1; }
    else if (!strcmp(key, "memory")) unit->memory_unsupported = !strcmp(value, "unsupported");
    else if (!strcmp(key, "addressing"))
        unit->addressing = !strcmp(value, "ats") ? NVML_DEVICE_ADDRESSING_MODE_ATS
            : !strcmp(value, "hmm") ? NVML_DEVICE_ADDRESSING_MODE_HMM : NVML_DEVICE_ADDRESSING_MODE_NONE;
    else if (!strcmp(key, "ecc")) unit->ecc = on_off(value);
    else if (!strcmp(key, "mig")) unit->mig = on_off(value);
    else if (!strcmp(key, "retired")) sscanf(value, "%d %d", &unit->retired_single, &unit->retired_double);
    else if (!strcmp(key, "remapped"))
        sscanf(value, "%d %d %d %d", &unit->remapped[0], &unit->remapped[1], &unit->remapped[2], &unit->remapped[3]);
    else if (!strcmp(key, "gi")) unit->gi = (unsigned)atoi(value);
    else if (!strcmp(key, "ci")) unit->ci = (unsigned)atoi(value);
    else if (!strcmp(key, "attribute")) unit->attribute = strtoull(value, NULL, 10);
    else if (!strcmp(key, "process")) add_process(unit, value);
    else if (!strcmp(key, "error")) add_rule(unit->rules, &unit->n_rules, value, 0);
    else if (!strcmp(key, "sleep")) add_rule(unit->rules, &unit->n_rules, value, 1);
    else broken("unknown key", key);
}

static char *trimmed(char *text)
{
    text += strspn(text, " \t\r\n");
    size_t length = strlen(text);
    while (length && strchr(" \t\r\n", text[length - 1]))
        text[--length] = 0;
    return text;
}

static struct unit *section(const char *name)
{
    if (!strcmp(name, "[gpu]")) {
        if (scenario.n_gpus == MAX_GPUS)
            broken("too many", name);
        int index = scenario.n_gpus++;
        struct gpu *gpu = &scenario.gpus[index];
        gpu->n_migs = 0;
        new_unit(&gpu->self, "GPU", index);
        return &gpu->self;
    }
    if (strcmp(name, "[mig]") || !scenario.n_gpus)
        broken("unknown section", name);
    struct gpu *gpu = &scenario.gpus[scenario.n_gpus - 1];
    if (gpu->n_migs == MAX_MIGS)
        broken("too many", name);
    struct unit *unit = &gpu->migs[gpu->n_migs];
    new_unit(unit, "MIG", (scenario.n_gpus - 1) * 100 + gpu->n_migs++);
    memcpy(unit->bus, gpu->self.bus, sizeof unit->bus);
    return unit;
}

static void read_scenario(FILE *file)
{
    char line[1024];
    struct unit *unit = NULL;
    memset(&scenario, 0, sizeof scenario);
    snprintf(scenario.driver, sizeof scenario.driver, "590.48.01");
    scenario.cuda = 13010;
    while (fgets(line, sizeof line, file)) {
        char *comment = strchr(line, '#');
        if (comment)
            *comment = 0;
        char *text = trimmed(line), *equals = strchr(text, '=');
        if (!*text)
            continue;
        if (*text == '[') {
            unit = section(text);
            continue;
        }
        if (!equals)
            broken("no `key = value`", text);
        *equals = 0;
        char *key = trimmed(text), *value = trimmed(equals + 1);
        if (unit) set_unit(unit, key, value);
        else if (!strcmp(key, "driver")) snprintf(scenario.driver, sizeof scenario.driver, "%s", value);
        else if (!strcmp(key, "cuda")) scenario.cuda = atoi(value);
        else if (!strcmp(key, "error")) add_rule(scenario.rules, &scenario.n_rules, value, 0);
        else if (!strcmp(key, "sleep")) add_rule(scenario.rules, &scenario.n_rules, value, 1);
        else broken("unknown key", key);
    }
}

static void load(void)
{
    const char *path = getenv("NVML_FAKE_SCENARIO");
    struct stat now;
    if (!path) {
        /* The loader keeps us after the test that opened us: to others there is no driver. */
        char none[] = "nvmlInit* DRIVER_NOT_LOADED";
        memset(&scenario, 0, sizeof scenario);
        add_rule(scenario.rules, &scenario.n_rules, none, 0);
        loaded_path[0] = 0;
        return;
    }
    if (stat(path, &now))
        broken("NVML_FAKE_SCENARIO is not a file", path);
    if (!strcmp(path, loaded_path) && now.st_size == loaded_size && now.st_ino == loaded_inode
        && now.st_mtim.tv_sec == loaded_time.tv_sec && now.st_mtim.tv_nsec == loaded_time.tv_nsec)
        return;
    FILE *file = fopen(path, "r");
    if (!file)
        broken("cannot open", path);
    read_scenario(file);
    fclose(file);
    snprintf(loaded_path, sizeof loaded_path, "%s", path);
    loaded_time = now.st_mtim;
    loaded_size = now.st_size;
    loaded_inode = now.st_ino;
}

/* ---- what every call does first ---- */

static void count_call(const char *function)
{
    const char *path = getenv("NVML_FAKE_CALLS");
    FILE *file = path ? fopen(path, "a") : NULL;
    if (file) {
        fprintf(file, "%s\n", function);
        fclose(file);
    }
}

static int matches(const char *pattern, const char *function)
{
    size_t length = strlen(pattern);
    if (length && pattern[length - 1] == '*')
        return !strncmp(pattern, function, length - 1);
    return !strcmp(pattern, function);
}

static nvmlReturn_t apply(const struct rule *rules, int count, const char *function, double *seconds)
{
    nvmlReturn_t answer = NVML_SUCCESS;
    for (int i = 0; i < count; i++) {
        if (!matches(rules[i].function, function))
            continue;
        if (rules[i].code == ABSENT)
            *seconds += rules[i].seconds;
        else
            answer = (nvmlReturn_t)rules[i].code;
    }
    return answer;
}

/* A handle is 1000 + 100 * GPU + (0 for the GPU, 1 + index for a MIG device). */
static nvmlDevice_t handle_of(int gpu, int mig)
{
    return (nvmlDevice_t)(uintptr_t)(1000 + 100 * gpu + mig + 1);
}

static struct unit *unit_of(nvmlDevice_t device, struct gpu **parent)
{
    uintptr_t number = (uintptr_t)device;
    if (number < 1000)
        return NULL;
    int gpu = (int)((number - 1000) / 100), mig = (int)((number - 1000) % 100) - 1;
    if (gpu >= scenario.n_gpus || mig >= scenario.gpus[gpu].n_migs)
        return NULL;
    if (parent)
        *parent = &scenario.gpus[gpu];
    return mig < 0 ? &scenario.gpus[gpu].self : &scenario.gpus[gpu].migs[mig];
}

static nvmlReturn_t enter(const char *function, struct unit *unit, int need_init)
{
    double seconds = 0;
    nvmlReturn_t machine = apply(scenario.rules, scenario.n_rules, function, &seconds), own = NVML_SUCCESS;
    if (unit)
        own = apply(unit->rules, unit->n_rules, function, &seconds);
    int ready = references > 0;
    pthread_mutex_unlock(&lock);
    count_call(function);
    if (seconds > 0) {
        struct timespec pause = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
        nanosleep(&pause, NULL);
    }
    pthread_mutex_lock(&lock);
    if (need_init && !ready)
        return NVML_ERROR_UNINITIALIZED;
    return own != NVML_SUCCESS ? own : machine;
}

/* Calls hold the lock except while they sleep. */
#define BEGIN(unit_expression, need_init)                                   \
    pthread_mutex_lock(&lock);                                              \
    load();                                                                 \
    struct unit *unit = (unit_expression);                                  \
    nvmlReturn_t answer = enter(__func__, unit, need_init);                 \
    (void)unit

#define END                                                                 \
    pthread_mutex_unlock(&lock);                                            \
    return answer

#define ON_DEVICE                                                           \
    struct gpu *parent = NULL;                                              \
    BEGIN(unit_of(device, &parent), 1);                                     \
    if (answer == NVML_SUCCESS && !unit)                                    \
        answer = NVML_ERROR_INVALID_ARGUMENT;                               \
    int good = answer == NVML_SUCCESS;                                      \
    (void)parent

static void put(char *text, unsigned length, const char *value)
{
    size_t size = strlen(value) + 1;
    if (!length)
        return;
    memcpy(text, value, size < length ? size : length);
    text[length - 1] = 0;
}

/* ---- the machine ---- */

nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
    (void)flags;
    BEGIN(NULL, 0);
    if (answer == NVML_SUCCESS)
        references++;
    END;
}

nvmlReturn_t nvmlInit_v2(void)
{
    BEGIN(NULL, 0);
    if (answer == NVML_SUCCESS)
        references++;
    END;
}

nvmlReturn_t nvmlShutdown(void)
{
    BEGIN(NULL, 1);
    if (answer == NVML_SUCCESS)
        references--;
    END;
}

const char *nvmlErrorString(nvmlReturn_t result)
{
    for (size_t i = 0; i < sizeof codes / sizeof *codes; i++)
        if (codes[i].code == (int)result)
            return codes[i].name;
    return "Unknown Error";
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length)
{
    BEGIN(NULL, 1);
    if (answer == NVML_SUCCESS)
        put(version, length, scenario.driver);
    END;
}

nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int length)
{
    BEGIN(NULL, 1);
    if (answer == NVML_SUCCESS)
        snprintf(version, length, "13.%s", scenario.driver);
    END;
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version)
{
    BEGIN(NULL, 1);
    if (answer == NVML_SUCCESS)
        *version = scenario.cuda;
    END;
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    BEGIN(NULL, 1);
    if (answer == NVML_SUCCESS)
        *version = scenario.cuda;
    END;
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count)
{
    BEGIN(NULL, 1);
    if (answer == NVML_SUCCESS)
        *count = (unsigned)scenario.n_gpus;
    END;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
    BEGIN(index < (unsigned)scenario.n_gpus ? &scenario.gpus[index].self : NULL, 1);
    if (answer == NVML_SUCCESS && !unit)
        answer = NVML_ERROR_INVALID_ARGUMENT;
    if (answer == NVML_SUCCESS)
        *device = handle_of((int)index, -1);
    END;
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
    BEGIN(NULL, 1);
    int found = 0;
    for (int gpu = 0; gpu < scenario.n_gpus; gpu++)
        for (int mig = -1; mig < scenario.gpus[gpu].n_migs; mig++) {
            struct unit *each = mig < 0 ? &scenario.gpus[gpu].self : &scenario.gpus[gpu].migs[mig];
            if (strcmp(each->uuid, uuid))
                continue;
            *device = handle_of(gpu, mig);
            found = 1;
        }
    if (answer == NVML_SUCCESS && !found)
        answer = NVML_ERROR_NOT_FOUND;
    END;
}

/* ---- one device ---- */

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length)
{
    ON_DEVICE;
    if (good)
        put(name, length, unit->name);
    END;
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length)
{
    ON_DEVICE;
    if (good)
        put(uuid, length, unit->uuid);
    END;
}

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index)
{
    ON_DEVICE;
    if (good)
        *index = (unsigned)(parent - scenario.gpus);
    END;
}

nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned int *minor)
{
    ON_DEVICE;
    if (good)
        *minor = (unsigned)(parent - scenario.gpus);
    END;
}

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    ON_DEVICE;
    if (good) {
        memset(pci, 0, sizeof *pci);
        put(pci->busId, sizeof pci->busId, unit->bus);
        put(pci->busIdLegacy, sizeof pci->busIdLegacy, strlen(unit->bus) > 12 ? unit->bus + 4 : unit->bus);
        sscanf(unit->bus, "%x:%x:%x", &pci->domain, &pci->bus, &pci->device);
    }
    END;
}

static unsigned long long free_of(const struct unit *unit)
{
    if (unit->free_given)
        return unit->free;
    if (unit->total == ALL_ONES || unit->used == ALL_ONES)
        return ALL_ONES;
    return unit->total - (unit->reserved == ALL_ONES ? 0 : unit->reserved) - unit->used;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    ON_DEVICE;
    if (good && unit->memory_unsupported)
        answer = NVML_ERROR_NOT_SUPPORTED;
    else if (good) {
        memory->total = unit->total;
        memory->free = free_of(unit);
        memory->used = unit->used == ALL_ONES ? ALL_ONES : unit->used + unit->reserved;
    }
    END;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    ON_DEVICE;
    if (good && unit->memory_unsupported)
        answer = NVML_ERROR_NOT_SUPPORTED;
    else if (good && memory->version != nvmlMemory_v2)
        answer = NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    else if (good) {
        memory->total = unit->total;
        memory->reserved = unit->reserved;
        memory->free = free_of(unit);
        memory->used = unit->used;
    }
    END;
}

nvmlReturn_t nvmlDeviceGetAddressingMode(nvmlDevice_t device, nvmlDeviceAddressingMode_t *mode)
{
    ON_DEVICE;
    if (good && unit->addressing == ABSENT)
        answer = NVML_ERROR_NOT_SUPPORTED;
    else if (good && mode->version != nvmlDeviceAddressingMode_v1)
        answer = NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    else if (good)
        mode->value = (unsigned)unit->addressing;
    END;
}

nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, nvmlEnableState_t *current, nvmlEnableState_t *pending)
{
    ON_DEVICE;
    if (good && unit->ecc == ABSENT)
        answer = NVML_ERROR_NOT_SUPPORTED;
    else if (good)
        *current = *pending = unit->ecc ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED;
    END;
}

nvmlReturn_t nvmlDeviceGetRetiredPages(
    nvmlDevice_t device, nvmlPageRetirementCause_t cause, unsigned int *count, unsigned long long *addresses)
{
    ON_DEVICE;
    if (good && unit->retired_single == ABSENT)
        answer = NVML_ERROR_NOT_SUPPORTED;
    else if (good) {
        int single = cause == NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS;
        unsigned have = (unsigned)(single ? unit->retired_single : unit->retired_double), room = *count;
        *count = have;
        if (have > room || (have && !addresses))
            answer = NVML_ERROR_INSUFFICIENT_SIZE;
        else
            for (unsigned i = 0; i < have; i++)
                addresses[i] = 0x10000ULL * (i + 1);
    }
    END;
}

nvmlReturn_t nvmlDeviceGetRemappedRows(
    nvmlDevice_t device, unsigned int *corr, unsigned int *unc, unsigned int *pending, unsigned int *failure)
{
    ON_DEVICE;
    if (good && unit->remapped[0] == ABSENT)
        answer = NVML_ERROR_NOT_SUPPORTED;
    else if (good) {
        *corr = (unsigned)unit->remapped[0];
        *unc = (unsigned)unit->remapped[1];
        *pending = (unsigned)unit->remapped[2];
        *failure = (unsigned)unit->remapped[3];
    }
    END;
}

/* ---- MIG ---- */

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending)
{
    ON_DEVICE;
    if (good && unit->mig == ABSENT)
        answer = NVML_ERROR_NOT_SUPPORTED;
    else if (good)
        *current = *pending = unit->mig ? NVML_DEVICE_MIG_ENABLE : NVML_DEVICE_MIG_DISABLE;
    END;
}

nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *count)
{
    ON_DEVICE;
    if (good)
        *count = parent->self.mig == ABSENT ? 0 : 7;
    END;
}

nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index, nvmlDevice_t *mig)
{
    ON_DEVICE;
    if (good && index >= (unsigned)parent->n_migs)
        answer = NVML_ERROR_NOT_FOUND;
    else if (good)
        *mig = handle_of((int)(parent - scenario.gpus), (int)index);
    END;
}

nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t device, nvmlDevice_t *gpu)
{
    ON_DEVICE;
    if (good)
        *gpu = handle_of((int)(parent - scenario.gpus), -1);
    END;
}

nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned int *is_mig)
{
    ON_DEVICE;
    if (good)
        *is_mig = unit != &parent->self;
    END;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned int *id)
{
    ON_DEVICE;
    if (good && unit == &parent->self)
        answer = NVML_ERROR_NOT_SUPPORTED;
    else if (good)
        *id = unit->gi;
    END;
}

nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned int *id)
{
    ON_DEVICE;
    if (good && unit == &parent->self)
        answer = NVML_ERROR_NOT_SUPPORTED;
    else if (good)
        *id = unit->ci;
    END;
}

nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes)
{
    ON_DEVICE;
    if (good && unit == &parent->self)
        answer = NVML_ERROR_NOT_SUPPORTED;
    else if (good) {
        memset(attributes, 0, sizeof *attributes);
        attributes->memorySizeMB = unit->attribute == ALL_ONES ? unit->total >> 20 : unit->attribute;
    }
    END;
}

/* ---- processes ---- */

static unsigned gather(const struct unit *unit, const struct gpu *parent, enum kind kind, struct process *found)
{
    unsigned count = 0;
    for (int i = 0; i < unit->n_processes; i++)
        if (unit->processes[i].kind == kind)
            found[count++] = unit->processes[i];
    if (unit == &parent->self)
        for (int mig = 0; mig < parent->n_migs; mig++) {
            const struct unit *instance = &parent->migs[mig];
            for (int i = 0; i < instance->n_processes; i++)
                if (instance->processes[i].kind == kind) {
                    found[count] = instance->processes[i];
                    found[count].gi = instance->gi;
                    found[count++].ci = instance->ci;
                }
        }
    return count;
}

/* One call of one age: version 1 has no instance ids. */
#define PROCESS_CALL(function, which, type, WITH_IDS)                                           \
    nvmlReturn_t function(nvmlDevice_t device, unsigned int *count, type *infos)                \
    {                                                                                           \
        static struct process found[MAX_PROCESSES * (1 + MAX_MIGS)];                            \
        ON_DEVICE;                                                                              \
        if (good) {                                                                             \
            unsigned have = gather(unit, parent, which, found), room = *count;                  \
            *count = have;                                                                      \
            if (have > room || (have && !infos))                                                \
                answer = NVML_ERROR_INSUFFICIENT_SIZE;                                          \
            else                                                                                \
                for (unsigned i = 0; i < have; i++) {                                           \
                    infos[i].pid = found[i].pid;                                                \
                    infos[i].usedGpuMemory = found[i].used;                                     \
                    WITH_IDS(infos[i].gpuInstanceId = found[i].gi;                              \
                             infos[i].computeInstanceId = found[i].ci;)                         \
                }                                                                               \
        }                                                                                       \
        END;                                                                                    \
    }
#define YES(statements) statements
#define NO(statements)
PROCESS_CALL(nvmlDeviceGetComputeRunningProcesses, COMPUTE, nvmlProcessInfo_v1_t, NO)
PROCESS_CALL(nvmlDeviceGetComputeRunningProcesses_v2, COMPUTE, nvmlProcessInfo_v2_t, YES)
PROCESS_CALL(nvmlDeviceGetComputeRunningProcesses_v3, COMPUTE, nvmlProcessInfo_t, YES)
PROCESS_CALL(nvmlDeviceGetGraphicsRunningProcesses, GRAPHICS, nvmlProcessInfo_v1_t, NO)
PROCESS_CALL(nvmlDeviceGetGraphicsRunningProcesses_v2, GRAPHICS, nvmlProcessInfo_v2_t, YES)
PROCESS_CALL(nvmlDeviceGetGraphicsRunningProcesses_v3, GRAPHICS, nvmlProcessInfo_t, YES)
PROCESS_CALL(nvmlDeviceGetMPSComputeRunningProcesses, MPS, nvmlProcessInfo_v1_t, NO)
PROCESS_CALL(nvmlDeviceGetMPSComputeRunningProcesses_v2, MPS, nvmlProcessInfo_v2_t, YES)
PROCESS_CALL(nvmlDeviceGetMPSComputeRunningProcesses_v3, MPS, nvmlProcessInfo_t, YES)
