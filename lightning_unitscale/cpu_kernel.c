/* One statistics row of an FP32 tensor in one pass over memory.
 *
 * Every block of the tensor is read once into the L1 cache and then looked at as often as need be:
 * first for its sums and its smallest and largest magnitude, which mostly settle the rest (a block
 * that lies on one side of a threshold needs no counting, one without zeros no search for them),
 * then for the thresholds within its range, and for its share of the sample of exponents.
 *
 * The codes of non-negative floats, read as integers, are in the order of the numbers; so
 * magnitudes and thresholds are compared as integers, subnormals included.
 */
#include "cpu_vectors.h"

#include <math.h>
#include <stdlib.h>

#define STEP (2 * LANES)         /* two sums of each kind: one addition need not wait for another */
#define BLOCK (64 * STEP)        /* 64 numbers are added up in FP32 before a sum goes on in FP64 */
#define CHUNK 65536              /* a thread's work at a time; sums are added up in chunk order */
#define MAX_CUTS 48
#define MAX_AT_ONCE 4            /* cuts that one loop counts */
#define NUM_EXPONENTS 279        /* 2**-150 ... 2**128 */
#define FIRST_NORMAL 23          /* place of exponent field 0 among them, if it were one more */
#define NUM_SUBNORMAL 24         /* places of subnormals, 2**-150 ... 2**-127 */
#define NUM_TABLES 4             /* one count waits for the last one in the same table */
#define MIN_NORMAL_CODE 0x00800000u
#define INF_CODE 0x7f800000u

typedef struct {
    double sum[LANES], abs_sum[LANES], square_sum[LANES];
    int64_t zeros, nans, infs;
    int64_t below[MAX_CUTS]; /* finite elements, zeros too, below each cut */
    uint32_t largest, smallest;
    uint32_t counts[NUM_TABLES][256]; /* by exponent field */
    uint32_t subnormals[NUM_SUBNORMAL];
} Partial;

/* How a tensor lies in memory: rows of numbers that are next to each other, at equal distances. */
typedef struct {
    const float *data;
    int64_t numel, row_length, row_stride;
} Rows;

typedef struct {
    Floats sum, abs_sum, square_sum;
    Codes largest, smallest;
} Lanes;

static inline void add_lanes(Lanes *all, const float *x) {
    Floats value;
    memcpy(&value, x, sizeof(value));
    const Codes code = magnitudes(x);
    all->largest = larger(code, all->largest);
    all->smallest = smaller(code, all->smallest);
    all->sum += value;
    all->abs_sum += (Floats)code;
    all->square_sum += value * value;
}

/* Sums in FP32 and extremes of a block. */
typedef struct {
    Floats sum, abs_sum, square_sum;
    double rest_sum, rest_abs_sum, rest_square_sum; /* of what fills no lanes */
    uint32_t largest, smallest;
} Look;

static inline Look look(const float *x, int32_t n) {
    Lanes a = {.smallest = (Codes){0} + INT32_MAX}, b = a;
    int32_t i = 0;
    for (; i + STEP <= n; i += STEP) {
        add_lanes(&a, x + i);
        add_lanes(&b, x + i + LANES);
    }
    Look found = {.sum = a.sum + b.sum,
                  .abs_sum = a.abs_sum + b.abs_sum,
                  .square_sum = a.square_sum + b.square_sum};
    const Codes high = larger(a.largest, b.largest), low = smaller(a.smallest, b.smallest);
    int32_t largest = 0, smallest = INT32_MAX;
    for (int32_t k = 0; k < LANES; k++) {
        largest = high[k] > largest ? high[k] : largest;
        smallest = low[k] < smallest ? low[k] : smallest;
    }
    for (; i < n; i++) {
        const int32_t c = (int32_t)code_at(x, i);
        largest = c > largest ? c : largest;
        smallest = c < smallest ? c : smallest;
        found.rest_sum += x[i];
        found.rest_abs_sum += fabsf(x[i]);
        found.rest_square_sum += (double)x[i] * x[i];
    }
    found.largest = (uint32_t)largest;
    found.smallest = (uint32_t)smallest;
    return found;
}

