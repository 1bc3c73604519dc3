/* Statistics rows of tensors in FP32, BF16 and FP16 in one pass over memory.
 *
 * A block of a tensor that has come into the L1 cache is looked at as often as need be
 * (cpu_blocks.h), and gives its share of the sample of exponents (cpu_sample.h).
 */
#include <stdlib.h>

#include "cpu_blocks.h"
#include "cpu_sample.h"

#define CHUNK 65536              /* a thread's work at a time; sums are added up in chunk order */
#define MAX_GAP 16777216         /* between rows; of a block's, all gaps are below 2**31 together */
#define NUM_EXPONENTS 279        /* 2**-150 ... 2**128 */
#define FIRST_NORMAL 23          /* place of exponent field 0 among them, if it were one more */

/* What the elements are. */
enum { FP32, BF16, FP16 };

/* How a tensor lies in memory: rows of numbers that are next to each other, at equal distances. */
typedef struct {
    const void *data;
    int64_t numel, row_length, row_stride;
    int32_t type;
} Rows;

/* FP16 in FP32, by integers: a processor that was told to take subnormals for zero would do so. The
 * exponents are 112 apart, those of infinities and NaN 224; subnormals are normal in FP32. */
static float float_of_fp16(uint16_t half) {
    const uint32_t magnitude = (uint32_t)(half & 0x7fff) << 13;
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16;
    uint32_t code;
    float value;
    if ((half & 0x7c00) == 0) {
        value = (float)(half & 0x3ff) * 0x1p-24f;
        memcpy(&code, &value, sizeof(code));
    } else {
        code = magnitude + ((half & 0x7c00) == 0x7c00 ? 224u << 23 : 112u << 23);
    }
    code |= sign;
    memcpy(&value, &code, sizeof(value));
    return value;
}

static float float_of_bf16(uint16_t half) {
    const uint32_t code = (uint32_t)half << 16;
    float value;
    memcpy(&value, &code, sizeof(value));
    return value;
}

static void copy_as_fp32(float *to, const Rows *rows, int64_t place, int64_t n) {
    const uint16_t *halves = (const uint16_t *)rows->data + place;
    if (rows->type == FP32)
        memcpy(to, (const float *)rows->data + place, (size_t)n * sizeof(float));
    else if (rows->type == BF16)
        for (int64_t i = 0; i < n; i++) to[i] = float_of_bf16(halves[i]);
    else
        for (int64_t i = 0; i < n; i++) to[i] = float_of_fp16(halves[i]);
}

/* Whether rows with gaps can be looked at where they lie, and no copy is needed. */
static int32_t stay_in_place(const Rows *rows) {
    const int64_t gap = rows->row_stride - rows->row_length;
    return rows->type == FP32 && rows->row_length % STEP == 0 && gap < MAX_GAP;
}

/* The block from an element on, of up to n: as it lies in memory, or copied into the buffer. */
static Block block_of(const Rows *rows, int64_t first, int32_t n, float *buffer) {
    const int32_t is_dense = rows->row_length == rows->row_stride;
    Block block = {.x = buffer, .n = n, .first_row = n};
    if (is_dense) {
        if (rows->type == FP32) block.x = (const float *)rows->data + first;
        else copy_as_fp32(buffer, rows, first, n);
        return block;
    }
    int64_t row = first / rows->row_length, start = first % rows->row_length;
    if (stay_in_place(rows)) {
        block.x = (const float *)rows->data + row * rows->row_stride + start;
        block.first_row = (int32_t)smaller_of(rows->row_length - start, n);
        if (rows->row_length >= BLOCK) {
            block.n = block.first_row; /* it ends where the row does */
        } else {
            block.row_length = (int32_t)rows->row_length;
            block.gap = (int32_t)(rows->row_stride - rows->row_length);
            block.ahead = (BLOCK + rows->row_length - 1) / rows->row_length * rows->row_stride;
        }
        return block;
    }
    for (int32_t done = 0; done < n; row++, start = 0) {
        const int64_t length = smaller_of(rows->row_length - start, n - done);
        copy_as_fp32(buffer + done, rows, row * rows->row_stride + start, length);
        done += (int32_t)length;
    }
    return block;
}

