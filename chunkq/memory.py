"""How much memory there is and how much a run uses. Imports errors only; reads /proc where there is one."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import sys
from collections.abc import Collection
from pathlib import Path

from chunkq.errors import SpecError

KIB = 1 << 10
MIB = 1 << 20

_UNITS = {"": 1, "b": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("kmgtp", start=1)
    for suffix, base in (("", 1000), ("b", 1000), ("i", 1024), ("ib", 1024))
}


def parse_size(size: int | str, argument: str = "max_mem") -> int:
    """Bytes of a size such as 1000000, "512MiB" or "2GB".

    Raises
    ------
    SpecError
        Reason ``max_mem``.

    Examples
    --------
    >>> parse_size("512MiB")
    536870912
    """
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*", size) if isinstance(size, str) else None
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None or float(match[1]) * unit < 1:
        raise SpecError("max_mem", f"{argument}={size!r}: expected bytes or a size such as '512MiB' or '2GB'")
    return int(float(match[1]) * unit)


def format_size(size: float) -> str:
    """Bytes for people: three digits and a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1000 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if size >= 100 or unit == "B" else f"{size:.3g} {unit}"


def available() -> int:
    """Bytes this process could still use: of the machine, and of its control group where that says less."""
    try:
        text = Path("/proc/meminfo").read_text()
        free = int(re.findall(r"MemAvailable:\s+(\d+)", text)[0]) * KIB
    except (OSError, IndexError):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            most = Path("/sys/fs/cgroup", limit).read_text().strip()
            now = Path("/sys/fs/cgroup", used).read_text().strip()
        except OSError:
            continue
        if most.isdecimal() and now.isdecimal():
            free = min(free, max(0, int(most) - int(now)))
    return free


def _status(pid: int | str, field: str) -> int:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    match = re.search(rf"{field}:\s+(\d+) kB", text)
    return int(match[1]) * KIB if match else 0


def resident() -> int:
    """Resident bytes of this process now."""
    return _status("self", "VmRSS") or _peak_by_rusage()


def _peak_by_rusage() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * KIB


def reset_peak() -> None:
    """Forget this process's past peak, so that the next one read is of what follows."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return  # not Linux, or not allowed: the peak then includes the past and is only larger


def children(pid: int) -> list[int]:
    """Processes that a process has started and that live."""
    found = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    except OSError:
        pass  # the process is gone, or this system does not tell
    return found


def own_peak() -> int:
    """Peak resident bytes of this process, since the last `reset_peak` where there was one."""
    return _status("self", "VmHWM") or _peak_by_rusage()


def peak_of_tree(without: Collection[int] = ()) -> dict[int, int]:
    """Peak resident bytes of this process and of each of its living descendants, by process id.

    Their sum is an upper bound of the tree's true peak: the peaks need not coincide, and shared pages count twice.
    Children in `without`, and theirs, are left out.
    """
    peaks = {os.getpid(): own_peak()}
    pids = children(os.getpid())
    while pids:
        pid = pids.pop()
        if pid not in without:
            peaks[pid] = _status(pid, "VmHWM")
            pids += children(pid)
    return peaks


#: By how much the peak may creep up where `keep_memory_flat` was not called.
CREEP = 4 / 3

_flat = False


def creep() -> float:
    """Factor for what a run allocates in this process."""
    return 1.0 if _flat else CREEP


def keep_memory_flat() -> None:
    """Make glibc give large buffers back at once; its adaptive threshold lets the peak creep up by a third.

    For processes that are chunkq's own: the command line and its workers.
    """
    global _flat
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:  # glibc only
            _flat = mallopt(-3, MIB) == 1  # M_MMAP_THRESHOLD
