# Statistics of groups of elements: extremes, histograms, exact sums of errors. Part of _kernels.pyx.
#
# A tensor comes as shape (A, B, C, D), contiguous: the groups are A x C, and the B x D elements of each lie apart. One
# item is a group and one of S sections of what it holds, so that no two threads write to one place; the results have S
# rows, which the caller merges. Merging is exact, and so no number of threads or sections changes a bit.

cdef extern from "statistics.h" nogil:
    int cq_extremes_f32(const float*, Py_ssize_t, Py_ssize_t, Py_ssize_t, float*, float*)
    int cq_extremes_f64(const double*, Py_ssize_t, Py_ssize_t, Py_ssize_t, double*, double*)
    void cq_bins_f32(const float*, Py_ssize_t, double, int32_t, int64_t*)
    void cq_bins_f64(const double*, Py_ssize_t, double, int32_t, int64_t*)
    ctypedef struct cq_errors:
        int64_t* limbs
        double* worst
        int64_t* where
        int64_t* counts
    void cq_compare_f32(const float*, const float*, Py_ssize_t, int64_t, cq_errors)
    void cq_compare_f64(const double*, const double*, Py_ssize_t, int64_t, cq_errors)
    void cq_carry(int64_t*)
    double cq_rounded(const int64_t*)
    int CQ_LIMBS, CQ_SUMS

LIMBS, SUMS = CQ_LIMBS, CQ_SUMS

cdef enum:
    LANES = 64           # columns that a long run is taken in
    WIDTH = 2048         # columns at once at most; their extremes stay in L1
    LONG = 256           # runs of this many elements are taken by themselves, shorter ones side by side
    SHORT = 16           # runs shorter than this are moved together first, where a group is wanted by itself
    SIDE = 32            # columns that are moved together at once
    DEEP = 256           # rows


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


