/* The sample of exponents: which elements it holds, and how often each exponent is among them. */
#define MAX_SEEN 2048            /* not less than BLOCK; count_bytes takes no more at once */
#define FEW 64                   /* so many numbers are counted one by one */
#define MOST_VALUES 128          /* beyond that a table is faster than to look for each value */
#define GROUP 4                  /* elements sampled together: row_layout.SAMPLE_GROUP */
#define GOLDEN 2654435769u       /* 2**32 over the golden ratio */

/* Of a tensor's groups, one of each of so many stretches; or all elements, when number is 0. */
typedef struct {
    int64_t groups, number, length; /* length: of a stretch, in groups */
    uint32_t more;                  /* by how much stretches are longer, in units of 2**-32 */
} Sample;

/* Exponent fields of sampled numbers, which are still to be counted. */
typedef struct {
    int64_t next; /* the first stretch whose group has not been seen */
    int32_t number;
    uint8_t fields[MAX_SEEN + sizeof(Bytes)];
} Seen;

/* How many elements of a tensor are looked at. */
static inline int64_t num_sampled(int64_t numel, int64_t sample_size) {
    return numel <= sample_size ? numel : sample_size / GROUP * GROUP;
}

static Sample sample_of(int64_t numel, int64_t sample_size) {
    Sample sample = {0};
    if (sample_size <= 0 || numel <= sample_size) return sample;
    sample.groups = numel / GROUP;
    sample.number = sample_size / GROUP;
    sample.length = sample.groups / sample.number;
    sample.more = (uint32_t)(((uint64_t)(sample.groups % sample.number) << 32) /
                             (uint64_t)sample.number);
    return sample;
}

/* Which group the sample has of the i-th stretch: as statistics._sample_index has it. */
static inline int64_t group_at(int64_t i, const Sample *sample) {
    const uint64_t n = (uint64_t)i, turn = (uint32_t)n * GOLDEN;
    return i * sample->length + (int64_t)((n * sample->more >> 32) +
                                          (turn * (uint64_t)sample->length >> 32));
}

/* The first stretch whose group is not before this one. */
static int64_t stretch_from(int64_t group, const Sample *sample) {
    int64_t i = group * sample->number / sample->groups;
    while (i > 0 && group_at(i - 1, sample) >= group) i--;
    while (i < sample->number && group_at(i, sample) < group) i++;
    return i;
}

/* Zeros and subnormals all have the exponent field 0. */
static inline void count_subnormal(Partial *p, uint32_t code) {
    /* It is its code times 2**-149, and 2**-150 is the first place. */
    if (code > 0 && code < MIN_NORMAL_CODE) p->subnormals[32 - __builtin_clz(code)]++;
}

/* Counts what was seen and not yet counted: of few different exponents in many numbers, to look for
 * one after the other is faster than a table, whose every entry waits for the one before. */
static void count_seen(Partial *p, Seen *seen) {
    uint8_t *fields = seen->fields;
    const int32_t n = seen->number;
    int32_t padded = n;
    uint8_t highest = 0;
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

/* Sees all elements of a block, of n numbers next to each other. */
static void see_all(Partial *p, Seen *seen, const float *x, int32_t n, int32_t has_subnormals) {
    if (seen->number + n > MAX_SEEN) count_seen(p, seen);
    uint8_t *fields = seen->fields + seen->number;
    for (int32_t i = 0; i < n; i++) fields[i] = (uint8_t)(code_at(x, i) >> 23);
    if (has_subnormals)
        for (int32_t i = 0; i < n; i++) count_subnormal(p, code_at(x, i));
    seen->number += n;
}

/* Moves places of numbers of a block, in elements, to where the numbers lie. */
static void move_places(int32_t *places, int32_t number, const Block *block) {
    /* By the reciprocal, rounded up, which divides exactly what is below 2**32 / row_length: rows
     * with gaps are shorter than a block. */
    const uint64_t reciprocal = (((uint64_t)1 << 32) + (uint64_t)block->row_length - 1) /
                                (uint64_t)block->row_length;
    const uint32_t before = (uint32_t)(block->row_length - block->first_row);
    for (int32_t i = 0; i < number; i++) {
        const uint64_t place = (uint32_t)places[i] + before;
        places[i] += block->gap * (int32_t)(place * reciprocal >> 32);
    }
}

/* Sees what the sample holds of a block, whose first element is of this number in the tensor, a
 * multiple of GROUP. */
static void see_block(Partial *p, Seen *seen, const Block *block, int64_t first,
                      const Sample *sample, int32_t has_subnormals) {
    int32_t places[BLOCK / GROUP];
    const float *x = block->x;
    const int64_t from = seen->next, to = stretch_from((first + block->n) / GROUP, sample);
    const int32_t number = (int32_t)(to - from);
    if (seen->number + GROUP * number > MAX_SEEN) count_seen(p, seen);
    uint8_t *fields = seen->fields + seen->number;
    seen->number += GROUP * number;
    seen->next = to;
    /* All places first: they are computed many at once, and in 32 bits, as they are in one block. */
    const uint32_t length = (uint32_t)sample->length, more = sample->more;
    const uint32_t start = length * (uint32_t)from - (uint32_t)(first / GROUP);
    for (uint32_t i = 0; i < (uint32_t)number; i++) {
        const uint32_t n = (uint32_t)from + i, turn = n * GOLDEN;
        places[i] = GROUP * (int32_t)(start + length * i + (uint32_t)((uint64_t)n * more >> 32) +
                                      (uint32_t)((uint64_t)turn * length >> 32));
    }
    if (block->first_row < block->n) move_places(places, number, block);
#pragma GCC unroll 8
    for (int32_t i = 0; i < number; i++) copy_fields(fields + GROUP * i, x + places[i]);
    if (!has_subnormals) return;
    for (int32_t i = 0; i < number; i++)
        for (int32_t k = 0; k < GROUP; k++) count_subnormal(p, code_at(x, places[i] + k));
}

/* Nothing is seen yet of a chunk that begins at first. */
static void begin_at(Seen *seen, int64_t first, const Sample *sample) {
    seen->next = sample->number > 0 ? stretch_from(first / GROUP, sample) : 0;
    seen->number = 0;
}
