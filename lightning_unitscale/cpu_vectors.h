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

#define SIGN_OFF 0x7fffffffu

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

/* The number, less one wherever a is below b. */
static inline Codes less_where_below(Codes number, Codes a, Codes b) {
    const __mmask16 below = _mm512_cmplt_epi32_mask((__m512i)a, (__m512i)b);
    const __m512i one = _mm512_set1_epi32(1), n = (__m512i)number;
    return (Codes)_mm512_mask_sub_epi32(n, below, n, one);
}
#elif defined(__AVX2__)
static inline Codes larger(Codes a, Codes b) {
    return (Codes)_mm256_max_epi32((__m256i)a, (__m256i)b);
}

static inline Codes smaller(Codes a, Codes b) {
    return (Codes)_mm256_min_epi32((__m256i)a, (__m256i)b);
}

static inline Codes less_where_below(Codes number, Codes a, Codes b) { return number + (a < b); }
#else
/* Element by element; the language has no such operator, processors do. */
static inline Codes chosen(Codes where, Codes yes, Codes no) { return (yes & where) | (no & ~where); }
static inline Codes larger(Codes a, Codes b) { return chosen(a > b, a, b); }
static inline Codes smaller(Codes a, Codes b) { return chosen(a < b, a, b); }
static inline Codes less_where_below(Codes number, Codes a, Codes b) { return number + (a < b); }
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

static inline uint16_t upper_half_at(const float *x, int64_t place) {
    uint32_t code;
    memcpy(&code, x + place, sizeof(code));
    return (uint16_t)(code >> 16);
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
