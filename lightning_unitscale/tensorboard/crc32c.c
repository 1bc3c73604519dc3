/* CRC-32C (Castagnoli) of bytes, with the processor's own instruction where it has one. */
#include <stdint.h>
#include <string.h>
#if defined(__SSE4_2__) && defined(__x86_64__)
#include <nmmintrin.h>
#define AFTER_EIGHT(crc, bytes) ((uint32_t)_mm_crc32_u64((crc), (bytes)))
#elif defined(__ARM_FEATURE_CRC32) && defined(__aarch64__)
#include <arm_acle.h>
#define AFTER_EIGHT(crc, bytes) __crc32cd((crc), (bytes))
#endif

/* table: what one byte does to an empty register, 256 entries. */
uint32_t crc32c(const uint8_t *data, int64_t length, const uint32_t *table) {
    uint32_t crc = 0xffffffffu;
    int64_t i = 0;
#ifdef AFTER_EIGHT
    for (; i + 8 <= length; i += 8) {
        uint64_t bytes;
        memcpy(&bytes, data + i, sizeof(bytes));
        crc = AFTER_EIGHT(crc, bytes);
    }
#endif
    for (; i < length; i++) crc = table[(crc ^ data[i]) & 0xff] ^ crc >> 8;
    return ~crc;
}