static void add_sums(Partial *p, const Look *found) {
    for (int32_t k = 0; k < LANES; k++) {
        p->sum[k] += found->sum[k];
        p->abs_sum[k] += found->abs_sum[k];
        p->square_sum[k] += found->square_sum[k];
    }
    p->sum[0] += found->rest_sum;
    p->abs_sum[0] += found->rest_abs_sum;
    p->square_sum[0] += found->rest_square_sum;
}

static void add_in_fp64(Partial *p, const float *x, int32_t n) {
    double sum = 0, abs_sum = 0, square_sum = 0;
    for (int32_t i = 0; i < n; i++) {
        const double v = x[i];
        sum += v;
        abs_sum += fabs(v);
        square_sum += v * v;
    }
    p->sum[0] += sum;
    p->abs_sum[0] += abs_sum;
    p->square_sum[0] += square_sum;
}

/* Adds to number counts how many codes are below as many cuts; number is a constant where this is
 * called, so that the counts stay in registers. */
static inline __attribute__((always_inline)) void count_below(
    int64_t *const *below, const int32_t *cuts, const int32_t number, const float *x, int32_t n) {
    Codes less[MAX_AT_ONCE] = {{0}}; /* minus the counts */
    int32_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        const Codes code = magnitudes(x + i);
        for (int32_t k = 0; k < number; k++)
            less[k] = less_where_below(less[k], code, (Codes){0} + cuts[k]);
    }
    for (int32_t k = 0; k < number; k++) {
        int32_t count = 0;
        for (int32_t lane = 0; lane < LANES; lane++) count -= less[k][lane];
        for (int32_t j = i; j < n; j++) count += (int32_t)code_at(x, j) < cuts[k];
        *below[k] += count;
    }
}

static void count_all_below(int64_t *const *below, const int32_t *cuts, int32_t number,
                            const float *x, int32_t n) {
    for (; number >= MAX_AT_ONCE; number -= MAX_AT_ONCE, below += MAX_AT_ONCE, cuts += MAX_AT_ONCE)
        count_below(below, cuts, MAX_AT_ONCE, x, n);
    if (number == 3) count_below(below, cuts, 3, x, n);
    if (number == 2) count_below(below, cuts, 2, x, n);
    if (number == 1) count_below(below, cuts, 1, x, n);
}

/* How many of n numbers are zero, and the smallest code above zero, minus one. */
static void find_zeros(const float *x, int32_t n, int32_t *zeros, uint32_t *above) {
    /* Codes minus one, without the sign, wrap zeros around to the largest code. */
    Codes less = {0}, low = less + INT32_MAX;
    int32_t i = 0, least = INT32_MAX;
    for (; i + LANES <= n; i += LANES) {
        const Codes code = magnitudes(x + i);
        less = less_where_below(less, code, (Codes){0} + 1);
        low = smaller(low, (code - 1) & (int32_t)SIGN_OFF);
    }
    *zeros = 0;
    for (int32_t k = 0; k < LANES; k++) {
        *zeros -= less[k];
        least = low[k] < least ? low[k] : least;
    }
    for (; i < n; i++) {
        const uint32_t code = code_at(x, i);
        const int32_t wrapped = (int32_t)((code - 1) & SIGN_OFF);
        *zeros += code == 0;
        least = wrapped < least ? wrapped : least;
    }
    *above = (uint32_t)least;
}

