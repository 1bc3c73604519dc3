/* The operator statistics_row on the CPU, without Python in between.
 *
 * torch is talked to through its stable C interface (torch/csrc/stable/c/shim.h, from torch 2.10
 * on), whose functions cpu_kernel.py finds in the loaded library: no header of torch is needed, and
 * nothing is linked. An argument comes as 64 bits. A tensor, a list and a string are pointers that
 * the called function owns; an element of a list is owned by whoever takes the list apart.
 *
 * What the kernel does not take (another type, an empty tensor, strides that are no rows, a layout
 * not seen before) is handed on untouched to an operator in Python.
 */
#include "cpu_kernel.h"

#include <stdatomic.h>

typedef uint64_t Value;

/* In the order of cpu_kernel.TORCH_FUNCTIONS. All of them return 0 unless something went wrong. */
typedef struct {
    int32_t (*library_init)(const char *, const char *, const char *, uint32_t, void **);
    int32_t (*library_impl)(void *, const char *, void (*)(Value *, uint64_t, uint64_t), uint64_t);
    int32_t (*call_dispatcher)(const char *, const char *, Value *, uint64_t);
    int32_t (*list_size)(void *, size_t *);
    int32_t (*list_get_item)(void *, size_t, Value *);
    int32_t (*delete_list)(void *);
    int32_t (*string_length)(void *, size_t *);
    int32_t (*string_c_str)(void *, const char **);
    int32_t (*delete_string)(void *);
    int32_t (*get_num_threads)(uint32_t *);
    int32_t (*get_dtype)(void *, int32_t *);
    int32_t (*get_numel)(void *, int64_t *);
    int32_t (*get_dim)(void *, int64_t *);
    int32_t (*get_sizes)(void *, int64_t **);
    int32_t (*get_strides)(void *, int64_t **);
    int32_t (*get_data_ptr)(void *, void **);
    int32_t (*empty_strided)(int64_t, const int64_t *, const int64_t *, int32_t, int32_t, int32_t,
                             void **);
    int32_t (*delete_tensor)(void *);
    int32_t (*dtype_float32)(void);
    int32_t (*dtype_bfloat16)(void);
    int32_t (*dtype_float16)(void);
    int32_t (*dtype_float64)(void);
    int32_t (*device_type_cpu)(void);
} Torch;

#define ABI_VERSION ((2ULL << 56) | (10ULL << 48)) /* of torch 2.10 */
#define SHORTEST_ROW 16 /* of shorter rows a copy is faster than to gather them */
#define MAX_DIM 64      /* as in torch */

/* What a key stands for; entries are added and never removed. */
typedef struct Layout {
    struct Layout *next;
    char *key;
    int64_t sample_size, num_columns;
    int32_t num_cuts;
    Cuts cuts;
    double edges[MAX_CUTS];
} Layout;

static Torch torch;
static _Atomic(Layout *) layouts;

static void *pointer(Value value) { return (void *)(uintptr_t)value; }

static const Layout *layout_of(Value string) {
    const char *key;
    size_t length;
    if (torch.string_c_str(pointer(string), &key)) return NULL;
    if (torch.string_length(pointer(string), &length)) return NULL;
    for (const Layout *one = atomic_load(&layouts); one != NULL; one = one->next)
        if (strlen(one->key) == length && memcmp(one->key, key, length) == 0) return one;
    return NULL;
}

/* How the elements lie in memory, from the first one on, in any order: row_length of them next to
 * each other, and row_stride from the beginning of such a row to that of the next; the same number
 * for a dense tensor. Returns whether there are such numbers, and the rows are not short. */
static int32_t rows_in_memory(Rows *rows, const int64_t *sizes, const int64_t *strides,
                              int64_t dim) {
    int64_t length = 1, gap = 0, end = 0;
    int32_t order[MAX_DIM], number = 0;
    /* By strides; a dimension of one element lies nowhere. */
    for (int32_t k = 0; k < dim; k++) {
        if (sizes[k] == 1) continue;
        int32_t place = number++;
        for (; place > 0 && strides[order[place - 1]] > strides[k]; place--)
            order[place] = order[place - 1];
        order[place] = k;
    }
    for (int32_t k = 0; k < number; k++) {
        const int64_t step = strides[order[k]], size = sizes[order[k]];
        if (gap == 0 && step == length) {
            length *= size; /* still next to each other */
        } else if (gap == 0 && step > length) {
            gap = step, end = step * size; /* the first dimension with gaps */
        } else if (gap != 0 && step == end) {
            end *= size;
        } else {
            return 0;
        }
    }
    rows->row_length = length;
    rows->row_stride = gap ? gap : length;
    return gap == 0 || length >= SHORTEST_ROW;
}

/* Returns whether the kernel takes the tensor. */
static int32_t describe(Rows *rows, void *tensor) {
    int32_t dtype;
    int64_t dim, *sizes, *strides;
    void *data;
    if (torch.get_dtype(tensor, &dtype)) return 0;
    if (dtype == torch.dtype_float32()) rows->type = FP32;
    else if (dtype == torch.dtype_bfloat16()) rows->type = BF16;
    else if (dtype == torch.dtype_float16()) rows->type = FP16;
    else return 0;
    if (torch.get_numel(tensor, &rows->numel) || rows->numel == 0) return 0;
    if (torch.get_dim(tensor, &dim) || dim > MAX_DIM) return 0;
    if (torch.get_sizes(tensor, &sizes) || torch.get_strides(tensor, &strides)) return 0;
    if (torch.get_data_ptr(tensor, &data)) return 0;
    rows->data = data;
    return rows_in_memory(rows, sizes, strides, dim);
}

