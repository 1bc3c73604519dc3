/* The sample of exponents: which elements it holds, and how often each exponent is among them. */
#define MAX_SEEN 2048            /* not less than BLOCK; count_bytes takes no more at once */
#define FEW 64                   /* so many numbers are counted one by one */
#define MOST_VALUES 128          /* beyond that a table is faster than to look for each value */

/* One element of each of so many strides. */
typedef struct {
    int64_t stride, number;
} Sample;

/* Upper halves of sampled numbers, of which the exponents are still to be counted. */
typedef struct {
    int64_t next;
    int32_t number;
    uint16_t halves[MAX_SEEN];
} Seen;

static inline int64_t smaller_of(int64_t a, int64_t b) { return a < b ? a : b; }

#define GOLDEN 2654435769u /* 2**32 over the golden ratio */

/* Which element of its stride the i-th of the sample is: as statistics._sample_index has it. */
static inline int64_t within_stride(int64_t i, int64_t stride) {
    return (int64_t)((uint64_t)((uint32_t)i * GOLDEN) * (uint64_t)stride >> 32);
}

/* Zeros and subnormals all have the exponent field 0. */
static inline void count_subnormal(Partial *p, uint32_t code) {
    /* It is its code times 2**-149, and 2**-150 is the first place. */
    if (code > 0 && code < MIN_NORMAL_CODE) p->subnormals[32 - __builtin_clz(code)]++;
}

/* Counts what was seen and not yet counted: of few different exponents in many numbers, to look for
 * one after the other is faster than a table, whose every entry waits for the one before. */
static void count_seen(Partial *p, Seen *seen) {
    uint8_t fields[MAX_SEEN + sizeof(Bytes)];
    const int32_t n = seen->number;
    int32_t padded = n, highest = 0;
    for (int32_t i = 0; i < n; i++) fields[i] = (uint8_t)(seen->halves[i] >> 7);
    while (padded % (int32_t)sizeof(Bytes)) fields[padded++] = 0;
    for (int32_t i = 0; i < n; i++) highest = fields[i] > highest ? fields[i] : highest;
    int32_t left = padded - count_bytes(fields, padded, 0), value = highest;
    for (; left > FEW && value > highest - MOST_VALUES; value--) {
        const int32_t found = count_bytes(fields, padded, (uint8_t)value);
        p->counts[value] += (uint32_t)found;
        left -= found;
    }
    /* Where numbers may have many exponents, and where few are left of those with a rare one. */
    if (left > FEW)
        for (int32_t i = 0; i < n; i++) p->counts[fields[i]] += fields[i] <= value;
    else if (left > 0)
        count_few(p->counts, fields, padded, (uint8_t)value);
    seen->number = 0;
}

/* Sees what the sample holds of a tensor's elements from first to end, which begin at x. Of each
 * stride it holds one element; next is the first stride whose element has not been seen. */
static void see_block(Partial *p, Seen *seen, const float *x, int64_t first, int64_t end,
                      const Sample *sample, int32_t has_subnormals) {
    const int64_t stride = sample->stride, from = seen->next;
    int64_t to = smaller_of(end / stride, sample->number);
    if (to < from) to = from;
    /* Of the stride that goes on after the block, the element may be in it. */
    to += to < sample->number && to * stride + within_stride(to, stride) < end;
    const int32_t number = (int32_t)(to - from);
    if (seen->number + number > MAX_SEEN) count_seen(p, seen);
    uint16_t *halves = seen->halves + seen->number;
    seen->number += number;
    seen->next = to;
    if (stride == 1) {
        for (int32_t i = 0; i < number; i++) halves[i] = (uint16_t)(code_at(x, i) >> 16);
    } else if (stride <= BLOCK) {
        /* All places first: they are computed many at once. */
        int32_t places[BLOCK / 2 + 1];
        const uint32_t turn = (uint32_t)from * GOLDEN, step = (uint32_t)stride;
        const uint32_t start = (uint32_t)(from * stride - first); /* may be before the block */
        for (int32_t i = 0; i < number; i++) {
            const uint64_t within = (uint64_t)(turn + (uint32_t)i * GOLDEN) * step >> 32;
            places[i] = (int32_t)(start + (uint32_t)i * step + (uint32_t)within);
        }
#pragma GCC unroll 8
        for (int32_t i = 0; i < number; i++) halves[i] = upper_half_at(x, places[i]);
    } else {
        for (int64_t i = from; i < to; i++)
            *halves++ = upper_half_at(x, i * stride + within_stride(i, stride) - first);
    }
    if (!has_subnormals) return;
    for (int64_t i = from; i < to; i++)
        count_subnormal(p, code_at(x, i * stride + within_stride(i, stride) - first));
}

/* Nothing is seen yet of a chunk that begins at first. */
static void begin_at(Seen *seen, int64_t first, const Sample *sample) {
    const int64_t i = first / sample->stride;
    seen->next = i + (i * sample->stride + within_stride(i, sample->stride) < first);
    seen->number = 0;
}