/* Returns whether the block has subnormals. */
static int32_t add_block(Partial *p, const float *x, int32_t n, const uint32_t *cuts,
                         int32_t num_cuts) {
    float cleaned[BLOCK];
    int32_t left_out = 0, zeros = 0;
    const Look found = look(x, n);
    uint32_t largest = found.largest, smallest = found.smallest;
    /* With a maximum between 2**-40 and 2**40 no square that matters leaves the range of FP32. */
    const int32_t fits = largest >= 0x2b800000u && largest < 0x53800000u;
    if (fits) add_sums(p, &found);
    if (largest >= INF_CODE) {
        int32_t nans = 0, infs = 0;
        largest = 0;
        for (int32_t i = 0; i < n; i++) {
            const uint32_t c = code_at(x, i);
            const int32_t finite = c < INF_CODE;
            nans += c > INF_CODE;
            infs += c == INF_CODE;
            cleaned[i] = finite ? x[i] : 0.0f;
            largest = finite && c > largest ? c : largest;
        }
        left_out = nans + infs;
        p->nans += nans;
        p->infs += infs;
        x = cleaned;
        smallest = 0;
    }
    if (smallest == 0) {
        uint32_t above;
        find_zeros(x, n, &zeros, &above);
        smallest = above + 1; /* beyond all codes when all elements are zero */
        zeros -= left_out;
    }
    p->zeros += zeros;
    if (largest == 0) {
        for (int32_t k = 0; k < num_cuts; k++) p->below[k] += zeros;
        return 0;
    }
    p->largest = largest > p->largest ? largest : p->largest;
    p->smallest = smallest < p->smallest ? smallest : p->smallest;
    int64_t *below[MAX_CUTS];
    int32_t open[MAX_CUTS], num_open = 0;
    for (int32_t k = 0; k < num_cuts; k++) {
        if (largest < cuts[k]) {
            p->below[k] += n - left_out;
        } else if (smallest >= cuts[k]) {
            p->below[k] += zeros;
        } else {
            p->below[k] -= left_out; /* which are zeros in what is counted */
            below[num_open] = &p->below[k];
            open[num_open++] = (int32_t)cuts[k];
        }
    }
    count_all_below(below, open, num_open, x, n);
    if (!fits) add_in_fp64(p, x, n);
    return smallest < MIN_NORMAL_CODE;
}

static inline int64_t smaller_of(int64_t a, int64_t b) { return a < b ? a : b; }

/* Which element of its stride the i-th of the sample is: as statistics._sample_index has it. */
static inline int64_t within_stride(int64_t i, int64_t stride) {
    const uint32_t golden = 2654435769u; /* 2**32 over the golden ratio */
    return (int64_t)((uint64_t)((uint32_t)i * golden) * (uint64_t)stride >> 32);
}

/* Zeros and subnormals all have the exponent field 0. */
static inline void count_subnormal(Partial *p, uint32_t code) {
    /* It is its code times 2**-149, and 2**-150 is the first place. */
    if (code > 0 && code < MIN_NORMAL_CODE) p->subnormals[32 - __builtin_clz(code)]++;
}

/* The sampled elements of the strides from one to another, the first of which begins at x. */
static void count_strides(Partial *p, const float *x, int64_t from, int64_t to, int64_t stride,
                          int32_t has_subnormals) {
    const float *at = x;
    int64_t i = from;
    for (; i + NUM_TABLES <= to; i += NUM_TABLES)
        for (int32_t k = 0; k < NUM_TABLES; k++, at += stride)
            p->counts[k][code_at(at, within_stride(i + k, stride)) >> 23]++;
    for (; i < to; i++, at += stride) p->counts[0][code_at(at, within_stride(i, stride)) >> 23]++;
    if (!has_subnormals) return;
    for (at = x, i = from; i < to; i++, at += stride)
        count_subnormal(p, code_at(at, within_stride(i, stride)));
}

/* The sampled element of a stride that lies in the block from first to end in part: if it does. */
static void count_if_within(Partial *p, const float *x, int64_t i, int64_t first, int64_t end,
                            int64_t stride) {
    const int64_t place = i * stride + within_stride(i, stride);
    if (place < first || place >= end) return;
    p->counts[0][code_at(x, place - first) >> 23]++;
    count_subnormal(p, code_at(x, place - first));
}

/* Counts the exponents of those elements from first to end that the sample holds. x is the block
 * that begins at first. */
static void count_exponents(Partial *p, const float *x, int64_t first, int64_t end, int64_t numel,
                            int64_t sample, int32_t has_subnormals) {
    const int64_t stride = numel <= sample ? 1 : numel / sample;
    const int64_t number = numel <= sample ? numel : sample;
    const int64_t stop = smaller_of((end + stride - 1) / stride, number);
    /* From here to there the strides lie in the block as a whole. */
    const int64_t here = smaller_of((first + stride - 1) / stride, stop);
    const int64_t within = smaller_of(end / stride, stop), there = within > here ? within : here;
    for (int64_t i = first / stride; i < here; i++) count_if_within(p, x, i, first, end, stride);
    if (here < there)
        count_strides(p, x + (here * stride - first), here, there, stride, has_subnormals);
    for (int64_t i = there; i < stop; i++) count_if_within(p, x, i, first, end, stride);
}

