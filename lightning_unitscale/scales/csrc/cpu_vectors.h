/* As many floats at once as one instruction takes, by their codes, in the compiler's own vectors.
 * Vectors wider than the processor's would be taken apart into single numbers.
 */
#include <stdint.h>
#include <string.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#define LANES 16
#elif defined(__AVX2__)
#include <immintrin.h>
#define LANES 8
#else
#define LANES 4
#endif

/* Cuts that are counted while sums are made: as many as there are registers for. */
#if defined(__AVX512F__)
#define MAX_WITH_SUMS 6
#else
#define MAX_WITH_SUMS 2
#endif

#define SIGN_OFF 0x7fffffffu
#define STEP (2 * LANES)         /* two sums of each kind: one addition need not wait for another */
#define BLOCK (64 * STEP)        /* 64 numbers are added up in FP32 before a sum goes on in FP64 */

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Codes __attribute__((vector_size(LANES * 4)));

/* Spelled out where the compiler would make several instructions of the general form, each of which
 * waits for the one before. */
#if defined(__AVX512F__)
static inline Codes larger(Codes a, Codes b) {
    return (Codes)_mm512_max_epi32((__m512i)a, (__m512i)b);
}

static inline Codes smaller(Codes a, Codes b) {
    return (Codes)_mm512_min_epi32((__m512i)a, (__m512i)b);
}

/* Which numbers of a block are below a cut: a bit each. A comparison makes bits, and to store them
 * is no work for the units that compare and add. */
typedef struct {
    uint16_t bits[BLOCK / LANES];
} Found;

static inline void begin(Found *found) { (void)found; }

static inline void find_below(Found *found, int32_t place, Codes a, int32_t cut) {
    const __m512i cuts = _mm512_set1_epi32(cut);
    found->bits[(uint32_t)place / LANES] = _mm512_cmplt_epi32_mask((__m512i)a, cuts);
}

/* How many there are among the first n, a multiple of LANES. */
static inline int32_t number_found(const Found *found, int32_t n) {
    int32_t number = 0, i = 0;
#if defined(__AVX512VPOPCNTDQ__)
    __m512i all = _mm512_setzero_si512();
    for (; i + 32 * LANES <= n; i += 32 * LANES) {
        const __m512i bits = _mm512_loadu_si512(found->bits + (uint32_t)i / LANES);
        all = _mm512_add_epi64(all, _mm512_popcnt_epi64(bits));
    }
    number = (int32_t)_mm512_reduce_add_epi64(all);
#endif
    for (; i + 4 * LANES <= n; i += 4 * LANES) {
        uint64_t bits;
        memcpy(&bits, found->bits + (uint32_t)i / LANES, sizeof(bits));
        /* Keeps the compiler from gathering many numbers to count their bits at once. */
        __asm__("" : "+r"(bits));
        number += __builtin_popcountll(bits);
    }
    for (; i < n; i += LANES) number += __builtin_popcount(found->bits[(uint32_t)i / LANES]);
    return number;
}

static inline int32_t largest_of(Codes a) { return _mm512_reduce_max_epi32((__m512i)a); }
static inline int32_t smallest_of(Codes a) { return _mm512_reduce_min_epi32((__m512i)a); }
static inline int32_t any(Codes a) { return _mm512_test_epi32_mask((__m512i)a, (__m512i)a) != 0; }

static inline void add_to_doubles(double *sums, Floats a) {
    const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256((__m512)a));
    const __m512d high = _mm512_cvtps_pd((__m256)_mm512_extractf64x4_pd((__m512d)a, 1));
    _mm512_storeu_pd(sums, _mm512_add_pd(_mm512_loadu_pd(sums), low));
    _mm512_storeu_pd(sums + 8, _mm512_add_pd(_mm512_loadu_pd(sums + 8), high));
}
#elif defined(__AVX2__)
static inline Codes larger(Codes a, Codes b) {
    return (Codes)_mm256_max_epi32((__m256i)a, (__m256i)b);
}

static inline Codes smaller(Codes a, Codes b) {
    return (Codes)_mm256_min_epi32((__m256i)a, (__m256i)b);
}
#else
/* Element by element; the language has no such operator, processors do. */
static inline Codes chosen(Codes where, Codes yes, Codes no) { return (yes & where) | (no & ~where); }
static inline Codes larger(Codes a, Codes b) { return chosen(a > b, a, b); }
static inline Codes smaller(Codes a, Codes b) { return chosen(a < b, a, b); }
#endif

