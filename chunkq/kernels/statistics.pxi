# Statistics of groups of elements: extremes, histograms, exact sums of errors. Part of _kernels.pyx.
#
# A tensor comes as shape (A, B, C, D), contiguous: the groups are A x C, and the B x D elements of each lie apart. One
# item is a group and one of S sections of what it holds, so that no two threads write to one place; the results have S
# rows, which the caller merges. Merging is exact, and so no number of threads or sections changes a bit.

cdef extern from "statistics.h" nogil:
    int cq_extremes_f32(const float*, Py_ssize_t, Py_ssize_t, Py_ssize_t, float*, float*)
    int cq_extremes_f64(const double*, Py_ssize_t, Py_ssize_t, Py_ssize_t, double*, double*)
    void cq_bins_f32(const float*, Py_ssize_t, double, double, int32_t, int64_t*)
    void cq_bins_f64(const double*, Py_ssize_t, double, double, int32_t, int64_t*)
    ctypedef struct cq_errors:
        int64_t* limbs
        double* worst
        int64_t* where
        int64_t* counts
    void cq_compare_f32(const float*, const float*, Py_ssize_t, int64_t, cq_errors)
    void cq_compare_f64(const double*, const double*, Py_ssize_t, int64_t, cq_errors)
    int CQ_LIMBS, CQ_SUMS

LIMBS, SUMS = CQ_LIMBS, CQ_SUMS

cdef enum:
    LANES = 64           # columns that a long run is taken in
    WIDTH = 2048         # columns at once at most; their extremes stay in L1
    LONG = 256           # runs of this many elements are taken by themselves, shorter ones side by side


cdef struct Layout:
    Py_ssize_t a, b, c, d, sections


cdef Layout layout_of(shape, Py_ssize_t sections, Py_ssize_t elements) except *:
    cdef Layout at
    at.a, at.b, at.c, at.d = shape
    at.sections = sections
    if at.a < 0 or at.b < 0 or at.c < 0 or at.d < 0 or at.a * at.b * at.c * at.d != elements or sections < 1:
        raise ValueError(f"{elements} elements are no {shape}")
    return at


cdef inline Py_ssize_t edge_of(Py_ssize_t n, Py_ssize_t section, Py_ssize_t sections) noexcept nogil:
    return n * section // sections


cdef inline int extremes(const real* x, Py_ssize_t rows, Py_ssize_t stride, Py_ssize_t width, real* lo,
                         real* hi) noexcept nogil:
    if real is float:
        return cq_extremes_f32(x, rows, stride, width, lo, hi)
    else:
        return cq_extremes_f64(x, rows, stride, width, lo, hi)


cdef inline void one_by_one(const real* x, Py_ssize_t n, double* low, double* high, int64_t* odd) noexcept nogil:
    """Extremes of the finite ones; counts NaN, infinity and its negative."""
    cdef Py_ssize_t i
    cdef double v
    for i in range(n):
        v = x[i]
        if v - v == 0:
            low[0] = v if v < low[0] else low[0]
            high[0] = v if v > high[0] else high[0]
        else:
            odd[0 if v != v else (1 if v > 0 else 2)] += 1


cdef void long_run(const real* x, Py_ssize_t n, double* low, double* high, int64_t* odd) noexcept nogil:
    cdef real lo[LANES]
    cdef real hi[LANES]
    cdef Py_ssize_t j, rows = n // LANES
    for j in range(LANES):
        lo[j], hi[j] = <real>INFINITY, <real>-INFINITY
    if extremes(x, rows, LANES, LANES, lo, hi) or extremes(x + rows * LANES, 1, 0, n - rows * LANES, lo, hi):
        one_by_one(x, n, low, high, odd)
        return
    for j in range(LANES):
        low[0] = lo[j] if lo[j] < low[0] else low[0]
        high[0] = hi[j] if hi[j] > high[0] else high[0]


