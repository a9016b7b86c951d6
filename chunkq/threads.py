"""How many threads a call may use, and what fork does to them. Imports errors and kernels."""

from __future__ import annotations

import os
import sys

from chunkq.errors import SpecError
from chunkq.kernels import kernels
from chunkq.spec import as_integer

#: Elements a thread must have to itself before a second one pays for its start.
ELEMENTS_PER_THREAD = 1 << 18

# A team of threads does not survive fork. Where OpenMP can end the team first, the child starts its own; where it
# cannot, or where another library may have forked a running team, the child keeps to one thread.
_multiprocessing = sys.modules.get("multiprocessing")  # loaded in every child of it, and slow to load elsewhere
_single = (
    _multiprocessing is not None
    and _multiprocessing.parent_process() is not None
    and _multiprocessing.get_start_method(True) == "fork"
)


def _enter_child() -> None:
    global _single
    _single = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=kernels.pause_threads)
    if not kernels.pause_threads():
        os.register_at_fork(after_in_child=_enter_child)


def _cgroup_quota() -> float | None:
    """CPUs that the control group grants, None where there is no limit to read."""
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            words = " ".join(_read(f"/sys/fs/cgroup/{name}") for name in files).split()
        except OSError:
            continue
        quota, period = words
        return int(quota) / int(period) if quota.isdecimal() else None
    return None


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


def available_cpus() -> int:
    """CPUs this process may use: its affinity, and no more than its control group grants."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_quota()
    return count if quota is None else max(1, min(count, round(quota)))


def _default() -> int:
    text = os.environ.get("CHUNKQ_NUM_THREADS", "")
    if not text:
        return available_cpus()
    if not text.isdecimal() or int(text) < 1:
        raise SpecError("n_threads", f"CHUNKQ_NUM_THREADS={text!r}: expected a positive integer")
    return int(text)


DEFAULT_THREADS = _default()

#: OpenMP ends the process when it is refused a thread.
MOST_THREADS = max(64, available_cpus())


def thread_count(n_threads: int | None, size: int) -> int:
    """Threads for a call on `size` elements.

    Raises
    ------
    SpecError
        Reason ``n_threads``.
    """
    if n_threads is None:
        if size < ELEMENTS_PER_THREAD:
            return 1
        return 1 if _single else min(DEFAULT_THREADS, size // ELEMENTS_PER_THREAD + 1)
    wanted = as_integer(n_threads)
    if wanted is None or wanted < 1:
        raise SpecError("n_threads", f"n_threads={n_threads!r}: expected a positive integer or None")
    return 1 if _single else min(wanted, MOST_THREADS)
