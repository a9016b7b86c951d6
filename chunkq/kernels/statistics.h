/* What statistics.pxi does with a run of elements. Nothing here depends on the order in which runs come. */
#ifndef CHUNKQ_STATISTICS_H
#define CHUNKQ_STATISTICS_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* ---- extremes: of `width` columns over `rows` rows; returns whether anything was not finite, upon which they are void */

/* Four rows at a time, so that what is kept of the columns is loaded and stored once for them. NaN is looked for by
   itself, since a comparison passes it over; infinities are then among the extremes. */
#define CQ_EXTREMES(NAME, REAL, MASK)                                                                                  \
    static inline int NAME(const REAL *x, ptrdiff_t rows, ptrdiff_t stride, ptrdiff_t width, REAL *lo, REAL *hi) {      \
        MASK odd = 0;                                                                                                  \
        ptrdiff_t r = 0;                                                                                               \
        for (; r + 4 <= rows; r += 4) {                                                                                \
            const REAL *p = x + r * stride, *q = p + stride, *s = q + stride, *t = s + stride;                         \
            for (ptrdiff_t j = 0; j < width; j++) {                                                                    \
                const REAL a = p[j], b = q[j], c = s[j], d = t[j];                                                     \
                const REAL ab = a < b ? a : b, cd = c < d ? c : d, least = ab < cd ? ab : cd;                          \
                const REAL AB = a > b ? a : b, CD = c > d ? c : d, most = AB > CD ? AB : CD;                           \
                lo[j] = least < lo[j] ? least : lo[j];                                                                 \
                hi[j] = most > hi[j] ? most : hi[j];                                                                   \
                odd |= isunordered(a, b) | isunordered(c, d);                                                          \
            }                                                                                                          \
        }                                                                                                              \
        for (; r < rows; r++) {                                                                                        \
            const REAL *row = x + r * stride;                                                                          \
            for (ptrdiff_t j = 0; j < width; j++) {                                                                    \
                const REAL v = row[j];                                                                                 \
                lo[j] = v < lo[j] ? v : lo[j];                                                                         \
                hi[j] = v > hi[j] ? v : hi[j];                                                                         \
                odd |= v != v;                                                                                         \
            }                                                                                                          \
        }                                                                                                              \
        if (rows)                                                                                                      \
            for (ptrdiff_t j = 0; j < width; j++) odd |= (lo[j] == -(REAL)INFINITY) | (hi[j] == (REAL)INFINITY);       \
        return odd != 0;                                                                                               \
    }
CQ_EXTREMES(cq_extremes_f32, float, int32_t)
CQ_EXTREMES(cq_extremes_f64, double, int64_t)

/* ---- histograms: which of `bins` bins from -limit to limit, as numpy.histogram has them with float64 edges */

#define CQ_RUN 256

/* In float64 throughout, which vectorises. A bin is found with the inverse of the step, at most one off, upon which the
   edges decide. A step so small that it has no inverse goes with powers of two. */
#define CQ_BINS(NAME, REAL)                                                                                            \
    static inline void NAME(const REAL *x, ptrdiff_t n, double limit, int32_t bins, int64_t *counts) {                  \
        /* above this no limit can be doubled; halves are exact there */                                              \
        const double factor = limit > 0x1p1022 ? 0.5 : 1;                                                              \
        limit *= factor;                                                                                               \
        const double step = 2 * limit / bins, up = step < 0x1p-1000 ? 0x1p100 : 1, inverse = 1 / (step * up);          \
        const double last = bins - 1, beyond = bins;                                                                   \
        int32_t at[CQ_RUN];                                                                                            \
        for (ptrdiff_t start = 0; start < n; start += CQ_RUN) {                                                        \
            const ptrdiff_t m = n - start < CQ_RUN ? n - start : CQ_RUN;                                               \
            for (ptrdiff_t i = 0; i < m; i++) {                                                                        \
                const double v = (double)x[start + i] * factor;                                                        \
                double f = (v + limit) * up * inverse;                                                                 \
                f = f > 0 ? f : 0; /* NaN too, where the limit is 0 */                                                 \
                f = f < last ? f : last;                                                                               \
                f = (double)(int32_t)f;                                                                                \
                const double left = f * step - limit, right = (f + 1) * step - limit;                                  \
                f = v < left ? f - 1 : f;                                                                              \
                f = v >= right ? f + 1 : f;                                                                            \
                f = f > 0 ? f : 0;                                                                                     \
                f = f < last ? f : last;                                                                               \
                at[i] = (int32_t)(v - v == 0 ? f : beyond); /* one place more, for what is not finite */               \
            }                                                                                                          \
            for (ptrdiff_t i = 0; i < m; i++) counts[at[i]]++;                                                         \
        }                                                                                                              \
    }
CQ_BINS(cq_bins_f32, float)
CQ_BINS(cq_bins_f64, double)

/* ---- exact sums: a number is an integer times 2**-1074, added up in 64-bit limbs that each stand for 32 bits of it */

