/* What statistics.pxi does with a run of elements. Nothing here depends on the order in which runs come. */
#ifndef CHUNKQ_STATISTICS_H
#define CHUNKQ_STATISTICS_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* ---- extremes: of `width` columns over `rows` rows; returns whether anything was not finite, upon which they are void */

#define CQ_EXTREMES(NAME, REAL)                                                                                        \
    static inline int NAME(const REAL *x, ptrdiff_t rows, ptrdiff_t stride, ptrdiff_t width, REAL *lo, REAL *hi) {      \
        REAL odd = 0;                                                                                                  \
        for (ptrdiff_t r = 0; r < rows; r++) {                                                                         \
            const REAL *row = x + r * stride;                                                                          \
            for (ptrdiff_t j = 0; j < width; j++) {                                                                    \
                const REAL v = row[j];                                                                                 \
                lo[j] = v < lo[j] ? v : lo[j];                                                                         \
                hi[j] = v > hi[j] ? v : hi[j];                                                                         \
            }                                                                                                          \
            /* a sum of v - v is 0, or NaN from the first element that is not finite on */                            \
            REAL off = 0;                                                                                              \
            for (ptrdiff_t j = 0; j < width; j++) off = row[j] - row[j] == 0 ? off : 1;                                \
            odd = off == 0 ? odd : 1;                                                                                  \
        }                                                                                                              \
        return odd != 0;                                                                                               \
    }
CQ_EXTREMES(cq_extremes_f32, float)
CQ_EXTREMES(cq_extremes_f64, double)

/* ---- histograms: which of `bins` bins from -limit to limit, as numpy.histogram has them with float64 edges */

static inline int32_t cq_bin(double v, double limit, double step, int32_t bins) {
    double f = (v + limit) / step;
    f = f > 0 ? f : 0; /* NaN too, where the limit is 0 */
    f = f > bins - 1 ? bins - 1 : f;
    int32_t i = (int32_t)f;
    /* the division may be off by one: the edges decide */
    i -= v < i * step - limit && i > 0;
    i += v >= (i + 1) * step - limit && i < bins - 1;
    return i;
}

#define CQ_BINS(NAME, REAL)                                                                                            \
    static inline void NAME(const REAL *x, ptrdiff_t n, double factor, double limit, int32_t bins, int64_t *counts) {   \
        const double step = 2 * limit / bins;                                                                          \
        int32_t at[256];                                                                                               \
        for (ptrdiff_t start = 0; start < n; start += 256) {                                                           \
            const ptrdiff_t m = n - start < 256 ? n - start : 256;                                                     \
            for (ptrdiff_t i = 0; i < m; i++) {                                                                        \
                const double v = (double)x[start + i] * factor;                                                        \
                const int32_t bin = cq_bin(v - v == 0 ? v : 0, limit, step, bins);                                     \
                at[i] = v - v == 0 ? bin : bins; /* one place more, for what is not finite */                         \
            }                                                                                                          \
            for (ptrdiff_t i = 0; i < m; i++) counts[at[i]]++;                                                         \
        }                                                                                                              \
    }
CQ_BINS(cq_bins_f32, float)
CQ_BINS(cq_bins_f64, double)

/* ---- exact sums: a number is an integer times 2**-1074, added up in 64-bit limbs that each stand for 32 bits of it */

#define CQ_LIMBS 68
#define CQ_SUMS 6 /* d, |d|, d d, a a, b b, a b */
#define CQ_TERMS 128

static inline void cq_add(int64_t *limbs, const double *terms, ptrdiff_t n) {
    for (ptrdiff_t i = 0; i < n; i++) {
        uint64_t bits;
        memcpy(&bits, terms + i, 8);
        const uint64_t exponent = bits >> 52 & 0x7ff, hidden = (uint64_t)(exponent != 0) << 52;
        const uint64_t m = (bits & 0xfffffffffffffULL) | hidden;
        const uint64_t place = exponent - (exponent != 0); /* of the lowest bit of m */
        const unsigned shift = place & 31;
        const uint64_t low = m << shift, high = m >> 1 >> (63 - shift);
        const int64_t sign = -(int64_t)(bits >> 63);
        int64_t *at = limbs + (place >> 5);
        at[0] += ((int64_t)(low & 0xffffffff) ^ sign) - sign;
        at[1] += ((int64_t)(low >> 32) ^ sign) - sign;
        at[2] += ((int64_t)high ^ sign) - sign;
    }
}

