/* Sums, extremes and threshold counts of one block of numbers.
 *
 * A block is up to BLOCK numbers next to each other, or in short rows that are equally far apart.
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

#define MAX_CUTS 48              /* a multiple of all numbers of lanes */
#define MAX_AT_ONCE 6            /* cuts that one loop counts, MAX_WITH_SUMS among them */
#define NUM_SUBNORMAL 24         /* places of subnormals, 2**-150 ... 2**-127 */
#define MIN_NORMAL_CODE 0x00800000u
#define INF_CODE 0x7f800000u
#define ALWAYS_INLINE inline __attribute__((always_inline))

/* Thresholds, each once; behind them are zeros, which nothing is below. */
typedef struct {
    int32_t codes[MAX_CUTS];
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

/* How many elements of a chunk are below each cut so far. */
typedef struct {
    int32_t number_of[MAX_CUTS];
    int32_t expected[MAX_CUTS]; /* -1 for cuts that the next block may lie on both sides of */
    int32_t number, places[MAX_AT_ONCE]; /* of these cuts */
} Below;

typedef struct {
    Floats sum, abs_sum, square_sum;
    Codes largest, smallest;
} Lanes;

/* Of a block. */
typedef struct {
    int32_t largest, smallest;
} Extremes;

/* Where the numbers of a block lie: number i at x[i] while i is below first_row, and from there on
 * `gap` places further for every row of row_length numbers, a multiple of STEP. What lies `ahead` of
 * a number is needed by the next block: processors foresee reads that go on, not ones that jump. */
typedef struct {
    const float *x;
    int32_t n, first_row, row_length, gap;
    int64_t ahead;
} Block;

static inline int64_t smaller_of(int64_t a, int64_t b) { return a < b ? a : b; }

/* The numbers of a block next to each other: where they lie, or in the buffer. */
static const float *gathered(const Block *block, float *buffer) {
    if (block->first_row == block->n) return block->x;
    const float *x = block->x;
    for (int32_t i = 0, end = block->first_row; i < block->n; x += block->gap) {
        memcpy(buffer + i, x + i, (size_t)(end - i) * sizeof(float));
        i = end;
        end = (int32_t)smaller_of(end + block->row_length, block->n);
    }
    return buffer;
}

static ALWAYS_INLINE Codes add_lanes(Lanes *all, const float *x) {
    Floats value;
    memcpy(&value, x, sizeof(value));
    const Codes code = magnitudes(x);
    all->largest = larger(code, all->largest);
    all->smallest = smaller(code, all->smallest);
    all->sum += value;
    all->abs_sum += (Floats)code;
    all->square_sum += value * value;
    return code;
}

/* With a maximum between 2**-40 and 2**40 no square that matters leaves the range of FP32. */
static inline int32_t fits_fp32(int32_t largest) {
    return largest >= 0x2b800000 && largest < 0x53800000;
}

/* Counts what is below the expected cuts, and adds the sums if FP32 was good enough for them.
 * number is a constant where this is called, so that the counts stay in registers. */
static ALWAYS_INLINE Extremes look_with(Partial *p, Below *below, const Block *block,
                                        const Cuts *cuts, const int32_t number) {
    Lanes a = {.smallest = (Codes){0} + INT32_MAX}, b = a;
    Found less[MAX_AT_ONCE];
    int32_t codes[MAX_AT_ONCE], i = 0, end = block->first_row;
    const int32_t n = block->n;
    const float *x = block->x;
    for (int32_t k = 0; k < number; k++) {
        begin(&less[k]);
        codes[k] = cuts->codes[below->places[k]];
    }
    for (;; end += block->row_length, x += block->gap) {
        const int32_t stop = end < n ? end : n;
        if (block->ahead > 0)
            for (int32_t k = i; k < stop; k += LANES) __builtin_prefetch(x + k + block->ahead);
        for (; i + STEP <= stop; i += STEP) {
            const Codes first = add_lanes(&a, x + i), second = add_lanes(&b, x + i + LANES);
            for (int32_t k = 0; k < number; k++) {
                find_below(&less[k], i, first, codes[k]);
                find_below(&less[k], i + LANES, second, codes[k]);
            }
        }
        if (stop == n) break;
    }
    for (int32_t k = 0; k < number; k++)
        below->number_of[below->places[k]] += number_found(&less[k], i);
    Extremes found = {largest_of(larger(a.largest, b.largest)),
                      smallest_of(smaller(a.smallest, b.smallest))};
    double sum = 0, abs_sum = 0, square_sum = 0; /* of what fills no lanes */
    for (; i < n; i++) {
        const int32_t c = (int32_t)code_at(x, i);
        found.largest = c > found.largest ? c : found.largest;
        found.smallest = c < found.smallest ? c : found.smallest;
        sum += x[i];
        abs_sum += fabsf(x[i]);
        square_sum += (double)x[i] * x[i];
        for (int32_t k = 0; k < number; k++) below->number_of[below->places[k]] += c < codes[k];
    }
    if (fits_fp32(found.largest)) {
        add_to_doubles(p->sum, a.sum + b.sum);
        add_to_doubles(p->abs_sum, a.abs_sum + b.abs_sum);
        add_to_doubles(p->square_sum, a.square_sum + b.square_sum);
        p->sum[0] += sum;
        p->abs_sum[0] += abs_sum;
        p->square_sum[0] += square_sum;
    }
    return found;
}

static Extremes look(Partial *p, Below *below, const Block *block, const Cuts *cuts) {
    switch (below->number) {
    case 0: return look_with(p, below, block, cuts, 0);
    case 1: return look_with(p, below, block, cuts, 1);
    case 2: return look_with(p, below, block, cuts, 2);
    case 3: return look_with(p, below, block, cuts, 3);
    case 4: return look_with(p, below, block, cuts, 4);
    case 5: return look_with(p, below, block, cuts, 5);
    default: return look_with(p, below, block, cuts, MAX_AT_ONCE);
    }
}

/* The same of the finite elements, in FP64. Returns the largest of them, and counts the others. */
static int32_t add_finite_in_fp64(Partial *p, const float *x, int32_t n, int32_t *left_out) {
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
    return largest;
}

/* Counts how many codes are below cuts; number is a constant where this is called. No cut is above
 * infinity, so that what is not finite is below none. */
static ALWAYS_INLINE void count_below(Below *below, const int32_t *places, const int32_t number,
                                      const float *x, int32_t n, const Cuts *cuts) {
    Found less[MAX_AT_ONCE];
    int32_t codes[MAX_AT_ONCE], i = 0;
    for (int32_t k = 0; k < number; k++) {
        begin(&less[k]);
        codes[k] = cuts->codes[places[k]];
    }
    for (; i + LANES <= n; i += LANES) {
        const Codes code = magnitudes(x + i);
        for (int32_t k = 0; k < number; k++) find_below(&less[k], i, code, codes[k]);
    }
    for (int32_t k = 0; k < number; k++) {
        below->number_of[places[k]] += number_found(&less[k], i);
        for (int32_t j = i; j < n; j++)
            below->number_of[places[k]] += (int32_t)code_at(x, j) < codes[k];
    }
}

static void count_all_below(Below *below, const int32_t *places, int32_t number, const float *x,
                            int32_t n, const Cuts *cuts) {
    for (; number >= 4; number -= 4, places += 4) count_below(below, places, 4, x, n, cuts);
    if (number == 3) count_below(below, places, 3, x, n, cuts);
    if (number == 2) count_below(below, places, 2, x, n, cuts);
    if (number == 1) count_below(below, places, 1, x, n, cuts);
}

/* How many of n numbers are zero, and the smallest code above zero, or one beyond all numbers. */
static void find_zeros(const float *x, int32_t n, int32_t *zeros, int32_t *above) {
    /* Codes minus one, without the sign, wrap zeros around to the largest code. */
    Codes low = (Codes){0} + INT32_MAX;
    Found none;
    int32_t i = 0;
    begin(&none);
    for (; i + LANES <= n; i += LANES) {
        const Codes code = magnitudes(x + i);
        find_below(&none, i, code, 1);
        low = smaller(low, (code - 1) & (int32_t)SIGN_OFF);
    }
    *zeros = number_found(&none, i);
    int32_t least = smallest_of(low);
    for (; i < n; i++) {
        const uint32_t code = code_at(x, i);
        const int32_t wrapped = (int32_t)((code - 1) & SIGN_OFF);
        *zeros += code == 0;
        least = wrapped < least ? wrapped : least;
    }
    *above = least < INT32_MAX ? least + 1 : least;
}

/* Counts what a block has below the cuts that it lies on both sides of and that were not expected,
 * and expects for the next block those that this one lies on both sides of. */
static void count_the_rest(Below *below, const int32_t *open, const float *x, int32_t n,
                           const Cuts *cuts) {
    int32_t places[MAX_CUTS], number = 0;
    below->number = 0;
    for (int32_t k = 0; k < cuts->number; k++) {
        if (open[k] && !below->expected[k]) places[number++] = k;
        below->expected[k] = open[k] && below->number < MAX_WITH_SUMS ? -1 : 0;
        if (below->expected[k]) below->places[below->number++] = k;
    }
    count_all_below(below, places, number, x, n, cuts);
}

/* Returns whether the block has subnormals. buffer: for the numbers of a block that are not next to
 * each other, for what seldom has to be done. */
static int32_t add_block(Partial *p, Below *below, const Block *block, const Cuts *cuts,
                         float *buffer) {
    int32_t left_out = 0, zeros = 0;
    const int32_t n = block->n;
    Extremes found = look(p, below, block, cuts);
    if (!fits_fp32(found.largest))
        found.largest = add_finite_in_fp64(p, gathered(block, buffer), n, &left_out);
    if (found.smallest == 0) find_zeros(gathered(block, buffer), n, &zeros, &found.smallest);
    p->zeros += zeros;
    p->largest = (uint32_t)found.largest > p->largest ? (uint32_t)found.largest : p->largest;
    p->smallest = (uint32_t)found.smallest < p->smallest ? (uint32_t)found.smallest : p->smallest;
    int32_t open[MAX_CUTS]; /* -1 for cuts that the block lies on both sides of */
    Codes changed = {0};
    for (int32_t k = 0; k < cuts->number; k += LANES) {
        Codes cut, expected, number;
        memcpy(&cut, cuts->codes + k, sizeof(cut));
        memcpy(&expected, below->expected + k, sizeof(expected));
        memcpy(&number, below->number_of + k, sizeof(number));
        const Codes all = cut > found.largest, none = (cut <= found.smallest) & ~all;
        const Codes both = ~(all | none);
        number += ((all & (n - left_out)) | (none & zeros)) & ~expected;
        memcpy(below->number_of + k, &number, sizeof(number));
        memcpy(open + k, &both, sizeof(both));
        changed |= both ^ expected;
    }
    if (any(changed)) count_the_rest(below, open, gathered(block, buffer), n, cuts);
    return found.smallest < (int32_t)MIN_NORMAL_CODE;
}