cdef inline int share_of(Py_ssize_t items, int n_threads) noexcept nogil:
    """Items that a thread takes at once: few enough that nobody waits long for the last, many where they are short."""
    return <int>max(1, min(items // (8 * n_threads), 1 << 20))


cdef inline bint is_short(Layout at) noexcept nogil:
    return at.d < SHORT and at.b > 1 and at.c > 1


cdef inline void together(const real* x, Py_ssize_t rows, Py_ssize_t stride, Py_ssize_t groups, Py_ssize_t d,
                          real* to) noexcept nogil:
    """Rows of some groups, d elements each, so that the elements of each group follow each other."""
    cdef Py_ssize_t r, g, k
    if d == 1:
        for r in range(rows):
            for g in range(groups):
                to[g * rows + r] = x[r * stride + g]
        return
    for r in range(rows):
        for g in range(groups):
            for k in range(d):
                to[(g * rows + r) * d + k] = x[r * stride + g * d + k]


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
    cdef Py_ssize_t item, items, g, s, b, first, last, tile, tiles, wide, place, groups = at.a * at.c
    if at.d >= LONG:
        items = groups * at.sections
        for item in prange(items, schedule="dynamic", chunksize=share_of(items, n_threads), num_threads=n_threads):
            g, s = item // at.sections, item % at.sections
            first, last = edge_of(at.d, s, at.sections), edge_of(at.d, s + 1, at.sections)
            place = s * groups + g
            for b in range(at.b):
                long_run(x + ((g // at.c * at.b + b) * at.c + g % at.c) * at.d + first, last - first, lows + place,
                         highs + place, odd + 3 * place)
        return
    wide = WIDTH // at.d                     # groups of a tile
    tiles = (at.c + wide - 1) // wide
    items = at.a * tiles * at.sections
    for item in prange(items, schedule="dynamic", chunksize=share_of(items, n_threads), num_threads=n_threads):
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


cdef void bins_of_tile(const real* x, Layout at, Py_ssize_t tile, Py_ssize_t s, const double* limits,
                       int32_t bins, int64_t* counts) noexcept nogil:
    """Of the groups of a tile whose runs are short."""
    cdef real run[SIDE * DEEP]
    cdef Py_ssize_t wide = SIDE // at.d, tiles = (at.c + wide - 1) // wide
    cdef Py_ssize_t a = tile // tiles, c = tile % tiles * wide, last = edge_of(at.b, s + 1, at.sections)
    cdef Py_ssize_t g, rows, b = edge_of(at.b, s, at.sections), groups = min(wide, at.c - c), first = a * at.c + c
    while b < last:
        rows = min(<Py_ssize_t>DEEP, last - b)
        together(x + ((a * at.b + b) * at.c + c) * at.d, rows, at.c * at.d, groups, at.d, run)
        for g in range(groups):
            bins_of_run(run + g * rows * at.d, rows * at.d, limits[first + g], bins,
                        counts + (first + g) * (bins + 1))
        b += rows


cdef inline void bins_of_run(const real* x, Py_ssize_t n, double limit, int32_t bins,
                             int64_t* counts) noexcept nogil:
    if real is float:
        cq_bins_f32(x, n, limit, bins, counts)
    else:
        cq_bins_f64(x, n, limit, bins, counts)


cdef void bins_of(const real* x, Layout at, const double* limits, int32_t bins, int64_t* counts,
                  int n_threads) noexcept nogil:
    cdef Py_ssize_t item, g, s, b, first, last, items, groups = at.a * at.c, places = bins + 1
    if is_short(at):
        items = at.a * ((at.c - 1) // (SIDE // at.d) + 1) * at.sections
        for item in prange(items, schedule="dynamic", chunksize=share_of(items, n_threads), num_threads=n_threads):
            s = item % at.sections
            bins_of_tile(x, at, item // at.sections, s, limits, bins, counts + s * groups * places)
        return
    items = groups * at.sections
    for item in prange(items, schedule="dynamic", chunksize=share_of(items, n_threads), num_threads=n_threads):
        g, s = item // at.sections, item % at.sections
        first, last = edge_of(at.d, s, at.sections), edge_of(at.d, s + 1, at.sections)
        for b in range(at.b):
            bins_of_run(x + ((g // at.c * at.b + b) * at.c + g % at.c) * at.d + first, last - first, limits[g],
                        bins, counts + (s * groups + g) * places)


def count_bins(const real[::1] x, shape, const double[::1] limits, int64_t[:, :, ::1] counts,
               int n_threads):
    """Histograms of each group from -limit to limit; the last place counts what is not finite."""
    cdef Layout at = layout_of(shape, counts.shape[0], x.shape[0])
    cdef Py_ssize_t groups = at.a * at.c
    cdef int32_t bins = <int32_t>(counts.shape[2] - 1)
    if limits.shape[0] != groups or counts.shape[1] != groups or not 0 < bins <= 1 << 24 or n_threads < 1:
        raise ValueError("limits and counts do not belong together")
    if x.shape[0] == 0:
        return
    with nogil:
        bins_of(&x[0], at, &limits[0], bins, &counts[0, 0, 0], n_threads)


cdef inline void sums_of_run(const real* x, const real* y, Py_ssize_t n, Py_ssize_t index,
                             cq_errors to) noexcept nogil:
    if real is float:
        cq_compare_f32(x, y, n, index, to)
    else:
        cq_compare_f64(x, y, n, index, to)


cdef inline cq_errors errors_at(cq_errors to, Py_ssize_t place) noexcept nogil:
    to.limbs += place * CQ_SUMS * CQ_LIMBS
    to.worst += place
    to.where += place
    to.counts += 4 * place
    return to


cdef void sums_of_tile(const real* x, const real* y, Layout at, Py_ssize_t tile, Py_ssize_t s,
                       cq_errors to) noexcept nogil:
    """Of the groups of a tile whose runs are short."""
    cdef real run[SIDE * DEEP]
    cdef real other[SIDE * DEEP]
    cdef Py_ssize_t wide = SIDE // at.d, tiles = (at.c + wide - 1) // wide
    cdef Py_ssize_t a = tile // tiles, c = tile % tiles * wide, last = edge_of(at.b, s + 1, at.sections)
    cdef Py_ssize_t g, rows, start, b = edge_of(at.b, s, at.sections), groups = min(wide, at.c - c)
    cdef int64_t found
    cdef cq_errors of_group
    while b < last:
        rows = min(<Py_ssize_t>DEEP, last - b)
        start = ((a * at.b + b) * at.c + c) * at.d
        together(x + start, rows, at.c * at.d, groups, at.d, run)
        together(y + start, rows, at.c * at.d, groups, at.d, other)
        for g in range(groups):
            of_group = errors_at(to, (s * at.a + a) * at.c + c + g)
            found = -1
            of_group.where = &found
            sums_of_run(run + g * rows * at.d, other + g * rows * at.d, rows * at.d, 0, of_group)
            if found >= 0:  # counted in the group's own elements
                to.where[(s * at.a + a) * at.c + c + g] = (start + (found // at.d * at.c + g) * at.d + found % at.d)
        b += rows


cdef void sums_of(const real* x, const real* y, Layout at, cq_errors to, int n_threads) noexcept nogil:
    cdef Py_ssize_t item, g, s, b, first, last, start, items, groups = at.a * at.c
    if is_short(at):
        items = at.a * ((at.c - 1) // (SIDE // at.d) + 1) * at.sections
        for item in prange(items, schedule="dynamic", chunksize=share_of(items, n_threads), num_threads=n_threads):
            sums_of_tile(x, y, at, item // at.sections, item % at.sections, to)
        return
    items = groups * at.sections
    for item in prange(items, schedule="dynamic", chunksize=share_of(items, n_threads), num_threads=n_threads):
        g, s = item // at.sections, item % at.sections
        first, last = edge_of(at.d, s, at.sections), edge_of(at.d, s + 1, at.sections)
        for b in range(at.b):
            start = ((g // at.c * at.b + b) * at.c + g % at.c) * at.d + first
            sums_of_run(x + start, y + start, last - first, start, errors_at(to, s * groups + g))


def sum_errors(const real[::1] x, const real[::1] y, shape, int64_t[:, :, :, ::1] limbs, double[:, ::1] worst,
               int64_t[:, ::1] where, int64_t[:, :, ::1] counts, int n_threads):
    """Exact sums of each group over x - y, |x - y|, its square, x x, y y, x y; the largest error and where it is.

    At most 2**31 elements of a group may be added before the limbs are carried (chunkq.exact).
    """
    cdef Layout at = layout_of(shape, limbs.shape[0], x.shape[0])
    cdef Py_ssize_t groups = at.a * at.c
    cdef cq_errors to
    if (y.shape[0] != x.shape[0] or limbs.shape[2] != CQ_SUMS or limbs.shape[3] != CQ_LIMBS or counts.shape[2] != 4
            or not limbs.shape[1] == worst.shape[1] == where.shape[1] == counts.shape[1] == groups
            or not worst.shape[0] == where.shape[0] == counts.shape[0] == at.sections or n_threads < 1):
        raise ValueError("x, y and the results do not belong together")
    if x.shape[0] == 0:
        return
    to.limbs, to.worst, to.where, to.counts = &limbs[0, 0, 0, 0], &worst[0, 0], &where[0, 0], &counts[0, 0, 0]
    with nogil:
        sums_of(&x[0], &y[0], at, to, n_threads)


def carry_limbs(int64_t[:, ::1] limbs):
    """Bring all limbs but the last, which has the sign, into 0 .. 2**32 - 1, in place."""
    cdef Py_ssize_t i
    if limbs.shape[1] != CQ_LIMBS:
        raise ValueError("these are no limbs")
    for i in range(limbs.shape[0]):
        cq_carry(&limbs[i, 0])


def round_limbs(const int64_t[:, ::1] limbs, double[::1] sums):
    """The float64 nearest to each sum, whose limbs are carried."""
    cdef Py_ssize_t i
    if limbs.shape[1] != CQ_LIMBS or limbs.shape[0] != sums.shape[0]:
        raise ValueError("limbs and sums do not belong together")
    for i in range(limbs.shape[0]):
        sums[i] = cq_rounded(&limbs[i, 0])