/* The smallest FP32 number above a number that is not negative, as a code. */
static uint32_t code_above(double value) {
    const float nearest = (float)value;
    const float above = (double)nearest > value ? nearest : nextafterf(nearest, INFINITY);
    uint32_t code;
    memcpy(&code, &above, sizeof(code));
    return code;
}

/* The cuts for a tensor times a power of two. Returns whether the factor could be read. */
static int32_t set_scaled_cuts(Cuts *cuts, const Layout *layout, void *factor) {
    int32_t dtype;
    void *data;
    uint32_t codes[MAX_CUTS];
    if (torch.get_dtype(factor, &dtype) || dtype != torch.dtype_float32()) return 0;
    if (torch.get_data_ptr(factor, &data)) return 0;
    for (int32_t k = 0; k < layout->num_cuts; k++)
        codes[k] = code_above(layout->edges[k] / *(const float *)data);
    set_cuts(cuts, codes, layout->num_cuts);
    return 1;
}

/* Makes the row of a tensor, whose formats are counted times a factor if there is one. Returns NULL
 * for what the kernel does not take. */
static void *make_row(void *tensor, void *factor, const Layout *layout) {
    const int64_t step = 1;
    Rows rows;
    Cuts cuts = layout->cuts;
    void *result = NULL, *data;
    uint32_t num_threads;
    if (torch.get_num_threads(&num_threads) || !describe(&rows, tensor)) return NULL;
    if (factor != NULL && !set_scaled_cuts(&cuts, layout, factor)) return NULL;
    if (torch.empty_strided(1, &layout->num_columns, &step, torch.dtype_float64(),
                            torch.device_type_cpu(), 0, &result))
        return NULL;
    if (torch.get_data_ptr(result, &data) ||
        statistics_row(&rows, &cuts, layout->num_cuts, layout->sample_size, (int32_t)num_threads,
                       data)) {
        torch.delete_tensor(result);
        return NULL;
    }
    return result;
}

/* An error cannot be raised from here: torch has printed it, and an empty result fails elsewhere. */
static void hand_on(const char *name, Value *stack) {
    void *result = NULL;
    const int64_t nothing[] = {0}, one[] = {1};
    if (!torch.call_dispatcher(name, "", stack, ABI_VERSION)) return;
    torch.empty_strided(1, nothing, one, torch.dtype_float64(), torch.device_type_cpu(), 0,
                        &result);
    stack[0] = (Value)(uintptr_t)result;
}

/* (Tensor tensor, Tensor[] factor, str layout) -> Tensor */
static void statistics_row_operator(Value *stack, uint64_t num_arguments, uint64_t num_results) {
    (void)num_arguments, (void)num_results;
    const Layout *layout = layout_of(stack[2]);
    size_t num_factors;
    Value factor = 0;
    void *result = NULL;
    if (layout != NULL && !torch.list_size(pointer(stack[1]), &num_factors) &&
        (num_factors == 0 || !torch.list_get_item(pointer(stack[1]), 0, &factor)))
        result = make_row(pointer(stack[0]), pointer(factor), layout);
    if (result == NULL) {
        /* Takes over what is on the stack, the factor in its list too. */
        hand_on("lightning_unitscale::statistics_row_of_any", stack);
    } else {
        torch.delete_tensor(pointer(stack[0]));
        if (factor) torch.delete_tensor(pointer(factor));
        torch.delete_list(pointer(stack[1]));
        torch.delete_string(pointer(stack[2]));
        stack[0] = (Value)(uintptr_t)result;
    }
}

/* Lets torch call the operator of this file. functions: as in Torch. Returns whether it could. */
int unitscale_register(const Torch *functions, const char *name_space) {
    static void *library;
    torch = *functions;
    return !torch.library_init(name_space, "CPU", __FILE__, __LINE__, &library) &&
           !torch.library_impl(library, "statistics_row", statistics_row_operator, ABI_VERSION);
}

/* Makes a layout known. edges: of RowLayout, and codes of its fp32_cuts. Returns whether there was
 * memory, and not too many of them. */
int unitscale_add_layout(const char *key, const double *edges, const uint32_t *codes,
                         int32_t num_cuts, int64_t sample_size, int64_t num_columns) {
    Layout *layout = calloc(1, sizeof(Layout));
    char *copy = malloc(strlen(key) + 1);
    if (layout == NULL || copy == NULL || num_cuts > MAX_CUTS) {
        free(layout);
        free(copy);
        return 0;
    }
    layout->key = strcpy(copy, key);
    layout->sample_size = sample_size;
    layout->num_columns = num_columns;
    layout->num_cuts = num_cuts;
    memcpy(layout->edges, edges, (size_t)num_cuts * sizeof(double));
    set_cuts(&layout->cuts, codes, num_cuts);
    layout->next = atomic_load(&layouts);
    while (!atomic_compare_exchange_weak(&layouts, &layout->next, layout)) continue;
    return 1;
}
