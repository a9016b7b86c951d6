"""The exception tree. Imports nothing of chunkq."""

#: Every reason a request can be refused for; `SpecError.reason` is one of them.
REASONS = frozenset(
    {
        "argument",  # a keyword that does not apply, or a value of the wrong kind
        "axis",  # out of range, or not to be told apart
        "block_size",  # negative, or not of x's rank
        "broadcast",  # a FakeQuantize range that does not fit x
        "chunks",  # a chunk or shard shape that does not fit the array
        "compressors",  # an unknown codec
        "dtype",  # an element type the operator does not take
        "float_zero_point",  # float8 and float4 have no zero point other than 0
        "int32_zero_point",  # ONNX: int32 has no zero point other than 0
        "isa",  # CHUNKQ_ISA names what this build or CPU lacks
        "levels",  # not an integer from 2 to the largest exact one
        "masked",  # a mask would be lost
        "max_mem",  # below the least that the run needs
        "metadata",  # what stands in the source and what was asked for disagree, or it cannot be read
        "n_threads",  # not a positive integer
        "out",  # wrong shape, dtype or memory
        "same_array",  # source and target share stored objects
        "scale_shape",  # not scalar, not 1-D of x.shape[axis], not blocked
        "scheduler",  # unknown, or not reachable
        "shape",  # an unknown or unfit tensor shape
        "source",  # not a readable zarr array
        "target",  # not writable, or not ours to replace
        "target_exists",  # there already, and overwrite was not asked for
        "value",  # a number its element type cannot hold
        "zero_point_shape",  # not the shape of scale
    }
)


class ChunkqError(Exception):
    """Base of every error that chunkq raises on purpose."""


class SpecError(ChunkqError, ValueError):
    """The request is wrong; nothing was computed or written.

    Attributes
    ----------
    reason : str
        Which rule was broken, one of `chunkq.errors.REASONS`.
    """

    def __init__(self, reason: str, message: str) -> None:
        if reason not in REASONS:
            raise AssertionError(f"unknown reason {reason!r}")
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        # Errors travel between processes; the default would lose the reason.
        return type(self), (self.reason, str(self))


class RunError(ChunkqError, RuntimeError):
    """The request was right but the run failed; the message says where."""
