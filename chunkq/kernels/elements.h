/* Loads, stores and roundings that a C compiler does not vectorise by itself.
   Included by every build of _kernels.pyx; what the build's instruction set offers decides at compile time. */
#ifndef CHUNKQ_ELEMENTS_H
#define CHUNKQ_ELEMENTS_H

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__SSE2__) || defined(_M_X64)
#define CQ_SSE2 1
#include <immintrin.h>
#endif

/* Round to nearest, ties to even. Before SSE4.1 rintf is a function call and FakeQuantize ten times slower; adding and
   subtracting 2^23 (2^52) rounds the same way below that value, and everything above it is an integer already. */
#if defined(CQ_SSE2) && !defined(__SSE4_1__) && !defined(__AVX__)
static inline float cq_rint_f32(float v) {
    float a = fabsf(v);
    float r = (a + 8388608.0f) - 8388608.0f;
    return copysignf(a < 8388608.0f ? r : a, v);
}
static inline double cq_rint_f64(double v) {
    double a = fabs(v);
    double r = (a + 4503599627370496.0) - 4503599627370496.0;
    return copysign(a < 4503599627370496.0 ? r : a, v);
}
#else
static inline float cq_rint_f32(float v) { return rintf(v); }
static inline double cq_rint_f64(double v) { return rint(v); }
#endif

static inline uint32_t cq_bits(float v) {
    uint32_t u;
    memcpy(&u, &v, sizeof u);
    return u;
}

static inline float cq_float(uint32_t u) {
    float v;
    memcpy(&v, &u, sizeof v);
    return v;
}

/* One float16 to float32, exactly; every NaN becomes the canonical one. */
static inline float cq_f16_to_f32(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    uint32_t exponent = (h >> 10) & 0x1fu;
    uint32_t fraction = h & 0x3ffu;
    if (exponent == 0x1fu) return cq_float(fraction ? 0x7fc00000u : sign | 0x7f800000u);
    if (exponent) return cq_float(sign | ((exponent + 112u) << 23) | (fraction << 13));
    float v = (float)fraction * 5.9604644775390625e-8f; /* 2^-24: zero or denormal */
    return sign ? -v : v;
}

/* One float32 to float16, to nearest, ties to even; every NaN becomes 0x7e00. */
static inline uint16_t cq_f32_to_f16(float v) {
    uint32_t u = cq_bits(v);
    uint32_t sign = (u >> 16) & 0x8000u;
    u &= 0x7fffffffu;
    if (u > 0x7f800000u) return 0x7e00u;
    if (u >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* 65520 and more round to infinity */
    if (u < 0x38800000u) {
        /* below 2^-14: adding 0.5 leaves the denormal, rounded by the hardware, in the low bits */
        return (uint16_t)(sign | (cq_bits(cq_float(u) + 0.5f) - 0x3f000000u));
    }
    u += 0xc8000fffu + ((u >> 13) & 1u); /* rebias the exponent by -112, round half to even */
    return (uint16_t)(sign | (u >> 13));
}

static void cq_load_f16(const uint16_t *x, float *t, ptrdiff_t n) {
    ptrdiff_t i = 0;
#ifdef __F16C__
    for (; i + 8 <= n; i += 8) {
        __m256 v = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(x + i)));
        __m256 nan = _mm256_cmp_ps(v, v, _CMP_UNORD_Q);
        _mm256_storeu_ps(t + i, _mm256_blendv_ps(v, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)), nan));
    }
#endif
    for (; i < n; i++) t[i] = cq_f16_to_f32(x[i]);
}

/* Whether any of 16 values is NaN, by one comparison. Blending the canonical one in would cost as much as the rest. */
#ifdef __AVX2__
#define CQ_NAN_AMONG(a, b) _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_UNORD_Q))
#endif

