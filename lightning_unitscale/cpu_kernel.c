/* Statistics rows of FP32 tensors in one pass over memory.
 *
 * A block of a tensor that has come into the L1 cache is looked at as often as need be
 * (cpu_blocks.h), and gives its share of the sample of exponents (cpu_sample.h).
 */
#include <stdlib.h>

#include "cpu_blocks.h"
#include "cpu_sample.h"

#define CHUNK 65536              /* a thread's work at a time; sums are added up in chunk order */
#define NUM_EXPONENTS 279        /* 2**-150 ... 2**128 */
#define FIRST_NORMAL 23          /* place of exponent field 0 among them, if it were one more */

/* How a tensor lies in memory: rows of numbers that are next to each other, at equal distances. */
typedef struct {
    const float *data;
    int64_t numel, row_length, row_stride;
} Rows;

/* A thread's work at a time. */
typedef struct {
    int32_t tensor;
    int64_t place;
} Chunk;

/* A block as numbers next to each other: where they lie, or gathered into the buffer. */
static const float *block_of(const Rows *rows, int64_t first, int32_t n, float *buffer) {
    if (rows->row_length == rows->row_stride) return rows->data + first;
    int64_t row = first / rows->row_length, start = first % rows->row_length;
    for (int32_t done = 0; done < n; row++, start = 0) {
        const int64_t length = smaller_of(rows->row_length - start, n - done);
        memcpy(buffer + done, rows->data + row * rows->row_stride + start, (size_t)length * 4);
        done += (int32_t)length;
    }
    return buffer;
}

static void add_chunk(Partial *p, const Rows *rows, int64_t chunk, const Cuts *cuts,
                      int64_t sample_size) {
    const int64_t start = chunk * CHUNK, numel = rows->numel;
    const int64_t end = smaller_of(start + CHUNK, numel);
    const int32_t all = numel <= sample_size || sample_size <= 0;
    const Sample sample = {all ? 1 : numel / sample_size, all ? numel : sample_size};
    float buffer[BLOCK];
    Seen seen;
    Below below;
    memset(&below, 0, sizeof(below));
    begin_at(&seen, start, &sample);
    p->smallest = INF_CODE;
    for (int64_t i = start; i < end; i += BLOCK) {
        const int32_t n = (int32_t)smaller_of(end - i, BLOCK);
        const float *x = block_of(rows, i, n, buffer);
        const int32_t has_subnormals = add_block(p, &below, x, n, cuts);
        if (sample_size > 0) see_block(p, &seen, x, i, i + n, &sample, has_subnormals);
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
    *row++ = (double)(numel < sample_size ? numel : sample_size);
    memset(row, 0, NUM_EXPONENTS * sizeof(double));
    for (int32_t i = 0; i < NUM_SUBNORMAL; i++) row[i] = all->subnormals[i];
    for (int32_t i = 1; i < 255; i++) row[FIRST_NORMAL + i] += all->counts[i];
}

/* tensors: each as data, numel (not zero), and rows of row_length numbers next to each other whose
 * beginnings are row_stride numbers apart. cuts: three codes per format. sample_size: 0 for no
 * exponent counts. rows: one row per tensor, as RowLayout lists its columns, num_columns apart.
 * Returns 0, or 1 when there is no memory. */
int statistics_rows_fp32(const Rows *tensors, int32_t num_tensors, const uint32_t *given_cuts,
                         int32_t num_given, int64_t sample_size, int32_t num_threads, double *rows,
                         int64_t num_columns) {
    if (num_given > MAX_CUTS) return 1;
    Cuts cuts = {.number = 0};
    for (int32_t k = 0; k < num_given; k++) {
        int32_t place = 0;
        while (place < cuts.number && cuts.codes[place] != (int32_t)given_cuts[k]) place++;
        if (place == cuts.number) cuts.codes[cuts.number++] = (int32_t)given_cuts[k];
        cuts.place_of[k] = place;
    }
    int64_t num_chunks = 0, most = 0;
    for (int32_t k = 0; k < num_tensors; k++) {
        const int64_t own = (tensors[k].numel + CHUNK - 1) / CHUNK;
        num_chunks += own;
        most = own > most ? own : most;
    }
    Chunk *chunks = malloc((size_t)num_chunks * sizeof(Chunk));
    Partial *partials = calloc((size_t)num_chunks, sizeof(Partial));
    if (chunks == NULL || partials == NULL) {
        free(chunks);
        free(partials);
        return 1;
    }
    /* Parts of one tensor lie between each other: the first chunks of all of them come first. */
    int64_t listed = 0;
    for (int64_t chunk = 0; chunk < most; chunk++)
        for (int32_t k = 0; k < num_tensors; k++)
            if (chunk * CHUNK < tensors[k].numel) chunks[listed++] = (Chunk){k, chunk};
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1)
    for (int64_t i = 0; i < num_chunks; i++)
        add_chunk(&partials[i], &tensors[chunks[i].tensor], chunks[i].place, &cuts, sample_size);
    /* The first ones are those of the tensors in their order. */
    for (int64_t i = num_tensors; i < num_chunks; i++)
        merge(&partials[chunks[i].tensor], &partials[i], &cuts);
    for (int32_t k = 0; k < num_tensors; k++)
        write_row(rows + k * num_columns, &partials[k], tensors[k].numel, &cuts, num_given,
                  sample_size);
    free(chunks);
    free(partials);
    return 0;
}
