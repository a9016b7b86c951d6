"""CPU features, built without special flags so that it can be imported anywhere."""

cdef extern from "cpu.h":
    int cq_has_avx2()


def supported() -> tuple[str, ...]:
    """Name the instruction sets this CPU and operating system can run, best last."""
    return ("baseline", "avx2") if cq_has_avx2() else ("baseline",)
