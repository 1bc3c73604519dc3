/* One statistics row of an FP32 tensor in one pass over memory.
 *
 * Every block of the tensor is read once into the L1 cache and then looked at several times: first
 * for its smallest and largest magnitude, which mostly settle the threshold counts (a block that
 * lies on one side of a threshold needs no counting), then for the sums.
 *
 * The codes of non-negative floats, read as integers, are in the order of the numbers; so
 * magnitudes and thresholds are compared as integers, subnormals included.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK 2048               /* 8 KiB: stays in any L1 cache between the looks */
#define RUN 256                  /* so many are added up in FP32 before the sum goes on in FP64 */
#define CHUNK (32 * BLOCK)       /* work of one thread at a time; sums are added up in chunk order */
#define MAX_CUTS 48
#define NUM_EXPONENTS 279        /* 2**-150 ... 2**128 */
#define INF_CODE 0x7f800000u
#define SIGN_OFF 0x7fffffffu

typedef struct {
    double sum, abs_sum, square_sum;
    int64_t zeros, nans, infs;
    int64_t below[MAX_CUTS]; /* finite elements, zeros too, below each cut */
    uint32_t largest, smallest;
} Partial;

static void add_block(Partial *p, const float *x, int32_t n, const uint32_t *cuts, int32_t num_cuts) {
    float cleaned[BLOCK];
    uint32_t code[BLOCK];
    int32_t left_out = 0, zeros = 0;
    /* Codes minus one wrap zeros around to the largest code: the minimum is then above zero. */
    uint32_t largest = 0, smallest = UINT32_MAX;
    memcpy(code, x, sizeof(float) * (size_t)n);
    for (int32_t i = 0; i < n; i++) {
        const uint32_t c = code[i] & SIGN_OFF;
        code[i] = c;
        largest = c > largest ? c : largest;
        smallest = c - 1 < smallest ? c - 1 : smallest;
        zeros += c == 0;
    }
    if (largest >= INF_CODE) {
        int32_t nans = 0, infs = 0;
        largest = 0, smallest = UINT32_MAX;
        for (int32_t i = 0; i < n; i++) {
            const uint32_t c = code[i];
            const int32_t finite = c < INF_CODE;
            nans += c > INF_CODE;
            infs += c == INF_CODE;
            code[i] = finite ? c : 0;
            cleaned[i] = finite ? x[i] : 0.0f;
            largest = finite && c > largest ? c : largest;
            smallest = finite && c - 1 < smallest ? c - 1 : smallest;
        }
        left_out = nans + infs;
        p->nans += nans;
        p->infs += infs;
        x = cleaned;
    }
    smallest += 1; /* back to a code; 0 when all elements are zero */
    p->zeros += zeros;
    if (largest == 0) {
        for (int32_t k = 0; k < num_cuts; k++) p->below[k] += zeros;
        return;
    }
    p->largest = largest > p->largest ? largest : p->largest;
    p->smallest = smallest < p->smallest ? smallest : p->smallest;
    for (int32_t k = 0; k < num_cuts; k++) {
        const int32_t cut = (int32_t)cuts[k];
        int32_t below = 0;
        if (largest < cuts[k]) {
            below = n - left_out;
        } else if (smallest >= cuts[k]) {
            below = zeros;
        } else {
            for (int32_t i = 0; i < n; i++) below += (int32_t)code[i] < cut;
            below -= left_out;
        }
        p->below[k] += below;
    }
    /* With a maximum between 2**-40 and 2**40 no square that matters leaves the range of FP32. */
    if (largest >= 0x2b800000u && largest < 0x53800000u) {
        for (int32_t first = 0; first < n; first += RUN) {
            const int32_t end = n - first < RUN ? n : first + RUN;
            float sum = 0, abs_sum = 0, square_sum = 0;
            for (int32_t i = first; i < end; i++) {
                sum += x[i];
                abs_sum += fabsf(x[i]);
                square_sum += x[i] * x[i];
            }
            p->sum += sum;
            p->abs_sum += abs_sum;
            p->square_sum += square_sum;
        }
    } else {
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
}

static void add_exponent(int64_t *counts, uint32_t code) {
    code &= SIGN_OFF;
    if (code == 0 || code >= INF_CODE) return;
    /* Exponent -150 is bin 0. A subnormal is its code times 2**-149: its top bit says which. */
    counts[code >> 23 ? (code >> 23) + 23 : 32u - (uint32_t)__builtin_clz(code)]++;
}

static void count_exponents(int64_t *counts, const uint32_t *codes, int64_t numel, int64_t sample) {
    if (numel <= sample) {
        for (int64_t i = 0; i < numel; i++) add_exponent(counts, codes[i]);
        return;
    }
    /* The same elements as statistics._sample_index. */
    const int64_t stride = numel / sample;
    for (int64_t i = 0; i < sample; i++)
        add_exponent(counts, codes[i * stride + (((i * 2654435769) & UINT32_MAX) * stride >> 32)]);
}

/* data: numel floats in a row. cuts: three codes per format. sample_size: 0 for no exponent counts.
 * row: as RowLayout lists its columns. Returns 0, or 1 when there is no memory. */
int statistics_row_fp32(const float *data, int64_t numel, const uint32_t *cuts, int32_t num_cuts,
                        int64_t sample_size, int32_t num_threads, double *row) {
    const int64_t num_chunks = (numel + CHUNK - 1) / CHUNK;
    if (num_cuts > MAX_CUTS) return 1;
    Partial *partials = calloc((size_t)num_chunks + 1, sizeof(Partial));
    if (partials == NULL) return 1;
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1)
    for (int64_t chunk = 0; chunk < num_chunks; chunk++) {
        const int64_t first = chunk * CHUNK;
        const int64_t end = numel - first < CHUNK ? numel : first + CHUNK;
        partials[chunk].smallest = INF_CODE;
        for (int64_t i = first; i < end; i += BLOCK)
            add_block(&partials[chunk], data + i, (int32_t)(end - i < BLOCK ? end - i : BLOCK), cuts,
                      num_cuts);
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
    free(partials);
    if (sample_size > 0) {
        int64_t counts[NUM_EXPONENTS] = {0};
        count_exponents(counts, (const uint32_t *)data, numel, sample_size);
        *row++ = (double)(numel < sample_size ? numel : sample_size);
        for (int32_t i = 0; i < NUM_EXPONENTS; i++) *row++ = (double)counts[i];
    }
    return 0;
}