cdef void columns(const real* x, Py_ssize_t rows, Py_ssize_t stride, Py_ssize_t width, Py_ssize_t d, double* lows,
                  double* highs, int64_t* odd) noexcept nogil:
    """Side by side: d columns at a time belong to one group; width is at most WIDTH, and a multiple of d."""
    cdef real lo[WIDTH]
    cdef real hi[WIDTH]
    cdef Py_ssize_t j, r, g, times = 1
    # few columns that follow each other are taken several rows at a time
    if stride == width and width < LONG:
        times = max(1, min(rows, LONG // width))
    for j in range(width * times):
        lo[j], hi[j] = <real>INFINITY, <real>-INFINITY
    if (extremes(x, rows // times, stride * times, width * times, lo, hi)
            or extremes(x + rows // times * times * stride, rows % times, stride, width, lo, hi)):
        for r in range(rows):
            for g in range(width // d):
                one_by_one(x + r * stride + g * d, d, lows + g, highs + g, odd + 3 * g)
        return
    for j in range(width * times):
        g = j % width // d
        lows[g] = lo[j] if lo[j] < lows[g] else lows[g]
        highs[g] = hi[j] if hi[j] > highs[g] else highs[g]


cdef void extremes_of(const real* x, Layout at, double* lows, double* highs, int64_t* odd,
                      int n_threads) noexcept nogil:
    cdef Py_ssize_t item, g, s, b, first, last, tile, tiles, wide, place, groups = at.a * at.c
    if at.d >= LONG:
        for item in prange(groups * at.sections, schedule="static", num_threads=n_threads):
            g, s = item // at.sections, item % at.sections
            first, last = edge_of(at.d, s, at.sections), edge_of(at.d, s + 1, at.sections)
            place = s * groups + g
            for b in range(at.b):
                long_run(x + ((g // at.c * at.b + b) * at.c + g % at.c) * at.d + first, last - first, lows + place,
                         highs + place, odd + 3 * place)
        return
    wide = WIDTH // at.d                     # groups of a tile
    tiles = (at.c + wide - 1) // wide
    for item in prange(at.a * tiles * at.sections, schedule="static", num_threads=n_threads):
        s, tile = item % at.sections, item // at.sections % tiles
        g = item // at.sections // tiles     # of at.a
        first, last = edge_of(at.b, s, at.sections), edge_of(at.b, s + 1, at.sections)
        place = s * groups + g * at.c + tile * wide
        columns(x + ((g * at.b + first) * at.c + tile * wide) * at.d, last - first, at.c * at.d,
                min(wide, at.c - tile * wide) * at.d, at.d, lows + place, highs + place, odd + 3 * place)


def scan(const real[::1] x, shape, double[:, ::1] lows, double[:, ::1] highs, int64_t[:, :, ::1] odd, int n_threads):
    """Lowest and highest finite value of each group, and how many are NaN, infinite, negative infinite."""
    cdef Layout at = layout_of(shape, lows.shape[0], x.shape[0])
    cdef Py_ssize_t groups = at.a * at.c
    if not (lows.shape[1] == highs.shape[1] == odd.shape[1] == groups and odd.shape[2] == 3
            and highs.shape[0] == odd.shape[0] == at.sections and n_threads > 0):
        raise ValueError("lows, highs and odd do not belong together")
    if x.shape[0] == 0:
        return
    with nogil:
        extremes_of(&x[0], at, &lows[0, 0], &highs[0, 0], &odd[0, 0, 0], n_threads)


def count_bins(const real[::1] x, shape, const double[::1] limits, double factor, int64_t[:, :, ::1] counts,
               int n_threads):
    """Histograms of each group from -limit to limit, of x times a factor; the last place counts what is not finite."""
    cdef Layout at = layout_of(shape, counts.shape[0], x.shape[0])
    cdef Py_ssize_t item, g, s, b, first, last, groups = at.a * at.c
    cdef int32_t bins = <int32_t>(counts.shape[2] - 1)
    cdef const real* run
    if limits.shape[0] != groups or counts.shape[1] != groups or not 0 < bins <= 1 << 24 or n_threads < 1:
        raise ValueError("limits and counts do not belong together")
    if x.shape[0] == 0:
        return
    with nogil:
        for item in prange(groups * at.sections, schedule="static", num_threads=n_threads):
            g, s = item // at.sections, item % at.sections
            first, last = edge_of(at.d, s, at.sections), edge_of(at.d, s + 1, at.sections)
            for b in range(at.b):
                run = &x[0] + ((g // at.c * at.b + b) * at.c + g % at.c) * at.d + first
                if real is float:
                    cq_bins_f32(run, last - first, factor, limits[g], bins, &counts[s, g, 0])
                else:
                    cq_bins_f64(run, last - first, factor, limits[g], bins, &counts[s, g, 0])


def sum_errors(const real[::1] x, const real[::1] y, shape, int64_t[:, :, :, ::1] limbs, double[:, ::1] worst,
               int64_t[:, ::1] where, int64_t[:, :, ::1] counts, int n_threads):
    """Exact sums of each group over x - y, |x - y|, its square, x x, y y, x y; the largest error and where it is.

    At most 2**31 elements of a group may be added before the limbs are carried (chunkq.exact).
    """
    cdef Layout at = layout_of(shape, limbs.shape[0], x.shape[0])
    cdef Py_ssize_t item, g, s, b, first, last, start, groups = at.a * at.c
    if (y.shape[0] != x.shape[0] or limbs.shape[2] != CQ_SUMS or limbs.shape[3] != CQ_LIMBS or counts.shape[2] != 4
            or not limbs.shape[1] == worst.shape[1] == where.shape[1] == counts.shape[1] == groups
            or not worst.shape[0] == where.shape[0] == counts.shape[0] == at.sections or n_threads < 1):
        raise ValueError("x, y and the results do not belong together")
    if x.shape[0] == 0:
        return
    with nogil:
        for item in prange(groups * at.sections, schedule="static", num_threads=n_threads):
            g, s = item // at.sections, item % at.sections
            first, last = edge_of(at.d, s, at.sections), edge_of(at.d, s + 1, at.sections)
            for b in range(at.b):
                start = ((g // at.c * at.b + b) * at.c + g % at.c) * at.d + first
                sum_run(&x[0], &y[0], start, last - first, &limbs[s, g, 0, 0], &worst[s, g], &where[s, g],
                        &counts[s, g, 0])


cdef void sum_run(const real* x, const real* y, Py_ssize_t start, Py_ssize_t n, int64_t* limbs, double* worst,
                  int64_t* where, int64_t* counts) noexcept nogil:
    cdef cq_errors to
    to.limbs, to.worst, to.where, to.counts = limbs, worst, where, counts
    if real is float:
        cq_compare_f32(x + start, y + start, n, start, to)
    else:
        cq_compare_f64(x + start, y + start, n, start, to)