#define CQ_LIMBS 68
#define CQ_SUMS 6 /* d, |d|, d d, a a, b b, a b */

static inline uint64_t cq_bits_of(double v) {
    uint64_t bits;
    memcpy(&bits, &v, 8);
    return bits;
}

static inline double cq_double_of(uint64_t bits) {
    double v;
    memcpy(&v, &bits, 8);
    return v;
}

/* Adds m times 2**(place - 1074), or takes it away. */
static inline void cq_put(int64_t *limbs, uint64_t m, uint64_t place, int negative) {
    const unsigned shift = place & 31;
    const uint64_t low = m << shift, high = m >> 1 >> (63 - shift);
    const int64_t sign = -(int64_t)negative;
    int64_t *at = limbs + (place >> 5);
    at[0] += ((int64_t)(low & 0xffffffff) ^ sign) - sign;
    at[1] += ((int64_t)(low >> 32) ^ sign) - sign;
    at[2] += ((int64_t)high ^ sign) - sign;
}

static inline void cq_add_one(int64_t *limbs, double v) {
    const uint64_t bits = cq_bits_of(v), exponent = bits >> 52 & 0x7ff, hidden = (uint64_t)(exponent != 0) << 52;
    cq_put(limbs, (bits & 0xfffffffffffffULL) | hidden, exponent - (exponent != 0), (int)(bits >> 63));
}

/* Adds up to CQ_RUN terms, none larger than `most`; they are lost.

   Added to 1.5 * 2**j, where 2**(j - 1) > most, a term is rounded to a multiple of 2**(j - 52): the bits of the sum less
   those of 1.5 * 2**j are that multiple, and integers may be added up in any order. What the rounding left goes the same
   way 52 places lower. What that leaves is 0 unless terms are of very different sizes, and is added one by one. */
static inline void cq_add(int64_t *limbs, double *terms, ptrdiff_t n, double most) {
    const uint64_t exponent = cq_bits_of(most) >> 52, half = 1ULL << 51;
    if (most == 0) return;
    if (exponent > 2043) { /* no room above */
        for (ptrdiff_t i = 0; i < n; i++) cq_add_one(limbs, terms[i]);
        return;
    }
    const uint64_t e = exponent > 51 ? exponent : 51; /* `small` is a normal number, then */
    const double large = cq_double_of((e + 2) << 52 | half), small = cq_double_of((e - 50) << 52 | half);
    uint64_t high = 0, low = 0, rest = 0;
    for (ptrdiff_t i = 0; i < n; i++) {
        const double first = large + terms[i], left = terms[i] - (first - large);
        const double second = small + left, forgotten = left - (second - small);
        high += cq_bits_of(first);
        low += cq_bits_of(second);
        rest |= cq_bits_of(forgotten);
        terms[i] = forgotten;
    }
    const int64_t of_high = (int64_t)(high - (uint64_t)n * cq_bits_of(large));
    const int64_t of_low = (int64_t)(low - (uint64_t)n * cq_bits_of(small));
    cq_put(limbs, of_high < 0 ? -(uint64_t)of_high : (uint64_t)of_high, e + 1, of_high < 0);
    cq_put(limbs, of_low < 0 ? -(uint64_t)of_low : (uint64_t)of_low, e - 51, of_low < 0);
    if (rest << 1) /* not 0 or -0 */
        for (ptrdiff_t i = 0; i < n; i++) cq_add_one(limbs, terms[i]);
}

/* Brings all limbs but the last, which has the sign, into 0 .. 2**32 - 1. */
static inline void cq_carry(int64_t *limbs) {
    for (int i = 0; i < CQ_LIMBS - 1; i++) {
        const int64_t low = limbs[i] & 0xffffffff;
        limbs[i + 1] += (limbs[i] - low) / 4294967296; /* exact */
        limbs[i] = low;
    }
}

/* The nearest float64 to a carried sum, of two the even one; infinite where it is too large. */
static inline double cq_rounded(const int64_t *limbs) {
    const int negative = limbs[CQ_LIMBS - 1] < 0;
    uint64_t magnitude[CQ_LIMBS], carry = (uint64_t)negative;
    int top = CQ_LIMBS - 1;
    for (int i = 0; i < CQ_LIMBS; i++) {
        const uint64_t part = (negative ? ~(uint64_t)limbs[i] : (uint64_t)limbs[i]);
        magnitude[i] = (i < CQ_LIMBS - 1 ? part & 0xffffffff : part) + carry;
        carry = i < CQ_LIMBS - 1 ? magnitude[i] >> 32 : 0;
        if (i < CQ_LIMBS - 1) magnitude[i] &= 0xffffffff;
    }
    if (magnitude[top]) return negative ? -INFINITY : INFINITY; /* 2**1070 and more */
    while (top > 2 && magnitude[top] == 0) top--;
    uint64_t m = magnitude[top] << 32 | magnitude[top - 1], next = magnitude[top - 2], rest = 0;
    int place = 32 * (top - 1) - 1074;
    for (int i = 0; i < top - 2; i++) rest |= magnitude[i];
    /* top is 2 at least: where it holds nothing, one limb less */
    if (magnitude[top] == 0) m = magnitude[1] << 32 | magnitude[0], next = 0, place = -1074;
    else
        while (!(m >> 63)) { /* so that the last bit of m is far below the one that is rounded to */
            m = m << 1 | next >> 31;
            next = next << 1 & 0xffffffff;
            place--;
        }
    const double v = ldexp((double)(m | ((next | rest) != 0)), place);
    return negative ? -v : v;
}

