/* CRC-32C (Castagnoli) by the instruction that SSE4.2 has for it, in three streams at once: one alone waits for itself. */
#ifndef CHUNKQ_CRC32C_H
#define CHUNKQ_CRC32C_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__SSE4_2__) && defined(__x86_64__)
#define CQ_CRC32C 1
#include <nmmintrin.h>

#define CQ_CRC_PIECE 4096 /* bytes of a stream before the three are joined */

/* What a remainder becomes when CQ_CRC_PIECE zero bytes follow, for each value of each of its bytes. */
static uint32_t cq_crc_after[4][256];

static void cq_prepare_crc32c(void) {
    for (int k = 0; k < 4; k++)
        for (int b = 1; b < 256; b++) {
            const int lowest = b & -b;
            if (b != lowest) { /* a sum of what its bits become */
                cq_crc_after[k][b] = cq_crc_after[k][lowest] ^ cq_crc_after[k][b ^ lowest];
                continue;
            }
            uint64_t c = (uint32_t)b << (8 * k);
            for (int i = 0; i < CQ_CRC_PIECE / 8; i++) c = _mm_crc32_u64(c, 0);
            cq_crc_after[k][b] = (uint32_t)c;
        }
}

static inline uint64_t cq_after_a_piece(uint64_t c) {
    return cq_crc_after[0][c & 255] ^ cq_crc_after[1][c >> 8 & 255] ^ cq_crc_after[2][c >> 16 & 255] ^
           cq_crc_after[3][c >> 24 & 255];
}

static inline uint64_t cq_8_bytes(const uint8_t *p) {
    uint64_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

static uint32_t cq_crc32c(const uint8_t *p, ptrdiff_t n) {
    uint64_t c = 0xffffffffu;
    for (; n >= 3 * CQ_CRC_PIECE; p += 3 * CQ_CRC_PIECE, n -= 3 * CQ_CRC_PIECE) {
        uint64_t second = 0, third = 0;
        for (int i = 0; i < CQ_CRC_PIECE; i += 8) {
            c = _mm_crc32_u64(c, cq_8_bytes(p + i));
            second = _mm_crc32_u64(second, cq_8_bytes(p + CQ_CRC_PIECE + i));
            third = _mm_crc32_u64(third, cq_8_bytes(p + 2 * CQ_CRC_PIECE + i));
        }
        c = cq_after_a_piece(cq_after_a_piece(c) ^ second) ^ third;
    }
    for (; n >= 8; p += 8, n -= 8) c = _mm_crc32_u64(c, cq_8_bytes(p));
    for (; n > 0; p++, n--) c = _mm_crc32_u8((uint32_t)c, *p);
    return ~(uint32_t)c;
}
#else
#define CQ_CRC32C 0
static void cq_prepare_crc32c(void) {}
static uint32_t cq_crc32c(const uint8_t *p, ptrdiff_t n) {
    (void)p;
    (void)n;
    return 0;
}
#endif

#endif
