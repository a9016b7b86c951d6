"""Every loop of chunkq; compiled once per instruction set (directives and flags stand in setup.py).

A tensor arrives as bytes with its axes collapsed by chunkq.run into rows. Along a row each parameter is constant,
advances by one element, or changes every `step` elements. A row is computed tile by tile: load to the arithmetic type,
formula, store. Which element types exist is the business of load() and store() alone, which formula that of constant()
and advancing().

geometry is a table of integers, one column per collapsed axis, the row last:
    row 0         the axis's size
    rows 3p+1..   for parameter p: step (0 = constant), phase of the first element in its step, stride in elements
"""

from cython.parallel cimport prange
from libc.math cimport NAN
from libc.stdint cimport int8_t, int16_t, int32_t, uint8_t, uint16_t, uintptr_t
from libc.string cimport memcpy

cdef extern from "elements.h" nogil:
    float cq_rint_f32(float)
    double cq_rint_f64(double)
    void cq_load_f16(const uint16_t*, float*, Py_ssize_t)
    void cq_store_f16(const float*, uint16_t*, Py_ssize_t)
    void cq_stream(void*, const void*, Py_ssize_t)
    void cq_fence()

cdef extern from "threads.h" nogil:
    int CQ_OPENMP
    double cq_seconds()
    int cq_pause_threads()

# The numbers of chunkq.dtypes.ELEMENT_TYPES (a test compares them).
cdef enum:
    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    INT32 = 4
    FLOAT16 = 5
    FLOAT32 = 6
    FLOAT64 = 7

cdef enum:
    DEQUANTIZE_LINEAR = 0
    FAKE_QUANTIZE = 1

cdef enum:
    TILE = 1024          # elements; input, output and four parameter tiles stay in L1
    SHORT_RUN = 32       # parameter runs below this are expanded into a tile
    ITEM = 16384         # elements one thread takes at a time
    MAX_PARAMS = 4

ELEMENT_CODES = {"uint8": UINT8, "int8": INT8, "uint16": UINT16, "int16": INT16, "int32": INT32,
                 "float16": FLOAT16, "float32": FLOAT32, "float64": FLOAT64}
OPERATOR_CODES = {"DequantizeLinear": DEQUANTIZE_LINEAR, "FakeQuantize": FAKE_QUANTIZE}
OPENMP = CQ_OPENMP

ctypedef fused real:
    float
    double

cdef struct Job:
    const char* x
    char* y
    const void* params[MAX_PARAMS]
    const Py_ssize_t* geometry
    int op, x_code, y_code, n_params, n_axes
    bint advancing, stream
    Py_ssize_t x_size, y_size
    Py_ssize_t total, row, rows              # elements, elements per row, rows (the last may be short)
    Py_ssize_t columns, row_block, row_blocks   # an item is row_block rows by columns elements


cdef Py_ssize_t element_size(int code) noexcept nogil:
    if code == UINT8 or code == INT8:
        return 1
    if code == UINT16 or code == INT16 or code == FLOAT16:
        return 2
    if code == INT32 or code == FLOAT32:
        return 4
    return 8


# ---- load and store: one branch per element type

cdef const real* load(const Job* job, Py_ssize_t at, Py_ssize_t n, real* tile) noexcept nogil:
    """x[at : at + n] in the arithmetic type: in the tile, or in place where it has that type already."""
    cdef const char* x = job.x + at * job.x_size
    cdef Py_ssize_t i
    if job.x_code == UINT8:
        for i in range(n):
            tile[i] = <real>(<const uint8_t*>x)[i]
    elif job.x_code == INT8:
        for i in range(n):
            tile[i] = <real>(<const int8_t*>x)[i]
    elif job.x_code == UINT16:
        for i in range(n):
            tile[i] = <real>(<const uint16_t*>x)[i]
    elif job.x_code == INT16:
        for i in range(n):
            tile[i] = <real>(<const int16_t*>x)[i]
    elif job.x_code == INT32:
        for i in range(n):
            tile[i] = <real>(<const int32_t*>x)[i]
    elif job.x_code == FLOAT16:
        if real is float:
            cq_load_f16(<const uint16_t*>x, tile, n)
    else:
        return <const real*>x
    return tile