typedef struct {
    int64_t *limbs;     /* CQ_SUMS x CQ_LIMBS */
    double *worst;      /* the largest |d|, below 0 where there is none */
    int64_t *where;     /* its index, the first of several */
    int64_t *counts;    /* compared, not finite on either side, of these different, sums that overflow as bits */
} cq_errors;

#define CQ_COMPARE(NAME, REAL)                                                                                         \
    static inline void NAME(const REAL *x, const REAL *y, ptrdiff_t n, int64_t index, cq_errors to) {                   \
        double t[CQ_SUMS][CQ_TERMS];                                                                                   \
        for (ptrdiff_t start = 0; start < n; start += CQ_TERMS) {                                                      \
            const ptrdiff_t m = n - start < CQ_TERMS ? n - start : CQ_TERMS;                                           \
            int odd = 0;                                                                                               \
            for (ptrdiff_t i = 0; i < m; i++) {                                                                        \
                const double a = x[start + i], b = y[start + i], d = a - b;                                            \
                t[0][i] = d;                                                                                           \
                t[1][i] = fabs(d);                                                                                     \
                t[2][i] = d * d;                                                                                       \
                t[3][i] = a * a;                                                                                       \
                t[4][i] = b * b;                                                                                       \
                t[5][i] = a * b;                                                                                       \
                odd |= !(t[2][i] - t[2][i] == 0) | !(t[3][i] - t[3][i] == 0) | !(t[4][i] - t[4][i] == 0);              \
            }                                                                                                          \
            ptrdiff_t compared = m;                                                                                    \
            if (odd)                                                                                                   \
                for (ptrdiff_t i = 0; i < m; i++) {                                                                    \
                    const double a = x[start + i], b = y[start + i];                                                   \
                    const int finite = a - a == 0 && b - b == 0;                                                       \
                    compared -= !finite;                                                                               \
                    to.counts[1] += !finite;                                                                           \
                    to.counts[2] += !finite && !(a == b || (a != a && b != b));                                        \
                    if (!finite) t[1][i] = -1;                                                                         \
                    for (int k = 0; k < CQ_SUMS; k++) {                                                                \
                        if (finite && !(t[k][i] - t[k][i] == 0)) to.counts[3] |= (int64_t)1 << k;                      \
                        if (k != 1 && !(finite && t[k][i] - t[k][i] == 0)) t[k][i] = 0;                                \
                    }                                                                                                  \
                }                                                                                                      \
            to.counts[0] += compared;                                                                                  \
            double most = *to.worst;                                                                                   \
            for (ptrdiff_t i = 0; i < m; i++) most = t[1][i] > most ? t[1][i] : most;                                  \
            if (most > *to.worst) {                                                                                    \
                ptrdiff_t i = 0;                                                                                       \
                while (t[1][i] != most) i++;                                                                           \
                *to.worst = most;                                                                                      \
                *to.where = index + start + i;                                                                         \
            }                                                                                                          \
            if (odd)                                                                                                   \
                for (ptrdiff_t i = 0; i < m; i++)                                                                      \
                    if (t[1][i] < 0 || !(t[1][i] - t[1][i] == 0)) t[1][i] = 0;                                         \
            for (int k = 0; k < CQ_SUMS; k++) cq_add(to.limbs + k * CQ_LIMBS, t[k], m);                                \
        }                                                                                                              \
    }
CQ_COMPARE(cq_compare_f32, float)
CQ_COMPARE(cq_compare_f64, double)

#endif
