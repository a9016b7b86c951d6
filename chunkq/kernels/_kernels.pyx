"""Every loop of chunkq; compiled once per instruction set (directives and flags stand in setup.py).

A tensor arrives as bytes with its axes collapsed by chunkq.run into rows. Along a row each parameter is constant,
advances by one element, or changes every `step` elements. A row is computed tile by tile: load to the arithmetic type,
formula, store. Which element types exist is the business of decode() and encode() alone, which formula that of
constant() and advancing().

settings are the numbers of chunkq.run: operator, element types of x, of the quantized values and of y,
the type to divide in, the quantized type's lowest and highest value, the code of what is above it, its minifloat,
whether a zero point was given.

geometry is a table of integers, one column per collapsed axis, the row last:
    row 0         the axis's size
    rows 3p+1..   for parameter p: step (0 = constant), phase of the first element in its step, stride in elements
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cython.parallel cimport prange
from libc.math cimport INFINITY, NAN
from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uintptr_t
from libc.string cimport memcpy

from numpy import empty, ndarray

cdef extern from "elements.h" nogil:
    float cq_rint_f32(float)
    double cq_rint_f64(double)
    ctypedef struct cq_minifloat:
        int32_t width, mantissa, bias, max, inf, nan
    void cq_load_f16(const uint16_t*, float*, Py_ssize_t)
    void cq_store_f16(const float*, uint16_t*, Py_ssize_t)
    void cq_load_bf16(const uint16_t*, float*, Py_ssize_t)
    void cq_store_bf16(const float*, uint16_t*, Py_ssize_t)
    ctypedef struct cq_by_f16:
        pass
    cq_by_f16 cq_by_f16_of(const cq_minifloat*)
    void cq_load_minifloat(const uint8_t*, float*, Py_ssize_t, const cq_minifloat*, const cq_by_f16*, float, float, int)
    Py_ssize_t cq_quantize_8(const float*, void*, int, Py_ssize_t, float, float, int, int, int)
    int CQ_FROM_UINT8, CQ_FROM_INT8, CQ_FROM_MINIFLOAT, CQ_TO_F16, CQ_TO_BF16, CQ_TO_F32
    Py_ssize_t cq_dequantize_bytes(const void*, int, void*, int, Py_ssize_t, const cq_by_f16*, float, float, int)
    void cq_store_minifloat(const float*, uint8_t*, Py_ssize_t, const cq_minifloat*, int32_t)
    void cq_stream(void*, const void*, Py_ssize_t)
    void cq_fence()

cdef extern from "crc32c.h" nogil:
    int CQ_CRC32C
    void cq_prepare_crc32c()
    uint32_t cq_crc32c(const uint8_t*, Py_ssize_t)

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
    BFLOAT16 = 8
    UINT_BITS = 9        # 1 to 7 bits, one value in a byte
    INT_BITS = 10
    MINIFLOAT = 11       # 4 to 8 bits, one value in a byte

cdef enum:
    DEQUANTIZE_LINEAR = 0
    QUANTIZE_LINEAR = 1
    QUANTIZE_DEQUANTIZE = 2
    FAKE_QUANTIZE = 3

cdef enum:
    TILE = 1024          # elements; input, output and four parameter tiles stay in L1
    SHORT_RUN = 32       # parameter runs below this are expanded into a tile
    ITEM = 16384         # elements one thread takes at a time
    COLUMNS = 8192       # parameter values of an item, where they advance along a row and the next uses them again
    MAX_PARAMS = 4
    N_SETTINGS = 15

ELEMENT_CODES = {"uint8": UINT8, "int8": INT8, "uint16": UINT16, "int16": INT16, "int32": INT32,
                 "float16": FLOAT16, "float32": FLOAT32, "float64": FLOAT64, "bfloat16": BFLOAT16,
                 "unsigned bits": UINT_BITS, "signed bits": INT_BITS, "minifloat": MINIFLOAT}
OPERATOR_CODES = {"DequantizeLinear": DEQUANTIZE_LINEAR, "QuantizeLinear": QUANTIZE_LINEAR,
                  "QuantizeDequantize": QUANTIZE_DEQUANTIZE, "FakeQuantize": FAKE_QUANTIZE}
OPENMP = CQ_OPENMP

ctypedef fused real:
    float
    double

cdef struct Job:
    const char* x
    char* y
    const void* params[MAX_PARAMS]
    const Py_ssize_t* geometry
    int op, x_code, q_code, y_code, n_params, n_axes
    int division                             # the type QuantizeLinear divides in
    int32_t low, high, over                  # the quantized type's range; the code of what is above it
    cq_minifloat mini                        # the quantized type; of other narrow types than minifloats the width only
    const cq_by_f16* by_f16                  # how minifloats are decoded by way of float16; NULL for other types
    bint shifted                             # whether there is a zero point, where zeros have signs
    bint in_place                            # whether results are computed in y itself
    bint narrow                              # whether one loop does it all, in y itself
    int from_bytes, to                       # for cq_dequantize_bytes; -1 for x of other widths
    bint staged, advancing, stream
    Py_ssize_t x_size, y_size
    Py_ssize_t run, run_phase                # where not advancing: step of what changes along a row, or 0
    Py_ssize_t moves[MAX_PARAMS]             # 1 for what does
    Py_ssize_t total, row, rows              # elements, elements per row, rows (the last may be short)
    Py_ssize_t columns, row_block, row_blocks   # an item is row_block rows by columns elements


cdef Py_ssize_t element_size(int code) noexcept nogil:
    if code == UINT8 or code == INT8 or code == UINT_BITS or code == INT_BITS or code == MINIFLOAT:
        return 1
    if code == UINT16 or code == INT16 or code == FLOAT16 or code == BFLOAT16:
        return 2
    if code == INT32 or code == FLOAT32:
        return 4
    return 8


# ---- load and store: one branch per element type

cdef inline float dequantize(float x, float scale, float zero_point) noexcept nogil:
    # ONNX DequantizeLinear-13: the difference of narrow types is exact in float32, then one multiplication.
    return (x - zero_point) * scale


cdef inline float decoded(float v, float scale, float zero_point, bint dequantized) noexcept nogil:
    return dequantize(v, scale, zero_point) if dequantized else v


cdef inline void decode(const Job* job, const char* x, Py_ssize_t n, float* tile, float scale, float zero_point,
                        bint dequantized) noexcept nogil:
    """x in float32; where one scale and zero point go for all, dequantized as well (the caller's constant)."""
    cdef Py_ssize_t i
    cdef int32_t narrow
    cdef int shift
    if job.x_code == UINT8:
        for i in range(n):
            tile[i] = decoded(<float>(<const uint8_t*>x)[i], scale, zero_point, dequantized)
    elif job.x_code == INT8:
        for i in range(n):
            tile[i] = decoded(<float>(<const int8_t*>x)[i], scale, zero_point, dequantized)
    elif job.x_code == UINT16:
        for i in range(n):
            tile[i] = decoded(<float>(<const uint16_t*>x)[i], scale, zero_point, dequantized)
    elif job.x_code == INT16:
        for i in range(n):
            tile[i] = decoded(<float>(<const int16_t*>x)[i], scale, zero_point, dequantized)
    elif job.x_code == INT32:
        for i in range(n):
            tile[i] = decoded(<float>(<const int32_t*>x)[i], scale, zero_point, dequantized)
    elif job.x_code == UINT_BITS:
        for i in range(n):
            tile[i] = decoded(<float>((<const uint8_t*>x)[i] & job.high), scale, zero_point, dequantized)
    elif job.x_code == INT_BITS:
        shift = 32 - job.mini.width
        for i in range(n):
            narrow = <int32_t>(<uint32_t>(<const uint8_t*>x)[i] << shift) >> shift
            tile[i] = decoded(<float>narrow, scale, zero_point, dequantized)
    elif job.x_code == FLOAT16:
        cq_load_f16(<const uint16_t*>x, tile, n)
    elif job.x_code == BFLOAT16:
        cq_load_bf16(<const uint16_t*>x, tile, n)
    else:
        cq_load_minifloat(<const uint8_t*>x, tile, n, &job.mini, job.by_f16, scale, zero_point, dequantized)


cdef const real* load(const Job* job, Py_ssize_t at, Py_ssize_t n, real* tile) noexcept nogil:
    """x[at : at + n] in the arithmetic type: in the tile, or in place where it has that type already."""
    cdef const char* x = job.x + at * job.x_size
    if real is float:
        if job.x_code != FLOAT32:
            decode(job, x, n, tile, 1, 0, False)
            return tile
    return <const real*>x


cdef void encode(const Job* job, int code, Py_ssize_t n, const float* tile, char* y) noexcept nogil:
    """The tile in another element type; integers are in its range already."""
    cdef Py_ssize_t i
    cdef uint8_t mask
    if code == UINT8 or code == UINT_BITS:
        for i in range(n):
            (<uint8_t*>y)[i] = <uint8_t><int32_t>tile[i]
    elif code == INT8:
        for i in range(n):
            (<int8_t*>y)[i] = <int8_t><int32_t>tile[i]
    elif code == UINT16:
        for i in range(n):
            (<uint16_t*>y)[i] = <uint16_t><int32_t>tile[i]
    elif code == INT16:
        for i in range(n):
            (<int16_t*>y)[i] = <int16_t><int32_t>tile[i]
    elif code == INT_BITS:
        mask = <uint8_t>((1 << job.mini.width) - 1)
        for i in range(n):
            (<uint8_t*>y)[i] = <uint8_t><int32_t>tile[i] & mask
    elif code == FLOAT16:
        cq_store_f16(tile, <uint16_t*>y, n)
    elif code == BFLOAT16:
        cq_store_bf16(tile, <uint16_t*>y, n)
    else:
        cq_store_minifloat(tile, <uint8_t*>y, n, &job.mini, job.over)


cdef void store(const Job* job, Py_ssize_t at, Py_ssize_t n, const real* tile) noexcept nogil:
    """Write the tile to y[at : at + n]: in y's type, or past the caches."""
    cdef char* y = job.y + at * job.y_size
    cdef char encoded[2 * TILE]
    cdef const void* source = tile
    if real is float:
        if not job.stream:
            encode(job, job.y_code, n, <const float*>tile, y)
            return
        if job.y_code != FLOAT32:
            encode(job, job.y_code, n, <const float*>tile, encoded)
            source = encoded
    cq_stream(y, source, n * job.y_size)


# ---- the formulas

cdef inline real quantize(real x, real scale, real zero_point, real low, real high) noexcept nogil:
    # ONNX QuantizeLinear-13: divided, rounded, only then shifted; saturated before it becomes an integer; NaN gives low
    cdef real y
    if real is float:
        y = cq_rint_f32(x / scale) + zero_point
    else:
        y = cq_rint_f64(x / scale) + zero_point
    y = y if y > low else low
    return y if y < high else high


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


cdef void constant(const Job* job, Py_ssize_t n, const real* x, real* y, real v0, real v1, real v2, real v3,
                   real top) noexcept nogil:
    """The formula over n elements that share one value of every parameter."""
    cdef Py_ssize_t i
    cdef real low = <real>job.low, high = <real>job.high
    if job.op == QUANTIZE_LINEAR:
        for i in range(n):
            y[i] = quantize(x[i], v0, v1, low, high)
    elif job.op == QUANTIZE_DEQUANTIZE:
        for i in range(n):
            y[i] = dequantize(quantize(x[i], v0, v1, low, high), v0, v1)
    else:
        for i in range(n):
            y[i] = fake_quantize(x[i], v0, v1, v2, v3, top)


cdef void advancing(const Job* job, Py_ssize_t n, const real* x, real* y, const real** p, real top) noexcept nogil:
    """The formula over n elements, each with its own value of every parameter."""
    cdef Py_ssize_t i
    cdef const real* p0 = p[0]
    cdef const real* p1 = p[1]
    cdef const real* p2
    cdef const real* p3
    cdef real low = <real>job.low, high = <real>job.high
    if job.op == DEQUANTIZE_LINEAR:
        for i in range(n):
            y[i] = dequantize(x[i], p0[i], p1[i])
    elif job.op == FAKE_QUANTIZE:
        p2 = p[2]
        p3 = p[3]
        for i in range(n):
            y[i] = fake_quantize(x[i], p0[i], p1[i], p2[i], p3[i], top)
    elif job.staged:
        if real is float:
            in_stages(job, n, x, y, p0, p1)
    elif job.op == QUANTIZE_LINEAR:
        for i in range(n):
            y[i] = quantize(x[i], p0[i], p1[i], low, high)
    else:
        for i in range(n):
            y[i] = dequantize(quantize(x[i], p0[i], p1[i], low, high), p0[i], p1[i])


cdef void round_to(const Job* job, int code, Py_ssize_t n, const float* x, float* y) noexcept nogil:
    """y = x rounded to an element type, as float32 again."""
    cdef char encoded[2 * TILE]
    if code == FLOAT32:
        if x != y:
            memcpy(y, x, n * sizeof(float))
        return
    encode(job, code, n, x, encoded)
    if code == FLOAT16:
        cq_load_f16(<const uint16_t*>encoded, y, n)
    elif code == BFLOAT16:
        cq_load_bf16(<const uint16_t*>encoded, y, n)
    else:
        cq_load_minifloat(<const uint8_t*>encoded, y, n, &job.mini, job.by_f16, 1, 0, False)


cdef void in_stages(const Job* job, Py_ssize_t n, const float* x, float* y, const float* scale,
                    const float* zero_point) noexcept nogil:
    """QuantizeLinear to a float type, or with a division in another type than float32: one step after the other."""
    cdef Py_ssize_t i
    cdef float low = <float>job.low, high = <float>job.high, v
    cdef float divisor[TILE]
    round_to(job, job.division, n, x, y)
    round_to(job, job.division, n, scale, divisor)
    for i in range(n):
        y[i] = y[i] / divisor[i]
    round_to(job, job.division, n, y, y)
    if job.q_code == MINIFLOAT:
        if job.shifted:
            for i in range(n):
                y[i] = y[i] + zero_point[i]
            round_to(job, job.division, n, y, y)
        if job.op == QUANTIZE_DEQUANTIZE:
            round_to(job, MINIFLOAT, n, y, y)
    else:
        for i in range(n):
            v = cq_rint_f32(y[i]) + zero_point[i]
            v = v if v > low else low
            y[i] = v if v < high else high
    if job.op == QUANTIZE_DEQUANTIZE:
        for i in range(n):
            y[i] = dequantize(y[i], scale[i], zero_point[i])


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


cdef void dequantize_run(const Job* job, Py_ssize_t at, Py_ssize_t n, float* tile, float scale,
                         float zero_point) noexcept nogil:
    """x[at : at + n] dequantized by one scale: into the tile, or where job.narrow is set into y itself."""
    cdef const char* x = job.x + at * job.x_size
    cdef char* y = job.y + at * job.y_size
    cdef Py_ssize_t done = 0
    if job.from_bytes >= 0:
        done = cq_dequantize_bytes(x, job.from_bytes, y if job.narrow else <char*>tile, job.to, n, job.by_f16, scale,
                                   zero_point, job.narrow and job.stream)
        if done == n:
            return
    decode(job, x + done * job.x_size, n - done, tile + done, scale, zero_point, True)
    if job.narrow:
        encode(job, job.y_code, n - done, tile + done, y + done * job.y_size)


cdef void quantize_run(const Job* job, Py_ssize_t at, Py_ssize_t n, float* tile, float scale,
                       float zero_point) noexcept nogil:
    """x[at : at + n] quantized to 8 bits in y itself."""
    cdef const float* x = <const float*>job.x + at
    cdef Py_ssize_t done = cq_quantize_8(x, job.y + at, job.y_code == INT8, n, scale, zero_point, job.low, job.high,
                                         job.stream)
    if done < n:
        constant(job, n - done, x + done, tile, scale, zero_point, <float>0, <float>0, <float>0)
        encode(job, job.y_code, n - done, tile, job.y + at + done)


cdef void in_runs(const Job* job, Py_ssize_t at, Py_ssize_t n, real* x_tile, real* y, const real** row, Py_ssize_t c,
                  real top) noexcept nogil:
    """x[at : at + n], from column c on, in runs over which no parameter changes; row[p] is where p's values begin."""
    cdef const real* x = NULL
    cdef Py_ssize_t i = 0, m = n, k = 0, step = job.run
    cdef Py_ssize_t k0, k1, k2 = 0, k3 = 0
    cdef bint four = job.n_params == 4
    if step:
        k = (job.run_phase + c) // step
        m = min(n, step - (job.run_phase + c) % step)
    if job.op != DEQUANTIZE_LINEAR and not job.narrow:
        x = load(job, at, n, x_tile)
    while i < n:
        k0, k1 = k * job.moves[0], k * job.moves[1]
        if job.op == DEQUANTIZE_LINEAR:
            if real is float:
                dequantize_run(job, at + i, m, y + i, row[0][k0], row[1][k1])
        elif job.narrow:
            if real is float:
                quantize_run(job, at + i, m, y + i, row[0][k0], row[1][k1])
        elif four:
            k2, k3 = k * job.moves[2], k * job.moves[3]
            constant(job, m, x + i, y + i, row[0][k0], row[1][k1], row[2][k2], row[3][k3], top)
        else:
            constant(job, m, x + i, y + i, row[0][k0], row[1][k1], <real>0, <real>0, top)
        i += m
        k += 1
        m = min(step, n - i)


cdef void run_item(const Job* job, Py_ssize_t item, real top) noexcept nogil:
    """Compute one item: a range of rows by a range of columns."""
    cdef real x_tile[TILE]
    cdef real y_tile[TILE]
    cdef real p_tile[MAX_PARAMS][TILE]
    cdef const real* pointers[MAX_PARAMS]
    cdef const real* params[MAX_PARAMS]
    cdef const real* filled[MAX_PARAMS]
    cdef const real* row[MAX_PARAMS]         # where the values of this row begin
    cdef Py_ssize_t steps[MAX_PARAMS]
    cdef Py_ssize_t phases[MAX_PARAMS]
    cdef Py_ssize_t n_axes = job.n_axes, start = item // job.row_blocks * job.columns
    cdef Py_ssize_t first = item % job.row_blocks * job.row_block
    cdef Py_ssize_t last = min(first + job.row_block, job.rows)
    cdef Py_ssize_t r, c, end, n, at
    cdef real* y
    cdef int p
    for p in range(job.n_params):
        params[p] = <const real*>job.params[p]
        steps[p] = job.geometry[(3 * p + 2) * n_axes - 1]
        phases[p] = job.geometry[(3 * p + 3) * n_axes - 1]
        filled[p] = NULL
    for r in range(first, last):
        end = min(start + job.columns, min(job.row, job.total - r * job.row))
        for p in range(job.n_params):
            row[p] = params[p] + row_offset(job, p, r)
        c = start
        while c < end:
            at = r * job.row + c
            n = min(<Py_ssize_t>TILE, end - c)
            if job.stream:
                # end on a cache line, so that every later tile starts on one
                n = min(n, TILE - <Py_ssize_t>((<uintptr_t>job.y + at * job.y_size) & 63) // job.y_size)
            y = y_tile
            if job.in_place:
                y = <real*>(job.y + at * job.y_size)
            if job.advancing:
                for p in range(job.n_params):
                    if steps[p] == 1:
                        pointers[p] = row[p] + c
                        continue
                    pointers[p] = p_tile[p]
                    if steps[p]:
                        expand(p_tile[p], n, row[p], steps[p], phases[p] + c)
                    elif filled[p] != row[p]:
                        expand(p_tile[p], TILE, row[p], TILE, 0)
                        filled[p] = row[p]
                advancing(job, n, load(job, at, n, x_tile), y, pointers, top)
            else:
                in_runs(job, at, n, x_tile, y, row, c, top)
            if not (job.in_place or job.narrow):
                store(job, at, n, y)
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
    job.columns = min(job.row, <Py_ssize_t>(COLUMNS // job.n_params if job.advancing and job.rows > 1 else ITEM))
    job.row_block = max(<Py_ssize_t>1, ITEM // job.columns)
    job.row_blocks = (job.rows + job.row_block - 1) // job.row_block


cdef bint prepare(Job* job, const Py_ssize_t[:, ::1] geometry, const Py_ssize_t* lengths) except -1:
    """Fill in the geometry; refuse one that would reach outside a buffer. False where there is nothing to do."""
    cdef Py_ssize_t d, reach, step, last, stride, phase, n = geometry.shape[1]
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
    job.advancing = job.staged
    job.run = job.run_phase = 0
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
        phase = geometry[3 * p + 2, n - 1]
        job.moves[p] = step != 0
        if 0 < step < SHORT_RUN or step and job.run and (step != job.run or phase != job.run_phase):
            job.advancing = True
        if step:
            job.run, job.run_phase = step, phase
    job.narrow = False
    if not job.advancing and job.op == DEQUANTIZE_LINEAR:
        job.narrow = job.from_bytes >= 0 and job.to != CQ_TO_F32
    elif not job.advancing and job.op == QUANTIZE_LINEAR:
        job.narrow = job.x_code == FLOAT32 and (job.y_code == UINT8 or job.y_code == INT8)
    split_into_items(job)
    return True


cdef bint fits(int code, int own, int op, bint is_x) noexcept nogil:
    """Whether a loop is written for this element type on this side of an operator."""
    if op == FAKE_QUANTIZE or own == FLOAT64:
        return code == own or own == FLOAT32 and (code == FLOAT16 or code == BFLOAT16)
    if op == QUANTIZE_DEQUANTIZE or is_x == (op == QUANTIZE_LINEAR):
        return code == FLOAT32 or code == FLOAT16 or code == BFLOAT16 or is_x and code == INT32
    return UINT8 <= code <= INT16 or UINT_BITS <= code <= MINIFLOAT or is_x and code == INT32


cdef int read_settings(Job* job, const Py_ssize_t[::1] settings, int own) except -1:
    """Take over the numbers that chunkq.run made of a specification; refuse those no loop is written for."""
    cdef int numbers[N_SETTINGS]
    cdef int k
    if settings.shape[0] != N_SETTINGS:
        raise ValueError("settings has the wrong length")
    for k in range(N_SETTINGS):
        if not -2147483648 <= settings[k] <= 2147483647:
            raise ValueError("settings holds too large a number")
        numbers[k] = <int>settings[k]
    job.op, job.x_code, job.q_code, job.y_code = numbers[0], numbers[1], numbers[2], numbers[3]
    job.division = numbers[4]
    job.low, job.high, job.over = numbers[5], numbers[6], numbers[7]
    job.mini.width, job.mini.mantissa, job.mini.bias = numbers[8], numbers[9], numbers[10]
    job.mini.max, job.mini.inf, job.mini.nan, job.shifted = numbers[11], numbers[12], numbers[13], numbers[14]
    if not DEQUANTIZE_LINEAR <= job.op <= FAKE_QUANTIZE:
        raise ValueError(f"operator code {job.op} is out of range")
    if not fits(job.x_code, own, job.op, True):
        raise ValueError(f"x_code {job.x_code} is not for this arithmetic")
    if not fits(job.y_code, own, job.op, False):
        raise ValueError(f"y_code {job.y_code} is not for this arithmetic")
    if not (job.division == FLOAT32 or job.division == FLOAT16 or job.division == BFLOAT16):
        raise ValueError(f"division {job.division} is not a type to divide in")
    if UINT_BITS <= job.q_code <= INT_BITS and not 1 <= job.mini.width <= 7:
        raise ValueError("settings has a width out of range")
    if job.q_code == MINIFLOAT and not (4 <= job.mini.width <= 8 and 1 <= job.mini.mantissa <= job.mini.width - 2
                                        and 0 <= job.mini.bias <= 127 - job.mini.mantissa
                                        and 0 <= job.mini.max < 1 << job.mini.width):
        raise ValueError("settings has a minifloat out of range")
    job.from_bytes = -1
    if job.x_code == UINT8:
        job.from_bytes = CQ_FROM_UINT8
    elif job.x_code == INT8:
        job.from_bytes = CQ_FROM_INT8
    elif job.x_code == MINIFLOAT:
        job.from_bytes = CQ_FROM_MINIFLOAT
    job.to = CQ_TO_F32
    if job.y_code != FLOAT32:
        job.to = CQ_TO_BF16 if job.y_code == BFLOAT16 else CQ_TO_F16
    for k in (job.x_code, job.y_code):
        if UINT_BITS <= k <= MINIFLOAT and k != job.q_code:
            raise ValueError("a narrow type is not the quantized one")
    job.staged = (QUANTIZE_LINEAR <= job.op <= QUANTIZE_DEQUANTIZE
                  and (job.division != FLOAT32 or job.q_code == MINIFLOAT))
    return 0


cdef bint meet(const void* a, Py_ssize_t a_size, const void* b, Py_ssize_t b_size) noexcept nogil:
    return <const char*>a < <const char*>b + b_size and <const char*>b < <const char*>a + a_size


cdef class Call:
    """An operator ready for tensors of one shape and one set of parameters.

    A second call costs little more than its elements.

    Parameters
    ----------
    settings, geometry : numpy.ndarray of intp
        See the top of this file.
    levels : int
        FakeQuantize's.
    shape : tuple of int
        Of x and y.
    dtype : numpy.dtype
        Of y.
    stream : bool
        Whether results leave the tile past the caches.
    params : numpy.ndarray of float32, or of float64 for an operator that computes in it
        Two or four; read at every run, not copied.
    """

    cdef Job job
    cdef Py_ssize_t lengths[MAX_PARAMS]
    cdef Py_ssize_t levels
    cdef bint wide                           # computes in float64
    cdef readonly Py_ssize_t size
    cdef object shape, dtype, geometry, params

    def __cinit__(self, settings, Py_ssize_t levels, geometry, tuple shape, dtype, bint stream, *params):
        cdef Py_ssize_t n = 1
        cdef int p
        for size in shape:
            n *= size
        self.size, self.levels, self.shape, self.dtype = n, levels, shape, dtype
        self.geometry, self.params = geometry, params
        self.wide = len(params) > 0 and params[0].dtype.itemsize == 8
        read_settings(&self.job, settings, FLOAT64 if self.wide else FLOAT32)
        self.job.n_params = 4 if self.job.op == FAKE_QUANTIZE else 2
        if len(params) != self.job.n_params:
            raise ValueError(f"{len(params)} parameters instead of {self.job.n_params}")
        for p in range(self.job.n_params):
            self.take(p, params[p])
        self.job.x_size, self.job.y_size = element_size(self.job.x_code), element_size(self.job.y_code)
        self.job.total = n
        self.job.stream = stream
        self.job.in_place = not stream and self.job.y_code == (FLOAT64 if self.wide else FLOAT32)
        prepare(&self.job, geometry, self.lengths)

    cdef int take(self, int p, array) except -1:
        cdef const double[::1] doubles
        cdef const float[::1] floats
        if self.wide:
            doubles = array
            self.lengths[p] = doubles.shape[0]
            self.job.params[p] = &doubles[0] if doubles.shape[0] else NULL
        else:
            floats = array
            self.lengths[p] = floats.shape[0]
            self.job.params[p] = &floats[0] if floats.shape[0] else NULL
        return 0

    cdef int launch(self, Py_buffer* x, Py_buffer* y, int n_threads) except -1:
        cdef Job job = self.job
        cdef cq_by_f16 by_f16                # vectors, which the memory of an object is not aligned for
        cdef Py_ssize_t items
        if x.len != job.total * job.x_size or y.len != job.total * job.y_size:
            raise ValueError("x or y is of another size")
        if n_threads < 1:
            raise ValueError(f"n_threads {n_threads} is out of range")
        if job.total == 0:
            return 0
        job.x, job.y = <const char*>x.buf, <char*>y.buf
        if job.q_code == MINIFLOAT:
            by_f16 = cq_by_f16_of(&job.mini)
            job.by_f16 = &by_f16
        items = (job.row + job.columns - 1) // job.columns * job.row_blocks
        with nogil:
            if self.wide:
                run_items[double](&job, items, <double>(self.levels - 1), n_threads)
            else:
                run_items[float](&job, items, <float>(self.levels - 1), n_threads)
        return 0

    def run(self, x, y, int n_threads):
        """From x to y, the bytes of contiguous, aligned, native arrays that overlap nothing (y may be x)."""
        cdef Py_buffer from_, to
        PyObject_GetBuffer(x, &from_, PyBUF_SIMPLE)
        try:
            PyObject_GetBuffer(y, &to, PyBUF_WRITABLE)
            try:
                self.launch(&from_, &to, n_threads)
            finally:
                PyBuffer_Release(&to)
        finally:
            PyBuffer_Release(&from_)

    def __call__(self, x, out, int n_threads):
        """The result for an array of the shape and type this was made for, in `out` where that is not None.

        None where one of the arrays is not plain, or overlaps another: whoever calls then sees to it.
        """
        cdef Py_buffer from_, to
        if out is None:
            out = empty(self.shape, self.dtype)
        elif type(out) is not ndarray or out.shape != self.shape or out.dtype != self.dtype:
            return None
        try:
            PyObject_GetBuffer(x, &from_, PyBUF_SIMPLE)
        except (BufferError, ValueError):
            return None
        try:
            try:
                PyObject_GetBuffer(out, &to, PyBUF_WRITABLE)
            except (BufferError, ValueError):
                return None
            try:
                if not self.is_apart(&from_, &to):
                    return None
                self.launch(&from_, &to, n_threads)
                return out
            finally:
                PyBuffer_Release(&to)
        finally:
            PyBuffer_Release(&from_)

    cdef bint is_apart(self, Py_buffer* x, Py_buffer* y) noexcept:
        """Whether both are aligned, and y overlaps neither x nor a parameter."""
        cdef Py_ssize_t own = 8 if self.wide else 4
        cdef int p
        if <uintptr_t>x.buf % <uintptr_t>self.job.x_size or <uintptr_t>y.buf % <uintptr_t>self.job.y_size:
            return False
        if meet(x.buf, x.len, y.buf, y.len):
            return False
        for p in range(self.job.n_params):
            if meet(self.job.params[p], self.lengths[p] * own, y.buf, y.len):
                return False
        return True


def pause_threads() -> bool:
    """End this thread's idle OpenMP team; False where the OpenMP library cannot."""
    return bool(cq_pause_threads())


# ---- checksums

cq_prepare_crc32c()
CRC32C = bool(CQ_CRC32C)


def crc32c(const unsigned char[::1] data) -> int:
    """CRC-32C, while other threads go on; for builds where CRC32C is true."""
    cdef Py_ssize_t n = data.shape[0]
    cdef uint32_t found
    if not CQ_CRC32C:
        raise RuntimeError("this instruction set has no CRC-32C")
    if n == 0:
        return 0
    with nogil:
        found = cq_crc32c(&data[0], n)
    return found


include "statistics.pxi"