#if !defined(__AVX512F__)
/* How many numbers are below a cut, by lane. */
typedef struct {
    Codes less; /* minus the numbers */
} Found;

static inline void begin(Found *found) { found->less = (Codes){0}; }

static inline void find_below(Found *found, int32_t place, Codes a, int32_t cut) {
    (void)place;
    found->less += a < cut;
}

static inline int32_t number_found(const Found *found, int32_t n) {
    int32_t number = 0;
    (void)n;
    for (int32_t k = 0; k < LANES; k++) number -= found->less[k];
    return number;
}

static inline int32_t largest_of(Codes a) {
    int32_t found = a[0];
    for (int32_t k = 1; k < LANES; k++) found = a[k] > found ? a[k] : found;
    return found;
}

static inline int32_t smallest_of(Codes a) {
    int32_t found = a[0];
    for (int32_t k = 1; k < LANES; k++) found = a[k] < found ? a[k] : found;
    return found;
}

static inline int32_t any(Codes a) {
    int32_t found = 0;
    for (int32_t k = 0; k < LANES; k++) found |= a[k];
    return found != 0;
}

static inline void add_to_doubles(double *sums, Floats a) {
    for (int32_t k = 0; k < LANES; k++) sums[k] += a[k];
}
#endif

/* Codes of the magnitudes of as many numbers, and of one. */
static inline Codes magnitudes(const float *x) {
    Codes code;
    memcpy(&code, x, sizeof(code));
    return code & (int32_t)SIGN_OFF;
}

static inline uint32_t code_at(const float *x, int64_t place) {
    uint32_t code;
    memcpy(&code, x + place, sizeof(code));
    return code & SIGN_OFF;
}

/* Exponent fields of four numbers. */
static inline void copy_fields(uint8_t *fields, const float *x) {
    typedef uint32_t FourCodes __attribute__((vector_size(16)));
    typedef uint8_t FourBytes __attribute__((vector_size(4)));
    FourCodes codes;
    memcpy(&codes, x, sizeof(codes));
    const FourBytes bytes = __builtin_convertvector(codes >> 23, FourBytes);
    memcpy(fields, &bytes, sizeof(bytes));
}

typedef uint8_t Bytes __attribute__((vector_size(LANES * 4)));

/* How many of n bytes, a multiple of what a vector holds and 4,000 at most, are of this value. */
#if defined(__AVX512BW__)
static inline int32_t count_bytes(const uint8_t *bytes, int32_t n, uint8_t value) {
    const __m512i wanted = _mm512_set1_epi8((char)value);
    int32_t count = 0;
    for (int32_t i = 0; i < n; i += (int32_t)sizeof(Bytes)) {
        const __m512i found = _mm512_loadu_si512(bytes + i);
        count += __builtin_popcountll(_mm512_cmpeq_epi8_mask(found, wanted));
    }
    return count;
}
#else
static inline int32_t count_bytes(const uint8_t *bytes, int32_t n, uint8_t value) {
    const Bytes wanted = (Bytes){0} + value;
    Bytes found, equal = {0};
    int32_t count = 0;
    for (int32_t i = 0; i < n; i += (int32_t)sizeof(Bytes)) {
        memcpy(&found, bytes + i, sizeof(found));
        equal -= (Bytes)(found == wanted);
    }
    for (uint32_t k = 0; k < sizeof(Bytes); k++) count += equal[k];
    return count;
}
#endif

/* Adds those of n bytes, as many as above, that are from one to this value to their counts. */
#if defined(__AVX512BW__)
static inline void count_few(uint32_t *counts, const uint8_t *bytes, int32_t n, uint8_t value) {
    const __m512i one = _mm512_set1_epi8(1), last = _mm512_set1_epi8((char)value);
    for (int32_t i = 0; i < n; i += (int32_t)sizeof(Bytes)) {
        /* Less one, since zero then is the largest. */
        const __m512i less = _mm512_sub_epi8(_mm512_loadu_si512(bytes + i), one);
        uint64_t found = _mm512_cmplt_epu8_mask(less, last);
        for (; found; found &= found - 1) counts[bytes[i + __builtin_ctzll(found)]]++;
    }
}
#else
static inline void count_few(uint32_t *counts, const uint8_t *bytes, int32_t n, uint8_t value) {
    for (int32_t i = 0; i < n; i++) counts[bytes[i]] += bytes[i] > 0 && bytes[i] <= value;
}
#endif