cdef void store(const Job* job, Py_ssize_t at, Py_ssize_t n, const real* tile) noexcept nogil:
    """Write the tile to y[at : at + n] in y's type."""
    cdef char* y = job.y + at * job.y_size
    if job.y_code == FLOAT16:
        if real is float:
            cq_store_f16(tile, <uint16_t*>y, n)
    elif job.stream:
        cq_stream(y, tile, n * job.y_size)
    else:
        memcpy(y, tile, n * job.y_size)


# ---- the formulas

cdef inline real dequantize(real x, real scale, real zero_point) noexcept nogil:
    # ONNX DequantizeLinear-13: the difference of 8- and 16-bit integers is exact in float32, then one multiplication.
    return (x - zero_point) * scale


cdef inline real fake_quantize(real x, real il, real ih, real ol, real oh, real top) noexcept nogil:
    # OpenVINO FakeQuantize-1, left to right as written; min and max keep their first argument when the second is NaN.
    cdef real low = ih if ih < il else il
    cdef real high = ih if il < ih else il
    cdef real y = (x - il) / (ih - il) * top
    if real is float:
        y = cq_rint_f32(y)
    else:
        y = cq_rint_f64(y)
    y = y / top * (oh - ol) + ol
    y = oh if x > high else y
    y = ol if x <= low else y
    # One NaN for all: which operand's payload survives an addition is the compiler's choice.
    return y if y == y else <real>NAN


cdef void constant(const Job* job, Py_ssize_t n, const real* x, real* y, const real* v, real top) noexcept nogil:
    """The formula over n elements that share one value of every parameter."""
    cdef Py_ssize_t i
    cdef real v0 = v[0], v1 = v[1], v2, v3
    if job.op == DEQUANTIZE_LINEAR:
        for i in range(n):
            y[i] = dequantize(x[i], v0, v1)
    else:
        v2 = v[2]
        v3 = v[3]
        for i in range(n):
            y[i] = fake_quantize(x[i], v0, v1, v2, v3, top)


cdef void advancing(const Job* job, Py_ssize_t n, const real* x, real* y, const real** p, real top) noexcept nogil:
    """The formula over n elements, each with its own value of every parameter."""
    cdef Py_ssize_t i
    cdef const real* p0 = p[0]
    cdef const real* p1 = p[1]
    cdef const real* p2
    cdef const real* p3
    if job.op == DEQUANTIZE_LINEAR:
        for i in range(n):
            y[i] = dequantize(x[i], p0[i], p1[i])
    else:
        p2 = p[2]
        p3 = p[3]
        for i in range(n):
            y[i] = fake_quantize(x[i], p0[i], p1[i], p2[i], p3[i], top)


# ---- parameters along a row

cdef Py_ssize_t row_offset(const Job* job, int p, Py_ssize_t r) noexcept nogil:
    """Index of parameter p's element at the start of row r."""
    cdef const Py_ssize_t* g = job.geometry
    cdef const Py_ssize_t* q = g + (3 * p + 1) * job.n_axes
    cdef Py_ssize_t offset = 0, size, d, n = job.n_axes
    for d in range(n - 2, -1, -1):
        if d == 0:
            size = r
        else:
            size = r % g[d]
            r = r // g[d]
        if q[d]:
            offset += (q[n + d] + size) // q[d] * q[2 * n + d]
    return offset


cdef void expand(real* tile, Py_ssize_t n, const real* p, Py_ssize_t step, Py_ssize_t at) noexcept nogil:
    """tile[i] = p[(at + i) // step]"""
    cdef Py_ssize_t i = 0, k = at // step, end = step - at % step
    cdef real value
    while i < n:
        value = p[k]
        end = end if end < n else n
        while i < end:
            tile[i] = value
            i += 1
        k += 1
        end += step