static void add_chunk(Partial *p, const Rows *rows, int64_t chunk, const Cuts *cuts,
                      int64_t sample_size) {
    const int64_t start = chunk * CHUNK, numel = rows->numel;
    const int64_t end = smaller_of(start + CHUNK, numel);
    const Sample sample = sample_of(numel, sample_size);
    float buffer[BLOCK];
    Seen seen;
    Below below;
    memset(&below, 0, sizeof(below));
    begin_at(&seen, start, &sample);
    p->smallest = INF_CODE;
    for (int64_t i = start; i < end;) {
        const Block block = block_of(rows, i, (int32_t)smaller_of(end - i, BLOCK), buffer);
        const int32_t has_subnormals = add_block(p, &below, &block, cuts, buffer);
        if (sample.number > 0) see_block(p, &seen, &block, i, &sample, has_subnormals);
        else if (sample_size > 0)
            see_all(p, &seen, gathered(&block, buffer), block.n, has_subnormals);
        i += block.n;
    }
    count_seen(p, &seen);
    for (int32_t k = 0; k < cuts->number; k++) p->below[k] += below.number_of[k];
}

static void merge(Partial *all, const Partial *p, const Cuts *cuts) {
    for (int32_t k = 0; k < LANES; k++) {
        all->sum[k] += p->sum[k];
        all->abs_sum[k] += p->abs_sum[k];
        all->square_sum[k] += p->square_sum[k];
    }
    all->zeros += p->zeros;
    all->nans += p->nans;
    all->infs += p->infs;
    for (int32_t k = 0; k < cuts->number; k++) all->below[k] += p->below[k];
    all->largest = p->largest > all->largest ? p->largest : all->largest;
    all->smallest = p->smallest < all->smallest ? p->smallest : all->smallest;
    for (int32_t i = 0; i < 256; i++) all->counts[i] += p->counts[i];
    for (int32_t i = 0; i < NUM_SUBNORMAL; i++) all->subnormals[i] += p->subnormals[i];
}

static void write_row(double *row, const Partial *all, int64_t numel, const Cuts *cuts,
                      int32_t num_given, int64_t sample_size) {
    double sum = 0, abs_sum = 0, square_sum = 0;
    for (int32_t k = 0; k < LANES; k++) {
        sum += all->sum[k];
        abs_sum += all->abs_sum[k];
        square_sum += all->square_sum[k];
    }
    float extremes[2];
    memcpy(&extremes[0], &all->largest, sizeof(float));
    memcpy(&extremes[1], &all->smallest, sizeof(float));
    *row++ = (double)numel;
    *row++ = (double)all->zeros;
    *row++ = (double)all->nans;
    *row++ = (double)all->infs;
    *row++ = sum;
    *row++ = abs_sum;
    *row++ = square_sum;
    *row++ = extremes[0];
    *row++ = extremes[1];
    const int64_t finite = numel - all->nans - all->infs;
    for (int32_t k = 0; k < num_given; k += 3) {
        const int64_t flushed = all->below[cuts->place_of[k]];
        const int64_t denormal = all->below[cuts->place_of[k + 1]];
        *row++ = (double)(finite - all->below[cuts->place_of[k + 2]]);
        *row++ = (double)(denormal - flushed);
        *row++ = (double)(flushed - all->zeros);
    }
    if (sample_size <= 0) return;
    *row++ = (double)num_sampled(numel, sample_size);
    memset(row, 0, NUM_EXPONENTS * sizeof(double));
    for (int32_t i = 0; i < NUM_SUBNORMAL; i++) row[i] = all->subnormals[i];
    for (int32_t i = 1; i < 255; i++) row[FIRST_NORMAL + i] += all->counts[i];
}

/* Thresholds from their codes, three per format. */
static void set_cuts(Cuts *cuts, const uint32_t *given, int32_t num_given) {
    memset(cuts, 0, sizeof(*cuts));
    for (int32_t k = 0; k < num_given; k++) {
        int32_t place = 0;
        while (place < cuts->number && cuts->codes[place] != (int32_t)given[k]) place++;
        if (place == cuts->number) cuts->codes[cuts->number++] = (int32_t)given[k];
        cuts->place_of[k] = place;
    }
}

/* tensor: not empty. cuts: made of num_given codes. sample_size: 0 for no exponent counts. row: as
 * RowLayout lists its columns. Returns 0, or 1 when there is no memory. */
static int32_t statistics_row(const Rows *tensor, const Cuts *cuts, int32_t num_given,
                              int64_t sample_size, int32_t num_threads, double *row) {
    const int64_t num_chunks = (tensor->numel + CHUNK - 1) / CHUNK;
    Partial *partials = calloc((size_t)num_chunks, sizeof(Partial));
    if (partials == NULL) return 1;
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1)
    for (int64_t i = 0; i < num_chunks; i++)
        add_chunk(&partials[i], tensor, i, cuts, sample_size);
    for (int64_t i = 1; i < num_chunks; i++) merge(&partials[0], &partials[i], cuts);
    write_row(row, &partials[0], tensor->numel, cuts, num_given, sample_size);
    free(partials);
    return 0;
}
