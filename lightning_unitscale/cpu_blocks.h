/* Sums, extremes and threshold counts of one block of numbers.
 *
 * A block is read once: for its sums, for its smallest and largest magnitude, and for those
 * thresholds that the block before it lay on both sides of. The extremes mostly settle the rest (a
 * block that lies on one side of a threshold needs no counting, one without zeros no search for
 * them); what they leave open is counted while the block is in the L1 cache.
 *
 * The codes of non-negative floats, read as integers, are in the order of the numbers; so
 * magnitudes and thresholds are compared as integers, subnormals included.
 */
#include "cpu_vectors.h"

#include <math.h>

#define STEP (2 * LANES)         /* two sums of each kind: one addition need not wait for another */
#define BLOCK (64 * STEP)        /* 64 numbers are added up in FP32 before a sum goes on in FP64 */
#define MAX_CUTS 48
#define MAX_AT_ONCE 4            /* cuts that one loop counts */
#define NUM_SUBNORMAL 24         /* places of subnormals, 2**-150 ... 2**-127 */
#define MIN_NORMAL_CODE 0x00800000u
#define INF_CODE 0x7f800000u
#define ALWAYS_INLINE inline __attribute__((always_inline))

/* Thresholds, each once. */
typedef struct {
    uint32_t codes[MAX_CUTS];
    int32_t number, place_of[MAX_CUTS]; /* of those that were given */
} Cuts;

typedef struct {
    double sum[LANES], abs_sum[LANES], square_sum[LANES];
    int64_t zeros, nans, infs;
    int64_t below[MAX_CUTS]; /* finite elements, zeros too, below each cut */
    uint32_t largest, smallest;
    uint32_t counts[256]; /* by exponent field */
    uint32_t subnormals[NUM_SUBNORMAL];
} Partial;

/* Cuts that the next block may lie on both sides of, by their places. */
typedef struct {
    int32_t number, places[MAX_AT_ONCE], codes[MAX_AT_ONCE];
} Guess;

typedef struct {
    Floats sum, abs_sum, square_sum;
    Codes largest, smallest;
} Lanes;

/* Sums in FP32, extremes, and how many are below the guessed cuts, of a block. */
typedef struct {
    Floats sum, abs_sum, square_sum;
    double rest_sum, rest_abs_sum, rest_square_sum; /* of what fills no lanes */
    uint32_t largest, smallest;
    int32_t below[MAX_AT_ONCE];
} Look;

static ALWAYS_INLINE void add_lanes(Lanes *all, Codes *less, const float *x, const int32_t *cuts,
                                    const int32_t number) {
    Floats value;
    memcpy(&value, x, sizeof(value));
    const Codes code = magnitudes(x);
    all->largest = larger(code, all->largest);
    all->smallest = smaller(code, all->smallest);
    all->sum += value;
    all->abs_sum += (Floats)code;
    all->square_sum += value * value;
    for (int32_t k = 0; k < number; k++)
        less[k] = less_where_below(less[k], code, (Codes){0} + cuts[k]);
}

/* number is a constant where this is called, so that the counts stay in registers. */
static ALWAYS_INLINE Look look_with(const float *x, int32_t n, const int32_t *cuts,
                                    const int32_t number) {
    Lanes a = {.smallest = (Codes){0} + INT32_MAX}, b = a;
    Codes less[MAX_AT_ONCE] = {{0}}; /* minus the numbers below the cuts */
    int32_t i = 0;
    for (; i + STEP <= n; i += STEP) {
        add_lanes(&a, less, x + i, cuts, number);
        add_lanes(&b, less, x + i + LANES, cuts, number);
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
    for (int32_t k = 0; k < number; k++) {
        for (int32_t lane = 0; lane < LANES; lane++) found.below[k] -= less[k][lane];
        for (int32_t j = i; j < n; j++) found.below[k] += (int32_t)code_at(x, j) < cuts[k];
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

static Look look(const float *x, int32_t n, const Guess *guess) {
    switch (guess->number) {
    case 0: return look_with(x, n, guess->codes, 0);
    case 1: return look_with(x, n, guess->codes, 1);
    case 2: return look_with(x, n, guess->codes, 2);
    case 3: return look_with(x, n, guess->codes, 3);
    default: return look_with(x, n, guess->codes, MAX_AT_ONCE);
    }
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

/* The same of the finite elements, in FP64. Returns the largest of them, and counts the others. */
static uint32_t add_finite_in_fp64(Partial *p, const float *x, int32_t n, int32_t *left_out) {
    double sum = 0, abs_sum = 0, square_sum = 0;
    int32_t nans = 0, infs = 0, largest = 0;
    for (int32_t i = 0; i < n; i++) {
        const int32_t c = (int32_t)code_at(x, i), finite = c < (int32_t)INF_CODE;
        const double v = finite ? x[i] : 0.0f;
        nans += c > (int32_t)INF_CODE;
        infs += c == (int32_t)INF_CODE;
        largest = finite && c > largest ? c : largest;
        sum += v;
        abs_sum += fabs(v);
        square_sum += v * v;
    }
    p->sum[0] += sum;
    p->abs_sum[0] += abs_sum;
    p->square_sum[0] += square_sum;
    p->nans += nans;
    p->infs += infs;
    *left_out = nans + infs;
    return (uint32_t)largest;
}

/* Adds to number counts how many codes are below as many cuts; number is a constant where this is
 * called. No cut is above infinity, so that what is not finite is below none. */
static ALWAYS_INLINE void count_below(int64_t *const *below, const int32_t *cuts,
                                      const int32_t number, const float *x, int32_t n) {
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

/* Returns whether the block has subnormals, and makes the guess for the next one. */
static int32_t add_block(Partial *p, const float *x, int32_t n, const Cuts *cuts, Guess *guess) {
    int32_t left_out = 0, zeros = 0;
    const Look found = look(x, n, guess);
    uint32_t largest = found.largest, smallest = found.smallest;
    /* With a maximum between 2**-40 and 2**40 no square that matters leaves the range of FP32. */
    if (largest >= 0x2b800000u && largest < 0x53800000u)
        add_sums(p, &found);
    else
        largest = add_finite_in_fp64(p, x, n, &left_out);
    if (smallest == 0) {
        uint32_t above;
        find_zeros(x, n, &zeros, &above);
        smallest = above + 1; /* beyond all codes when all elements are zero */
    }
    p->zeros += zeros;
    p->largest = largest > p->largest ? largest : p->largest;
    p->smallest = smallest < p->smallest ? smallest : p->smallest;
    int64_t *below[MAX_CUTS];
    int32_t open[MAX_CUTS], num_open = 0;
    Guess next = {0};
    for (int32_t k = 0; k < cuts->number; k++) {
        const uint32_t cut = cuts->codes[k];
        if (largest < cut) {
            p->below[k] += n - left_out;
            continue;
        }
        if (smallest >= cut) {
            p->below[k] += zeros;
            continue;
        }
        int32_t place = 0;
        while (place < guess->number && guess->places[place] != k) place++;
        if (place < guess->number) {
            p->below[k] += found.below[place];
        } else {
            below[num_open] = &p->below[k];
            open[num_open++] = (int32_t)cut;
        }
        if (next.number < MAX_AT_ONCE) {
            next.places[next.number] = k;
            next.codes[next.number++] = (int32_t)cut;
        }
    }
    count_all_below(below, open, num_open, x, n);
    *guess = next;
    return smallest < MIN_NORMAL_CODE;
}