cdef void run_item(const Job* job, Py_ssize_t item, real top) noexcept nogil:
    """Compute one item: a range of rows by a range of columns."""
    cdef real x_tile[TILE]
    cdef real y_tile[TILE]
    cdef real p_tile[MAX_PARAMS][TILE]
    cdef real values[MAX_PARAMS]
    cdef const real* pointers[MAX_PARAMS]
    cdef const real* params[MAX_PARAMS]
    cdef Py_ssize_t base[MAX_PARAMS]
    cdef Py_ssize_t filled[MAX_PARAMS]
    cdef Py_ssize_t steps[MAX_PARAMS]
    cdef Py_ssize_t phases[MAX_PARAMS]
    cdef Py_ssize_t n_axes = job.n_axes, start = item // job.row_blocks * job.columns
    cdef Py_ssize_t first = item % job.row_blocks * job.row_block
    cdef Py_ssize_t last = min(first + job.row_block, job.rows)
    cdef Py_ssize_t r, c, end, n, at, run
    cdef int p
    for p in range(job.n_params):
        params[p] = <const real*>job.params[p]
        steps[p] = job.geometry[(3 * p + 2) * n_axes - 1]
        phases[p] = job.geometry[(3 * p + 3) * n_axes - 1]
        filled[p] = -1
    for r in range(first, last):
        end = min(start + job.columns, min(job.row, job.total - r * job.row))
        for p in range(job.n_params):
            base[p] = row_offset(job, p, r)
        c = start
        while c < end:
            at = r * job.row + c
            n = min(<Py_ssize_t>TILE, end - c)
            if job.stream:
                # end on a cache line, so that every later tile starts on one
                n = min(n, TILE - <Py_ssize_t>((<uintptr_t>job.y + at * job.y_size) & 63) // job.y_size)
            if job.advancing:
                for p in range(job.n_params):
                    if steps[p] == 1:
                        pointers[p] = params[p] + base[p] + c
                        continue
                    pointers[p] = p_tile[p]
                    if steps[p]:
                        expand(p_tile[p], n, params[p] + base[p], steps[p], phases[p] + c)
                    elif filled[p] != base[p]:
                        expand(p_tile[p], TILE, params[p] + base[p], TILE, 0)
                        filled[p] = base[p]
                advancing(job, n, load(job, at, n, x_tile), y_tile, pointers, top)
            else:
                for p in range(job.n_params):
                    run = base[p]
                    if steps[p]:
                        run += (phases[p] + c) // steps[p]
                        n = min(n, steps[p] - (phases[p] + c) % steps[p])
                    values[p] = params[p][run]
                constant(job, n, load(job, at, n, x_tile), y_tile, values, top)
            store(job, at, n, y_tile)
            c += n
    if job.stream:
        cq_fence()


cdef void run_items(const Job* job, Py_ssize_t items, real top, int n_threads) noexcept nogil:
    cdef Py_ssize_t item
    cdef double began
    if n_threads == 1:  # no parallel region at all: safe in a forked child
        for item in range(items):
            run_item(job, item, top)
        return
    began = cq_seconds()
    for item in prange(items, num_threads=n_threads, schedule="static"):
        run_item(job, item, top)
    if cq_seconds() - began > 2e-3:
        cq_pause_threads()


# ---- the entry points

cdef void split_into_items(Job* job) noexcept nogil:
    """Row slices where rows are long; rows by a column tile where parameters advance, to keep them in L1."""
    job.columns = min(job.row, <Py_ssize_t>(TILE if job.advancing and job.rows > 1 else ITEM))
    job.row_block = max(<Py_ssize_t>1, ITEM // job.columns)
    job.row_blocks = (job.rows + job.row_block - 1) // job.row_block


cdef bint prepare(Job* job, const Py_ssize_t[:, ::1] geometry, const Py_ssize_t* lengths) except -1:
    """Fill in the geometry; refuse one that would reach outside a buffer. False where there is nothing to do."""
    cdef Py_ssize_t d, reach, step, last, stride, n = geometry.shape[1]
    cdef int p
    if n < 1 or geometry.shape[0] != 3 * job.n_params + 1:
        raise ValueError("geometry has the wrong shape")
    job.geometry = &geometry[0, 0]
    job.n_axes = <int>n
    job.row = geometry[0, n - 1]
    if job.total == 0:
        return False
    for d in range(n):
        if geometry[0, d] < 1:
            raise ValueError("geometry has an empty axis")
    job.rows = (job.total + job.row - 1) // job.row
    reach = 1
    for d in range(n - 1):
        reach *= geometry[0, d]
    if reach != job.rows:
        raise ValueError("geometry does not cover the tensor")
    job.advancing = False
    for p in range(job.n_params):
        reach = 0
        for d in range(n):
            step = geometry[3 * p + 1, d]
            if step < 0 or geometry[3 * p + 2, d] < 0 or geometry[3 * p + 3, d] < 0:
                raise ValueError("geometry has a negative entry")
            if step:
                if geometry[3 * p + 2, d] >= step:
                    raise ValueError("geometry has a phase outside its step")
                last = (geometry[3 * p + 2, d] + geometry[0, d] - 1) // step
                stride = geometry[3 * p + 3, d]
                # divided, not multiplied: no number is too large for this comparison
                if stride and last > (lengths[p] - 1 - reach) // stride:
                    raise ValueError("geometry reaches past a parameter")
                reach += last * stride
        if reach >= lengths[p]:
            raise ValueError("geometry reaches past a parameter")
        step = geometry[3 * p + 1, n - 1]
        if step and geometry[3 * p + 3, n - 1] != 1 or step == 1 and geometry[3 * p + 2, n - 1]:
            raise ValueError("geometry's row is not dense")
        if 0 < step < SHORT_RUN:
            job.advancing = True
    split_into_items(job)
    return True


cdef int launch(real top, int op, int x_code, int y_code, const unsigned char[::1] x, unsigned char[::1] y,
                const Py_ssize_t[:, ::1] geometry, bint stream, int n_threads,
                const real[::1] p0, const real[::1] p1, const real[::1] p2, const real[::1] p3) except -1:
    cdef Job job
    cdef Py_ssize_t lengths[MAX_PARAMS]
    cdef Py_ssize_t items
    cdef int own = FLOAT32 if real is float else FLOAT64
    if not (UINT8 <= x_code <= INT32 or x_code == own or x_code == FLOAT16 and own == FLOAT32):
        raise ValueError(f"x_code {x_code} is not for this arithmetic")
    if not (y_code == own or y_code == FLOAT16 and own == FLOAT32):
        raise ValueError(f"y_code {y_code} is not for this arithmetic")
    if not (DEQUANTIZE_LINEAR <= op <= FAKE_QUANTIZE) or n_threads < 1:
        raise ValueError(f"operator code {op} or n_threads {n_threads} is out of range")
    job.op, job.x_code, job.y_code, job.stream = op, x_code, y_code, stream and y_code == own
    job.x_size, job.y_size = element_size(x_code), element_size(y_code)
    job.total = x.shape[0] // job.x_size
    if x.shape[0] != job.total * job.x_size or y.shape[0] != job.total * job.y_size:
        raise ValueError("x and y differ in size")
    job.n_params = 2 if op == DEQUANTIZE_LINEAR else 4
    lengths[0], lengths[1] = p0.shape[0], p1.shape[0]
    if job.n_params == 4:
        if p2 is None or p3 is None:
            raise ValueError("a parameter is missing")
        lengths[2], lengths[3] = p2.shape[0], p3.shape[0]
    if not prepare(&job, geometry, lengths):
        return 0
    job.x, job.y = <const char*>&x[0], <char*>&y[0]
    job.params[0], job.params[1] = &p0[0], &p1[0]
    if job.n_params == 4:
        job.params[2], job.params[3] = &p2[0], &p3[0]
    items = (job.row + job.columns - 1) // job.columns * job.row_blocks
    with nogil:
        run_items(&job, items, top, n_threads)
    return 0


def run_float32(int op, int x_code, int y_code, const unsigned char[::1] x, unsigned char[::1] y,
                const Py_ssize_t[:, ::1] geometry, Py_ssize_t levels, bint stream, int n_threads,
                const float[::1] p0, const float[::1] p1, const float[::1] p2=None, const float[::1] p3=None):
    """Apply an operator that computes in float32. x and y are the bytes of contiguous, aligned, native arrays."""
    launch(<float>(levels - 1), op, x_code, y_code, x, y, geometry, stream, n_threads, p0, p1, p2, p3)


def run_float64(int op, int x_code, int y_code, const unsigned char[::1] x, unsigned char[::1] y,
                const Py_ssize_t[:, ::1] geometry, Py_ssize_t levels, bint stream, int n_threads,
                const double[::1] p0, const double[::1] p1, const double[::1] p2=None, const double[::1] p3=None):
    """The same for an operator that computes in float64."""
    launch(<double>(levels - 1), op, x_code, y_code, x, y, geometry, stream, n_threads, p0, p1, p2, p3)


def pause_threads() -> bool:
    """End this thread's idle OpenMP team; False where the OpenMP library cannot."""
    return bool(cq_pause_threads())
