"""Bad requests: every one has its reason, names its argument, and travels between processes."""

import pickle

import numpy as np
import pytest
import zarr

import chunkq
from chunkq import errors

X = np.zeros((3, 4), np.int8)
F = np.zeros((3, 4), np.float32)
OUT = np.zeros((3, 4), np.float32)
SHARED = np.zeros(64, np.float32)
SQUARE = np.zeros((3, 3), np.float32)


def dq(x, *arguments, **keywords):
    return lambda: chunkq.dequantize_linear(x, *arguments, **keywords)


def fq(x, *ranges, levels=16, **keywords):
    return lambda: chunkq.fake_quantize(x, *(ranges or (0.0, 1.0, 0.0, 1.0)), levels, **keywords)


class Other:
    """Something with an __array__, as xarray and torch have."""

    def __array__(self, dtype=None, copy=None):
        return X


REQUESTS = {
    "scale too long": (dq(X, [1.0] * 5), "scale_shape", "scale has 5"),
    "scale on the other axis": (dq(X, [1.0] * 3), "scale_shape", "axis=0 has that length"),
    "2-D scale": (dq(X, np.ones((3, 4), np.float32)), "scale_shape", "block_size"),
    "scale at full rank": (dq(X, np.ones((3, 1), np.float32)), "scale_shape", "scale.reshape(-1) with axis=0"),
    "(1, 1) scale": (dq(X, np.ones((1, 1), np.float32)), "scale_shape", "scale"),
    "axis": (dq(X, [1.0] * 4, axis=2), "axis", "axis=2"),
    "negative axis": (dq(X, [1.0] * 4, axis=-3), "axis", "axis=-3"),
    "fractional axis": (dq(X, [1.0] * 4, axis=1.0), "axis", "axis=1.0"),
    "axis True": (dq(X, [1.0] * 4, axis=True), "axis", "axis=True"),
    "1-D x and the default axis": (dq(X[0], [1.0] * 4), "axis", "pass axis=0"),
    "axis a list": (dq(X, [1.0] * 4, axis=[1]), "axis", "axis=[1]"),
    "axis an array": (dq(X, [1.0] * 4, axis=np.array([0, 1])), "axis", "axis="),
    "rank 0 and a 1-D scale": (dq(np.int8(1), [1.0, 2.0]), "axis", "rank 0"),
    "float64 scale": (dq(X, np.ones(4)), "dtype", "scale.astype('float32')"),
    "float64 scalar": (dq(X, np.float64(0.5)), "dtype", "scale is float64"),
    "complex scale": (dq(X, 1j), "argument", "scale"),
    "scale in words": (dq(X, "0.5"), "argument", "scale is a str"),
    "scale too large": (dq(X, 1e39), "value", "scale=1e+39"),
    "ragged scale": (dq(X, [[1.0], [1.0, 2.0]]), "value", "scale"),
    "bool scale": (dq(X, [True] * 4), "value", "scale"),
    "object scale": (dq(X, np.array([1.0] * 4, object)), "dtype", "scale is object"),
    "zero point of another type": (dq(X, [1.0] * 4, np.zeros(4, np.uint8)), "dtype", "zero_point is uint8"),
    "zero point of another shape": (dq(X, [1.0] * 4, np.int8(0)), "zero_point_shape", "zero_point has shape ()"),
    "zero point of a scalar": (dq(X, 1.0, [3, 4]), "zero_point_shape", "zero_point has shape (2,)"),
    "zero point of one block": (
        dq(X[0], [1.0], 3, axis=0, block_size=4),
        "zero_point_shape",
        "zero_point has shape ()",
    ),
    "zero point out of range": (dq(X, 1.0, 128), "value", "zero_point=128 is outside int8"),
    "fractional zero point": (dq(X, 1.0, 0.5), "value", "zero_point=0.5: expected integers"),
    "int32 zero point": (dq(X.astype(np.int32), 1.0, 3), "int32_zero_point", "zero_point holds 3"),
    "int32 zero points": (
        dq(X.astype(np.int32), [1.0] * 4, np.int32([0, 0, 0, -7])),
        "int32_zero_point",
        "zero_point holds -7",
    ),
    "negative block size": (dq(X, np.ones((3, 2), np.float32), block_size=-2), "block_size", "block_size=-2"),
    "fractional block size": (dq(X, 1.0, block_size=2.5), "block_size", "block_size=2.5"),
    "block size an array": (dq(X, 1.0, block_size=np.array([1, 2])), "block_size", "block_size="),
    "block sizes of another rank": (
        dq(X, np.ones((3, 2), np.float32), block_size=(1, 2, 3)),
        "block_size",
        "2 positive",
    ),
    "block size 0 in a tuple": (dq(X, np.ones((3, 2), np.float32), block_size=(1, 0)), "block_size", "2 positive"),
    "scalar scale with blocks": (dq(X, 1.0, block_size=2), "scale_shape", "rank, 2"),
    "too few blocks": (dq(X, np.ones((3, 1), np.float32), block_size=2), "scale_shape", "length 1 on axis 1"),
    "too many blocks": (dq(X, np.ones((3, 3), np.float32), block_size=2), "scale_shape", "length 3 on axis 1"),
    "one row for three": (dq(X, np.ones((1, 2), np.float32), block_size=2), "scale_shape", "length 1 on axis 0"),
    "float x": (dq(F, 1.0), "dtype", "x is float32"),
    "int64 x": (dq(X.astype(np.int64), 1.0), "dtype", "x is int64"),
    "bool x": (dq(X.astype(bool), 1.0), "dtype", "x is bool"),
    "object x": (dq(X.astype(object), 1.0), "dtype", "x is object"),
    "structured x": (dq(np.zeros(3, "i1,i1"), 1.0), "dtype", "x is"),
    "masked x": (dq(np.ma.masked_equal(X, 0), 1.0), "masked", "x is a masked array"),
    "masked scale": (dq(X, np.ma.masked_equal(np.float32([1, 1, 0, 1]), 0)), "masked", "scale is a masked"),
    "masked zero point": (dq(X, [1.0] * 4, np.ma.masked_equal(X[0], 0)), "masked", "zero_point is a masked"),
    "masked range": (fq(F, np.ma.masked_equal(F[0], 0), 1.0, 0.0, 1.0), "masked", "input_low is a masked"),
    "ragged x": (dq([[1], [1, 2]], 1.0), "value", "x is a ragged list"),
    "uint32 x": (dq(X.astype(np.uint32), 1.0), "dtype", "x is uint32"),
    "another kind of x": (dq(Other(), 1.0), "argument", "x is a Other"),
    "another kind of scale": (dq(X, Other()), "argument", "scale is a Other"),
    "x None": (dq(None, 1.0), "argument", "x is a NoneType"),
    "n_threads 0": (dq(X, 1.0, n_threads=0), "n_threads", "n_threads=0"),
    "n_threads 1.5": (dq(X, 1.0, n_threads=1.5), "n_threads", "n_threads=1.5"),
    "n_threads True": (dq(X, 1.0, n_threads=True), "n_threads", "n_threads=True"),
    "n_threads an array": (dq(X, 1.0, n_threads=np.array([1, 2])), "n_threads", "n_threads="),
    "out of another shape": (dq(X, 1.0, out=np.zeros((4, 3), np.float32)), "out", "expected float32 (3, 4)"),
    "out of another type": (dq(X, 1.0, out=np.zeros((3, 4))), "out", "out is float64"),
    "out read-only": (dq(X, 1.0, out=np.broadcast_to(OUT, OUT.shape)), "out", "read-only"),
    "out masked": (dq(X, 1.0, out=np.ma.zeros((3, 4), np.float32)), "out", "out is a MaskedArray"),
    "out a window over itself": (
        dq(X, 1.0, out=np.lib.stride_tricks.as_strided(OUT, (3, 4), (8, 4))),
        "out",
        "share memory",
    ),
    "out a list": (dq(X, 1.0, out=[]), "out", "out is a list"),
    "out shared by elements": (
        dq(X, 1.0, out=np.lib.stride_tricks.as_strided(OUT[:1], (3, 4), (0, 4))),
        "out",
        "share memory",
    ),
    "out overlapping x": (
        fq(SHARED[:12].reshape(3, 4), out=SHARED[1:13].reshape(3, 4)),
        "out",
        "out overlaps x",
    ),
    "out the transpose of x": (fq(SQUARE, out=SQUARE.T), "out", "out overlaps x"),
    "out x in the other byte order": (fq(SQUARE, out=SQUARE.view(">f4")), "out", "out overlaps x"),
    "out over x of another type": (dq(OUT.view(np.int8)[:, :4], 1.0, out=OUT), "out", "out overlaps x"),
    "out overlapping the scale": (dq(X, OUT[0], out=OUT), "out", "out overlaps scale"),
    "levels 1": (fq(F, levels=1), "levels", "levels=1"),
    "levels True": (fq(F, levels=True), "levels", "levels=True"),
    "levels 2.0": (fq(F, levels=2.0), "levels", "levels=2.0"),
    "levels beyond float32": (fq(F, levels=2**24 + 2), "levels", "16777217"),
    "levels a list": (fq(F, levels=[16]), "levels", "levels=[16]"),
    "levels beyond float64": (fq(F.astype("f8"), levels=2**53 + 2), "levels", "9007199254740993"),
    "range beyond x": (fq(F[0], np.zeros((3, 4), np.float32), 1.0, 0.0, 1.0), "broadcast", "input_low"),
    "range of another length": (fq(F, 0.0, [1.0] * 3, 0.0, 1.0), "broadcast", "input_high has shape (3,)"),
    "range of another type": (fq(F, 0.0, 1.0, np.zeros(4), 1.0), "dtype", "output_low is float64"),
    "range of another type for float16": (fq(F.astype("f2"), 0.0, 1.0, np.float32(0), 1.0), "dtype", "output_low"),
    "range too large": (fq(F.astype("f2"), 0.0, 1.0, 0.0, 1e6), "value", "output_high"),
    "auto_broadcast": (fq(F, auto_broadcast="left"), "broadcast", "auto_broadcast='left'"),
    "auto_broadcast a list": (fq(F, auto_broadcast=["numpy"]), "broadcast", "auto_broadcast=['numpy']"),
    "broadcast_axis a list": (fq(F, auto_broadcast="pdpd", broadcast_axis=[1]), "axis", "broadcast_axis=[1]"),
    "broadcast_axis": (fq(F, auto_broadcast="pdpd", broadcast_axis=3), "axis", "broadcast_axis=3"),
    "pdpd past the end": (
        fq(F, [0.0] * 4, 1.0, 0.0, 1.0, auto_broadcast="pdpd", broadcast_axis=2),
        "broadcast",
        "reaches past x",
    ),
    "integer x": (fq(X), "dtype", "x is int8"),
}


