/* One statistics row of an FP32 tensor in one pass over memory.
 *
 * Every block of the tensor is read once into the L1 cache and then looked at as often as need be:
 * first for its sums and its smallest and largest magnitude, which mostly settle the rest (a block
 * that lies on one side of a threshold needs no counting, one without zeros no search for them),
 * then for the thresholds within its range, four at a time, and for its share of the sample of
 * exponents.
 *
 * The codes of non-negative floats, read as integers, are in the order of the numbers; so
 * magnitudes and thresholds are compared as integers, subnormals included.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16                 /* independent sums, so that one addition need not wait for another */
#define BLOCK 2048               /* 8 KiB: stays in any L1 cache between the looks */
#define RUN (64 * LANES)         /* 64 numbers are added up in FP32 before a sum goes on in FP64 */
#define CHUNK (32 * BLOCK)       /* work of one thread at a time; sums are added up in chunk order */
#define MAX_CUTS 48
#define NUM_EXPONENTS 279        /* 2**-150 ... 2**128 */
#define NUM_TABLES 4             /* one count waits for the last one in the same table */
#define INF_CODE 0x7f800000u
#define SIGN_OFF 0x7fffffffu

typedef struct {
    double sum, abs_sum, square_sum;
    int64_t zeros, nans, infs;
    int64_t below[MAX_CUTS]; /* finite elements, zeros too, below each cut */
    uint32_t largest, smallest;
    uint32_t counts[NUM_TABLES][NUM_EXPONENTS + 1]; /* the last bin is for what is not counted */
} Partial;

/* How a tensor lies in memory: rows of numbers that are next to each other, at equal distances. */
typedef struct {
    const float *data;
    int64_t numel, row_length, row_stride;
} Rows;

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Codes __attribute__((vector_size(LANES * 4)));

typedef struct {
    Floats sum, abs_sum, square_sum;
    Codes largest, smallest;
} Lanes;

/* Element by element; the language has no such operator, processors do. */
static inline Codes chosen(Codes where, Codes yes, Codes no) { return (yes & where) | (no & ~where); }

static inline void add_lanes(Lanes *all, const float *x) {
    Floats value;
    memcpy(&value, x, sizeof(value));
    const Codes code = (Codes)value & (int32_t)SIGN_OFF;
    all->largest = chosen(code > all->largest, code, all->largest);
    all->smallest = chosen(code < all->smallest, code, all->smallest);
    all->sum += value;
    all->abs_sum += (Floats)code;
    all->square_sum += value * value;
}

/* Sums in FP32 and extremes of n numbers; the rest of the last lanes is filled up with the first. */
static void look(Partial *p, const float *x, int32_t n, uint32_t *largest, uint32_t *smallest) {
    Lanes all = {.smallest = (Codes){0} + INT32_MAX};
    for (int32_t first = 0; first < n; first += RUN) {
        const int32_t end = n - first < RUN ? n : first + RUN;
        Lanes run = {.largest = all.largest, .smallest = all.smallest};
        int32_t i = first;
        for (; i + LANES <= end; i += LANES) add_lanes(&run, x + i);
        all = run;
        double sum = 0, abs_sum = 0, square_sum = 0;
        for (int32_t k = 0; k < LANES; k++) {
            sum += run.sum[k];
            abs_sum += run.abs_sum[k];
            square_sum += run.square_sum[k];
        }
        for (; i < end; i++) {
            int32_t c;
            memcpy(&c, x + i, sizeof(c));
            c &= (int32_t)SIGN_OFF;
            all.largest[0] = c > all.largest[0] ? c : all.largest[0];
            all.smallest[0] = c < all.smallest[0] ? c : all.smallest[0];
            sum += x[i];
            abs_sum += fabsf(x[i]);
            square_sum += (double)x[i] * x[i];
        }
        p->sum += sum;
        p->abs_sum += abs_sum;
        p->square_sum += square_sum;
    }
    int32_t high = 0, low = INT32_MAX;
    for (int32_t k = 0; k < LANES; k++) {
        high = all.largest[k] > high ? all.largest[k] : high;
        low = all.smallest[k] < low ? all.smallest[k] : low;
    }
    *largest = (uint32_t)high;
    *smallest = (uint32_t)low;
}

static void add_in_fp64(Partial *p, const float *x, int32_t n) {
    double sum = 0, abs_sum = 0, square_sum = 0;
    for (int32_t i = 0; i < n; i++) {
        const double v = x[i];
        sum += v;
        abs_sum += fabs(v);
        square_sum += v * v;
    }
    p->sum += sum;
    p->abs_sum += abs_sum;
    p->square_sum += square_sum;
}

/* Adds to four counts how many codes are below four cuts. */
static void count_below(int64_t *const *below, const int32_t *cuts, const float *x, int32_t n) {
    const int32_t a = cuts[0], b = cuts[1], c = cuts[2], d = cuts[3];
    int32_t under_a = 0, under_b = 0, under_c = 0, under_d = 0;
    for (int32_t i = 0; i < n; i++) {
        int32_t code;
        memcpy(&code, x + i, sizeof(code));
        code &= (int32_t)SIGN_OFF;
        under_a += code < a;
        under_b += code < b;
        under_c += code < c;
        under_d += code < d;
    }
    *below[0] += under_a;
    *below[1] += under_b;
    *below[2] += under_c;
    *below[3] += under_d;
}