typedef struct {
    int64_t *limbs;     /* CQ_SUMS x CQ_LIMBS */
    double *worst;      /* the largest |d|, below 0 where there is none */
    int64_t *where;     /* its index, the first of several */
    int64_t *counts;    /* compared, not finite on either side, of these different, sums that overflow as bits */
} cq_errors;

/* The slow way, for a run in which something is not finite, or a square is not. Counts what of it there is, puts 0 for
   what cannot be added, and returns where the largest |d| is, the first of several; -1 if nothing is finite. */
static inline ptrdiff_t cq_sort_out(double (*t)[CQ_RUN], const double *a, const double *b, ptrdiff_t n, double *most,
                                    int64_t *counts) {
    ptrdiff_t found = -1;
    for (ptrdiff_t i = 0; i < n; i++) {
        const int finite = a[i] - a[i] == 0 && b[i] - b[i] == 0;
        counts[0] += finite;
        counts[1] += !finite;
        counts[2] += !finite && !(a[i] == b[i] || (a[i] != a[i] && b[i] != b[i]));
        if (finite && (found < 0 || t[1][i] > *most)) {
            *most = t[1][i];
            found = i;
        }
        for (int k = 0; k < CQ_SUMS; k++) {
            const int added = finite && t[k][i] - t[k][i] == 0;
            if (finite && !added) counts[3] |= (int64_t)1 << k;
            if (!added) t[k][i] = 0;
        }
    }
    return found;
}

#define CQ_MAGNITUDE(V) (int64_t)(cq_bits_of(V) & 0x7fffffffffffffffULL)

#define CQ_COMPARE(NAME, REAL)                                                                                         \
    static inline void NAME(const REAL *x, const REAL *y, ptrdiff_t n, int64_t index, cq_errors to) {                   \
        double t[CQ_SUMS][CQ_RUN], a[CQ_RUN], b[CQ_RUN];                                                               \
        for (ptrdiff_t start = 0; start < n; start += CQ_RUN) {                                                        \
            const ptrdiff_t m = n - start < CQ_RUN ? n - start : CQ_RUN;                                               \
            int64_t ds = 0, as = 0, bs = 0; /* the largest magnitudes as bits, which NaN has the largest of */         \
            for (ptrdiff_t i = 0; i < m; i++) {                                                                        \
                const double v = x[start + i], w = y[start + i], d = v - w;                                            \
                const int64_t vs = CQ_MAGNITUDE(v), ws = CQ_MAGNITUDE(w), d_s = CQ_MAGNITUDE(d);                       \
                ds = d_s > ds ? d_s : ds;                                                                              \
                as = vs > as ? vs : as;                                                                                \
                bs = ws > bs ? ws : bs;                                                                                \
                t[0][i] = d;                                                                                           \
                t[1][i] = fabs(d);                                                                                     \
                t[2][i] = d * d;                                                                                       \
                t[3][i] = v * v;                                                                                       \
                t[4][i] = w * w;                                                                                       \
                t[5][i] = v * w;                                                                                       \
            }                                                                                                          \
            const double D = cq_double_of((uint64_t)ds), A = cq_double_of((uint64_t)as), B = cq_double_of((uint64_t)bs);        \
            double most[CQ_SUMS] = {D, D, D * D, A * A, B * B, A * B}, worst = D;                                      \
            ptrdiff_t found = -1;                                                                                      \
            if (most[2] - most[2] == 0 && most[3] - most[3] == 0 && most[4] - most[4] == 0) {                          \
                to.counts[0] += m;                                                                                     \
                if (worst > *to.worst)                                                                                 \
                    for (found = 0; t[1][found] != worst;) found++;                                                    \
            } else {                                                                                                   \
                for (ptrdiff_t i = 0; i < m; i++) a[i] = x[start + i], b[i] = y[start + i];                            \
                found = cq_sort_out(t, a, b, m, &worst, to.counts);                                                    \
                for (int k = 0; k < CQ_SUMS; k++) most[k] = INFINITY;                                                  \
            }                                                                                                          \
            if (found >= 0 && worst > *to.worst) {                                                                     \
                *to.worst = worst;                                                                                     \
                *to.where = index + start + found;                                                                     \
            }                                                                                                          \
            for (int k = 0; k < CQ_SUMS; k++) cq_add(to.limbs + k * CQ_LIMBS, t[k], m, most[k]);                       \
        }                                                                                                              \
    }
CQ_COMPARE(cq_compare_f32, float)
CQ_COMPARE(cq_compare_f64, double)

#endif