static void cq_store_f16(const float *t, uint16_t *y, ptrdiff_t n) {
    ptrdiff_t i = 0;
#if defined(__F16C__) && defined(__AVX2__)
    for (; i + 16 <= n; i += 16) {
        __m256 a = _mm256_loadu_ps(t + i), b = _mm256_loadu_ps(t + i + 8);
        if (CQ_NAN_AMONG(a, b)) {
            for (ptrdiff_t k = i; k < i + 16; k++) y[k] = cq_f32_to_f16(t[k]);
            continue;
        }
        _mm_storeu_si128((__m128i *)(y + i), _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
        _mm_storeu_si128((__m128i *)(y + i + 8), _mm256_cvtps_ph(b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
#endif
    for (; i < n; i++) y[i] = cq_f32_to_f16(t[i]);
}

/* One float32 to bfloat16, to nearest, ties to even; every NaN becomes 0x7fc0. */
static inline uint16_t cq_f32_to_bf16(float v) {
    uint32_t u = cq_bits(v);
    uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

static void cq_load_bf16(const uint16_t *x, float *t, ptrdiff_t n) {
    for (ptrdiff_t i = 0; i < n; i++) {
        uint32_t u = (uint32_t)x[i] << 16;
        t[i] = cq_float((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : u);
    }
}

#ifdef __AVX2__
static inline __m256i cq_8_to_bf16(__m256 v) {
    __m256i u = _mm256_castps_si256(v), odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    return _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
}
#endif

static void cq_store_bf16(const float *t, uint16_t *y, ptrdiff_t n) {
    ptrdiff_t i = 0;
#ifdef __AVX2__
    for (; i + 16 <= n; i += 16) {
        __m256 a = _mm256_loadu_ps(t + i), b = _mm256_loadu_ps(t + i + 8);
        if (CQ_NAN_AMONG(a, b)) {
            for (ptrdiff_t k = i; k < i + 16; k++) y[k] = cq_f32_to_bf16(t[k]);
            continue;
        }
        __m256i packed = _mm256_packus_epi32(cq_8_to_bf16(a), cq_8_to_bf16(b));
        _mm256_storeu_si256((__m256i *)(y + i), _mm256_permute4x64_epi64(packed, 0xd8)); /* 0 2 1 3 */
    }
#endif
    for (; i < n; i++) y[i] = cq_f32_to_bf16(t[i]);
}

/* A float of 8 bits or fewer, one in a byte: sign, exponent, mantissa from the top, bits above the width ignored.
   Codes without sign up to `max` are finite, `inf` is infinity (-1: there is none), every other one above is NaN. A type
   whose `nan` is the code of -0 has neither -0 nor infinities. chunkq.dtypes has the numbers of each type. */
typedef struct {
    int32_t width, mantissa, bias, max, inf, nan;
} cq_minifloat;

#if defined(__F16C__) && defined(__AVX2__)
#define CQ_F16_WAY 1
/* 16 at a time by way of float16, which has the same fields in other places: moved there they are off by a power of two
   alone. NaN, infinities, and exponents that float16 has other uses for do not go this way. */
typedef struct {
    __m128i all, below, most, minus_zero, to_exponent, to_sign;
    __m256i magnitude, top;
    __m256 rebias;
} cq_by_f16;

static inline cq_by_f16 cq_by_f16_of(const cq_minifloat *f) {
    const int sign = 1 << (f->width - 1), plain = f->width - f->mantissa == 6 && f->max > 0x7b ? 0x7b : f->max;
    cq_by_f16 k;
    k.all = _mm_set1_epi8((char)(2 * sign - 1));
    k.below = _mm_set1_epi8((char)(sign - 1));
    k.most = _mm_set1_epi8((char)plain);
    k.minus_zero = _mm_set1_epi8((char)(f->nan == sign ? sign : 0)); /* 0: it has -0, and nothing is looked for */
    k.magnitude = _mm256_set1_epi16((short)(sign - 1));
    k.top = _mm256_set1_epi16((short)sign);
    k.to_exponent = _mm_cvtsi32_si128(10 - f->mantissa);
    k.to_sign = _mm_cvtsi32_si128(16 - f->width);
    k.rebias = _mm256_set1_ps(cq_float((uint32_t)(142 - f->bias) << 23));
    return k;
}

/* 16 codes as float32 in a and b, times `factor` over k->rebias; 0 where one of them does not go this way. */
static inline int cq_16_of_minifloat(__m128i codes, const cq_by_f16 *k, __m256 factor, __m256 *a, __m256 *b) {
    codes = _mm_and_si128(codes, k->all);
    __m128i zero = _mm_cmpeq_epi8(k->minus_zero, _mm_setzero_si128());
    __m128i special = _mm_andnot_si128(zero, _mm_cmpeq_epi8(codes, k->minus_zero));
    special = _mm_or_si128(special, _mm_cmpgt_epi8(_mm_and_si128(codes, k->below), k->most));
    if (_mm_movemask_epi8(special)) return 0;
    __m256i w = _mm256_cvtepu8_epi16(codes);
    w = _mm256_or_si256(_mm256_sll_epi16(_mm256_and_si256(w, k->magnitude), k->to_exponent),
                        _mm256_sll_epi16(_mm256_and_si256(w, k->top), k->to_sign));
    *a = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(w)), factor);
    *b = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(w, 1)), factor);
    return 1;
}

static inline ptrdiff_t cq_load_minifloat_f16(const uint8_t *x, float *t, ptrdiff_t n, const cq_by_f16 *k, float scale,
                                              float zero_point, int dequantize) {
    const __m256 s = _mm256_set1_ps(scale), z = _mm256_set1_ps(zero_point);
    ptrdiff_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m256 a, b;
        if (!cq_16_of_minifloat(_mm_loadu_si128((const __m128i *)(x + i)), k, k->rebias, &a, &b)) break;
        if (dequantize) {
            a = _mm256_mul_ps(_mm256_sub_ps(a, z), s);
            b = _mm256_mul_ps(_mm256_sub_ps(b, z), s);
        }
        _mm256_storeu_ps(t + i, a);
        _mm256_storeu_ps(t + i + 8, b);
    }
    return i;
}
#else
typedef struct {
    int none;
} cq_by_f16;

static inline cq_by_f16 cq_by_f16_of(const cq_minifloat *f) {
    (void)f;
    return (cq_by_f16){0};
}
#endif

static inline void cq_load_minifloat_any(const uint8_t *x, float *t, ptrdiff_t n, const cq_minifloat *f, float scale,
                                         float zero_point, int dequantize) {
    const int32_t sign = 1 << (f->width - 1), below = sign - 1, first_normal = 1 << f->mantissa;
    const int32_t to_sign = 32 - f->width, to_exponent = 23 - f->mantissa, rebias = (127 - f->bias) << 23;
    const int32_t max = f->max, inf = f->inf, no_minus_zero = f->nan == sign ? sign : -1;
    const float least = cq_float((uint32_t)(128 - f->bias - f->mantissa) << 23); /* the smallest denormal */
    for (ptrdiff_t i = 0; i < n; i++) {
        int32_t all = x[i] & (sign | below), code = all & below;
        uint32_t small = cq_bits((float)code * least);
        uint32_t u = code < first_normal ? small : (uint32_t)((code << to_exponent) + rebias);
        u = code == inf ? 0x7f800000u : u;
        u |= (uint32_t)(all & sign) << to_sign;
        int nan = ((code > max) & (code != inf)) | (all == no_minus_zero);
        float v = cq_float(nan ? 0x7fc00000u : u);
        t[i] = dequantize ? (v - zero_point) * scale : v;
    }
}

/* In float32; with `dequantize`, which should be a constant, (value - zero_point) * scale. */
static inline void cq_load_minifloat(const uint8_t *x, float *t, ptrdiff_t n, const cq_minifloat *f, const cq_by_f16 *k,
                                     float scale, float zero_point, int dequantize) {
    ptrdiff_t i = 0;
    (void)k;
#ifdef CQ_F16_WAY
    while (i + 16 <= n) {
        i += cq_load_minifloat_f16(x + i, t + i, n - i, k, scale, zero_point, dequantize);
        if (i + 16 > n) break;
        cq_load_minifloat_any(x + i, t + i, 16, f, scale, zero_point, dequantize);
        i += 16;
    }
#endif
    cq_load_minifloat_any(x + i, t + i, n - i, f, scale, zero_point, dequantize);
}

/* To nearest, ties to even; what rounds to more than the largest finite value becomes the code `over`, with its sign. */
static void cq_store_minifloat(const float *t, uint8_t *y, ptrdiff_t n, const cq_minifloat *f, int32_t over) {
    const int32_t sign = 1 << (f->width - 1), to_sign = 32 - f->width, drop = 23 - f->mantissa;
    const int32_t rebias = (127 - f->bias) << f->mantissa;
    const uint32_t half = (1u << (drop - 1)) - 1;
    const int32_t first_normal = (128 - f->bias) << 23, max = f->max, nan = f->nan;
    const int32_t no_minus_zero = nan == sign, over_is_nan = over == nan;
    /* the sum with a denormal's magnitude has that denormal, rounded by the hardware, in its low bits */
    const float magic = cq_float((uint32_t)(151 - f->bias - f->mantissa) << 23);
    const int32_t magic_bits = (int32_t)cq_bits(magic);
    for (ptrdiff_t i = 0; i < n; i++) {
        int32_t u = (int32_t)cq_bits(t[i]), a = u & 0x7fffffff;
        int32_t small = (int32_t)cq_bits(cq_float((uint32_t)a) + magic) - magic_bits;
        int32_t normal = (int32_t)(((uint32_t)a + half + ((a >> drop) & 1)) >> drop) - rebias;
        int32_t code = a < first_normal ? small : normal;
        int is_nan = (a > 0x7f800000) | ((code > max) & over_is_nan);
        code = code > max ? over : code;
        int32_t signed_code = code | (int32_t)(((uint32_t)u >> to_sign) & (uint32_t)sign);
        code = no_minus_zero & (code == 0) ? 0 : signed_code;
        y[i] = (uint8_t)(is_nan ? nan : code);
    }
}

#ifdef __AVX2__
static inline void cq_store_32(void *y, __m256i v, int stream) {
    if (stream)
        _mm256_stream_si256((__m256i *)y, v);
    else
        _mm256_storeu_si256((__m256i *)y, v);
}
#endif

#ifdef __AVX2__
/* Ask for what a loop will read in a while: the hardware's own prefetching stops at every page of 4 KiB. */
static inline void cq_ask(const void *p) { _mm_prefetch((const char *)p + 4096, _MM_HINT_T0); }
#endif

/* (value - zero_point) * scale of 8-bit integers and minifloats as 16-bit floats or float32, in one loop by way of registers.
   Returns how many were done; it stops before special codes and what is not 16 elements. CQ_FROM_UNSHIFTED is a minifloat
   without zero point, whose scale takes the power of two that its values lack: they are multiplied once, exactly as twice. */
enum { CQ_FROM_UINT8, CQ_FROM_INT8, CQ_FROM_MINIFLOAT, CQ_FROM_UNSHIFTED };
enum { CQ_TO_F16, CQ_TO_BF16, CQ_TO_F32 };

#ifdef CQ_F16_WAY
static inline ptrdiff_t cq_from_bytes(const uint8_t *x, int from, void *to, int kind, ptrdiff_t n, const cq_by_f16 *k,
                                      float scale, float zero_point, int stream) {
    uint16_t *y = (uint16_t *)to;
    float *t = (float *)to;
    const __m256 s = _mm256_set1_ps(scale), z = _mm256_set1_ps(zero_point);
    __m256 factor = s; /* of minifloats only: k is NULL for integers */
    ptrdiff_t i = 0;
    if (from == CQ_FROM_MINIFLOAT) factor = k->rebias;
    if (from == CQ_FROM_UNSHIFTED) factor = _mm256_mul_ps(s, k->rebias);
    for (; i + 16 <= n; i += 16) {
        __m128i codes = _mm_loadu_si128((const __m128i *)(x + i));
        __m256 a, b;
        if (from >= CQ_FROM_MINIFLOAT) {
            if (!cq_16_of_minifloat(codes, k, factor, &a, &b)) break;
        } else {
            __m128i high = _mm_srli_si128(codes, 8);
            cq_ask(x + i);
            a = _mm256_cvtepi32_ps(from == CQ_FROM_INT8 ? _mm256_cvtepi8_epi32(codes) : _mm256_cvtepu8_epi32(codes));
            b = _mm256_cvtepi32_ps(from == CQ_FROM_INT8 ? _mm256_cvtepi8_epi32(high) : _mm256_cvtepu8_epi32(high));
        }
        if (from != CQ_FROM_UNSHIFTED) {
            a = _mm256_mul_ps(_mm256_sub_ps(a, z), s);
            b = _mm256_mul_ps(_mm256_sub_ps(b, z), s);
        }
        if (kind == CQ_TO_F32) {
            _mm256_storeu_ps(t + i, a);
            _mm256_storeu_ps(t + i + 8, b);
        } else if (kind == CQ_TO_BF16) {
            __m256i packed = _mm256_packus_epi32(cq_8_to_bf16(a), cq_8_to_bf16(b));
            cq_store_32(y + i, _mm256_permute4x64_epi64(packed, 0xd8), stream);
        } else {
            __m256i low = _mm256_castsi128_si256(_mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
            __m128i upper = _mm256_cvtps_ph(b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
            cq_store_32(y + i, _mm256_inserti128_si256(low, upper, 1), stream);
        }
    }
    return i;
}
#endif

/* QuantizeLinear from float32 to 8-bit integers in one loop, which the division then bounds. The limits are integers, so
   that clamping to them before rounding is the same as after it; the maximum takes its second operand for NaN. Returns how
   many were done: multiples of 32. */
static ptrdiff_t cq_quantize_8(const float *x, void *to, int is_signed, ptrdiff_t n, float scale, float zero_point, int low,
                               int high, int stream) {
    ptrdiff_t i = 0;
#ifdef __AVX2__
    const __m256 s = _mm256_set1_ps(scale), least = _mm256_set1_ps((float)low - zero_point);
    const __m256 most = _mm256_set1_ps((float)high - zero_point);
    const __m256i z = _mm256_set1_epi16((short)zero_point), order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    uint8_t *y = (uint8_t *)to;
    stream = stream && ((uintptr_t)y & 31) == 0;
    for (; i + 32 <= n; i += 32) {
        __m256i q[4];
        cq_ask(x + i);
        cq_ask(x + i + 16);
        for (int k = 0; k < 4; k++) {
            __m256 v = _mm256_div_ps(_mm256_loadu_ps(x + i + 8 * k), s);
            q[k] = _mm256_cvtps_epi32(_mm256_min_ps(_mm256_max_ps(v, least), most));
        }
        __m256i a = _mm256_add_epi16(_mm256_packs_epi32(q[0], q[1]), z);
        __m256i b = _mm256_add_epi16(_mm256_packs_epi32(q[2], q[3]), z);
        __m256i packed = is_signed ? _mm256_packs_epi16(a, b) : _mm256_packus_epi16(a, b);
        cq_store_32(y + i, _mm256_permutevar8x32_epi32(packed, order), stream);
    }
#endif
    return i;
}

static ptrdiff_t cq_dequantize_bytes(const void *x, int from, void *y, int kind, ptrdiff_t n, const cq_by_f16 *k,
                                     float scale, float zero_point, int stream) {
#ifdef CQ_F16_WAY
    if (kind != CQ_TO_F32 && !(fabsf(scale) <= FLT_MAX)) return 0; /* NaN may come of it, which has its own bits there */
    if (from == CQ_FROM_MINIFLOAT && cq_bits(zero_point) == 0) {
        const float factor = fabsf(scale * _mm256_cvtss_f32(k->rebias));
        if (factor >= FLT_MIN && factor <= FLT_MAX) from = CQ_FROM_UNSHIFTED;
    }
    stream = stream && ((uintptr_t)y & 31) == 0;
#define CQ_CASE(from, kind) \
    case 4 * from + kind: \
        if (stream) return cq_from_bytes((const uint8_t *)x, from, y, kind, n, k, scale, zero_point, 1); \
        return cq_from_bytes((const uint8_t *)x, from, y, kind, n, k, scale, zero_point, 0);
    switch (4 * from + kind) { /* constants for the compiler: a loop each */
        CQ_CASE(CQ_FROM_UINT8, CQ_TO_F16)
        CQ_CASE(CQ_FROM_UINT8, CQ_TO_BF16)
        CQ_CASE(CQ_FROM_UINT8, CQ_TO_F32)
        CQ_CASE(CQ_FROM_INT8, CQ_TO_F16)
        CQ_CASE(CQ_FROM_INT8, CQ_TO_BF16)
        CQ_CASE(CQ_FROM_INT8, CQ_TO_F32)
        CQ_CASE(CQ_FROM_MINIFLOAT, CQ_TO_F16)
        CQ_CASE(CQ_FROM_MINIFLOAT, CQ_TO_BF16)
        CQ_CASE(CQ_FROM_MINIFLOAT, CQ_TO_F32)
        CQ_CASE(CQ_FROM_UNSHIFTED, CQ_TO_F16)
        CQ_CASE(CQ_FROM_UNSHIFTED, CQ_TO_BF16)
        CQ_CASE(CQ_FROM_UNSHIFTED, CQ_TO_F32)
    }
#undef CQ_CASE
#endif
    return 0;
}

/* Copy past the caches: for outputs that would only push other data out of them. cq_fence() must follow
   before another thread may read. */
static void cq_stream(void *dst, const void *src, ptrdiff_t n) {
#ifdef CQ_SSE2
    char *d = (char *)dst;
    const char *s = (const char *)src;
    ptrdiff_t head = (ptrdiff_t)((64 - ((uintptr_t)d & 63)) & 63);
    if (head > n) head = n;
    memcpy(d, s, (size_t)head);
    d += head, s += head, n -= head;
    for (; n >= 64; d += 64, s += 64, n -= 64) {
#ifdef __AVX__
        __m256i a = _mm256_loadu_si256((const __m256i *)s), b = _mm256_loadu_si256((const __m256i *)(s + 32));
        _mm256_stream_si256((__m256i *)d, a);
        _mm256_stream_si256((__m256i *)(d + 32), b);
#else
        __m128i a = _mm_loadu_si128((const __m128i *)s), b = _mm_loadu_si128((const __m128i *)(s + 16));
        __m128i e = _mm_loadu_si128((const __m128i *)(s + 32)), f = _mm_loadu_si128((const __m128i *)(s + 48));
        _mm_stream_si128((__m128i *)d, a);
        _mm_stream_si128((__m128i *)(d + 16), b);
        _mm_stream_si128((__m128i *)(d + 32), e);
        _mm_stream_si128((__m128i *)(d + 48), f);
#endif
    }
    memcpy(d, s, (size_t)n);
#else
    memcpy(dst, src, (size_t)n);
#endif
}

static inline void cq_fence(void) {
#ifdef CQ_SSE2
    _mm_sfence();
#endif
}

#endif