@pytest.mark.parametrize(("request_", "reason", "part"), REQUESTS.values(), ids=REQUESTS)
def test_refused(request_, reason, part):
    with pytest.raises(chunkq.SpecError) as caught:
        request_()
    assert caught.value.reason == reason
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("wrong", [1.0, True])
def test_an_accepted_request_does_not_open_the_door_to_its_look_alike(wrong):
    """1 == 1.0 == True: an answer remembered for one must not be given for another."""
    dq(X, [1.0] * 4, axis=1)()
    fq(F, auto_broadcast="pdpd", broadcast_axis=1)()
    fq(F, levels=2)()
    for request_, reason in (
        (dq(X, [1.0] * 4, axis=wrong), "axis"),
        (fq(F, auto_broadcast="pdpd", broadcast_axis=wrong), "axis"),
        (fq(F, levels=float(2)), "levels"),
    ):
        with pytest.raises(chunkq.SpecError) as caught:
            request_()
        assert caught.value.reason == reason


def test_errors_are_of_the_built_in_kind_and_survive_pickling():
    error = pickle.loads(pickle.dumps(chunkq.SpecError("axis", "axis=9")))
    assert (error.reason, str(error)) == ("axis", "axis=9")
    assert isinstance(error, ValueError)
    assert isinstance(error, chunkq.ChunkqError)
    assert isinstance(pickle.loads(pickle.dumps(chunkq.RunError("lost"))), RuntimeError)


def test_reasons_are_a_closed_list():
    with pytest.raises(AssertionError):
        chunkq.SpecError("because", "no such reason")
    assert "axis" in errors.REASONS


def test_out_of_every_layout_that_shares_nothing():
    for out in (np.zeros((4, 3), np.float32).T, np.zeros((6, 8), np.float32)[::2, ::2], np.zeros((3, 4), np.float32)[::-1],
                np.asmatrix(np.zeros((3, 4), np.float32))):  # fmt: skip
        assert dq(X + 1, 2.0, out=out)() is out
        assert (np.asarray(out) == 2).all()


def test_a_zarr_scale_that_lacks_objects():
    """In memory too; zeros are no scale, so that nothing was left out as fill."""
    scale = zarr.create_array(zarr.storage.MemoryStore(), shape=(4,), chunks=(2,), dtype="float32")
    scale[:2] = 1.0
    with pytest.raises(chunkq.RunError, match="lacks 1 stored objects, among them c/1"):
        chunkq.dequantize_linear(X, scale)
    zero_point = zarr.create_array(zarr.storage.MemoryStore(), shape=(), dtype="int8")  # 0, which zarr leaves out
    assert (chunkq.dequantize_linear(X + 1, 2.0, zero_point) == 2).all()