static void add_block(Partial *p, const float *x, int32_t n, const uint32_t *cuts, int32_t num_cuts) {
    float cleaned[BLOCK];
    int32_t left_out = 0, zeros = 0;
    uint32_t largest, smallest;
    const double sum = p->sum, abs_sum = p->abs_sum, square_sum = p->square_sum;
    look(p, x, n, &largest, &smallest);
    /* With a maximum between 2**-40 and 2**40 no square that matters leaves the range of FP32. */
    const int32_t fits = largest >= 0x2b800000u && largest < 0x53800000u;
    if (!fits) p->sum = sum, p->abs_sum = abs_sum, p->square_sum = square_sum;
    if (largest >= INF_CODE) {
        int32_t nans = 0, infs = 0;
        largest = 0;
        for (int32_t i = 0; i < n; i++) {
            uint32_t c;
            memcpy(&c, x + i, sizeof(c));
            c &= SIGN_OFF;
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
        /* Codes minus one wrap zeros around to the largest code: the minimum is then above zero. */
        uint32_t above = UINT32_MAX;
        for (int32_t i = 0; i < n; i++) {
            uint32_t c;
            memcpy(&c, x + i, sizeof(c));
            c &= SIGN_OFF;
            zeros += c == 0;
            above = c - 1 < above ? c - 1 : above;
        }
        smallest = above + 1; /* 0 when all elements are zero */
        zeros -= left_out;
    }
    p->zeros += zeros;
    if (largest == 0) {
        for (int32_t k = 0; k < num_cuts; k++) p->below[k] += zeros;
        return;
    }
    p->largest = largest > p->largest ? largest : p->largest;
    p->smallest = smallest < p->smallest ? smallest : p->smallest;
    int64_t unused = 0, *below[MAX_CUTS + 3];
    int32_t open[MAX_CUTS + 3], num_open = 0;
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
    for (int32_t k = num_open; k < num_open + 3; k++) below[k] = &unused, open[k] = 0;
    for (int32_t k = 0; k < num_open; k += 4) count_below(below + k, open + k, x, n);
    if (!fits) add_in_fp64(p, x, n);
}

static int32_t exponent_bin(uint32_t code) {
    code &= SIGN_OFF;
    if (code == 0 || code >= INF_CODE) return NUM_EXPONENTS;
    /* Exponent -150 is bin 0. A subnormal is its code times 2**-149: its top bit says which. */
    return (int32_t)(code >> 23 ? (code >> 23) + 23 : 32u - (uint32_t)__builtin_clz(code));
}

/* Counts the exponents of those elements from first to end that the sample holds: the same ones as
 * statistics._sample_index. x is the block that begins at first. */
static void count_exponents(Partial *p, const float *x, int64_t first, int64_t end, int64_t numel,
                            int64_t sample) {
    const int64_t stride = numel <= sample ? 1 : numel / sample;
    const int64_t number = numel <= sample ? numel : sample;
    const int64_t last = (end + stride - 1) / stride < number ? (end + stride - 1) / stride : number;
    for (int64_t i = first / stride; i < last; i++) {
        const int64_t place = i * stride + (((i * 2654435769) & UINT32_MAX) * stride >> 32);
        if (place < first || place >= end) continue;
        uint32_t code;
        memcpy(&code, x + (place - first), sizeof(code));
        p->counts[i % NUM_TABLES][exponent_bin(code)]++;
    }
}

/* A block as numbers next to each other: where they lie, or gathered into the buffer. */
static const float *block_of(const Rows *rows, int64_t first, int32_t n, float *buffer) {
    if (rows->row_length == rows->row_stride) return rows->data + first;
    for (int32_t done = 0; done < n;) {
        const int64_t row = (first + done) / rows->row_length, start = (first + done) % rows->row_length;
        int64_t length = rows->row_length - start;
        if (length > n - done) length = n - done;
        memcpy(buffer + done, rows->data + row * rows->row_stride + start, (size_t)length * sizeof(float));
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
            add_block(&partials[chunk], x, n, cuts, num_cuts);
            if (sample_size > 0) count_exponents(&partials[chunk], x, i, i + n, numel, sample_size);
        }
    }
    Partial *all = &partials[num_chunks];
    all->smallest = INF_CODE;
    for (const Partial *p = partials; p < all; p++) {
        all->sum += p->sum;
        all->abs_sum += p->abs_sum;
        all->square_sum += p->square_sum;
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
    *row++ = all->sum;
    *row++ = all->abs_sum;
    *row++ = all->square_sum;
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
        for (const Partial *p = partials; p < all; p++)
            for (int32_t k = 0; k < NUM_TABLES; k++)
                for (int32_t i = 0; i < NUM_EXPONENTS; i++) counts[i] += p->counts[k][i];
        *row++ = (double)(numel < sample_size ? numel : sample_size);
        for (int32_t i = 0; i < NUM_EXPONENTS; i++) *row++ = (double)counts[i];
    }
    free(partials);
    return 0;
}