/* A block as numbers next to each other: where they lie, or gathered into the buffer. */
static const float *block_of(const Rows *rows, int64_t first, int32_t n, float *buffer) {
    if (rows->row_length == rows->row_stride) return rows->data + first;
    for (int32_t done = 0; done < n;) {
        const int64_t row = (first + done) / rows->row_length;
        const int64_t start = (first + done) % rows->row_length;
        const int64_t length = smaller_of(rows->row_length - start, n - done);
        memcpy(buffer + done, rows->data + row * rows->row_stride + start, (size_t)length * 4);
        done += (int32_t)length;
    }
    return buffer;
}

/* data: numel floats, in rows of row_length numbers next to each other whose beginnings are
 * row_stride numbers apart. cuts: three codes per format. sample_size: 0 for no exponent counts.
 * row: as RowLayout lists its columns. Returns 0, or 1 when there is no memory. */
int statistics_row_fp32(const float *data, int64_t numel, int64_t row_length, int64_t row_stride,
                        const uint32_t *cuts, int32_t num_cuts, int64_t sample_size,
                        int32_t num_threads, double *row) {
    const Rows rows = {data, numel, row_length, row_stride};
    const int64_t num_chunks = (numel + CHUNK - 1) / CHUNK;
    if (num_cuts > MAX_CUTS) return 1;
    Partial *partials = calloc((size_t)num_chunks + 1, sizeof(Partial));
    if (partials == NULL) return 1;
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1)
    for (int64_t chunk = 0; chunk < num_chunks; chunk++) {
        const int64_t start = chunk * CHUNK;
        const int64_t end = numel - start < CHUNK ? numel : start + CHUNK;
        float buffer[BLOCK];
        partials[chunk].smallest = INF_CODE;
        for (int64_t i = start; i < end; i += BLOCK) {
            const int32_t n = (int32_t)(end - i < BLOCK ? end - i : BLOCK);
            const float *x = block_of(&rows, i, n, buffer);
            const int32_t has_subnormals = add_block(&partials[chunk], x, n, cuts, num_cuts);
            if (sample_size > 0)
                count_exponents(&partials[chunk], x, i, i + n, numel, sample_size, has_subnormals);
        }
    }
    Partial *all = &partials[num_chunks];
    double sum = 0, abs_sum = 0, square_sum = 0;
    all->smallest = INF_CODE;
    for (const Partial *p = partials; p < all; p++) {
        for (int32_t k = 0; k < LANES; k++) {
            sum += p->sum[k];
            abs_sum += p->abs_sum[k];
            square_sum += p->square_sum[k];
        }
        all->zeros += p->zeros;
        all->nans += p->nans;
        all->infs += p->infs;
        for (int32_t k = 0; k < num_cuts; k++) all->below[k] += p->below[k];
        all->largest = p->largest > all->largest ? p->largest : all->largest;
        all->smallest = p->smallest < all->smallest ? p->smallest : all->smallest;
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
    for (int32_t k = 0; k < num_cuts; k += 3) {
        *row++ = (double)(finite - all->below[k + 2]);
        *row++ = (double)(all->below[k + 1] - all->below[k]);
        *row++ = (double)(all->below[k] - all->zeros);
    }
    if (sample_size > 0) {
        int64_t counts[NUM_EXPONENTS] = {0};
        for (const Partial *p = partials; p < all; p++) {
            for (int32_t i = 0; i < NUM_SUBNORMAL; i++) counts[i] += p->subnormals[i];
            for (int32_t k = 0; k < NUM_TABLES; k++)
                for (int32_t i = 1; i < 255; i++) counts[FIRST_NORMAL + i] += p->counts[k][i];
        }
        *row++ = (double)(numel < sample_size ? numel : sample_size);
        for (int32_t i = 0; i < NUM_EXPONENTS; i++) *row++ = (double)counts[i];
    }
    free(partials);
    return 0;
}
