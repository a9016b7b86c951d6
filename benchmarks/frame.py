"""The frame of every benchmark: check each answer, then time the contenders in turn, then report. Imports no peer.

Contenders are interleaved: each runs once in every round and the order turns by one from round to round, so that a noisy
neighbour or a falling clock hits all of them. A ratio is the median of the rounds' own ratios. A contender whose answer is
wrong is never timed.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

ROUNDS = 7
QUICK_ROUNDS = 3

#: The contender that the ratios refer to.
SUBJECT = "chunkq"

#: CPUs in use by others from which on the table says so.
NOISE = 0.1

PACKAGES = (
    *("chunkq", "numpy", "ml_dtypes", "onnxruntime", "openvino", "torch", "numexpr"),
    *("dask", "zarr", "numcodecs", "cubed", "tensorstore"),
)

Array = np.ndarray[Any, np.dtype[Any]]
Check = Callable[[Any], str]


class WrongAnswer(Exception):
    """A contender's answer is not the expected one; the message says where."""


def _nothing() -> None:
    """What most contenders need before each run."""


@dataclass(frozen=True)
class Contender:
    """One way to compute a case.

    Attributes
    ----------
    run : callable
        Does the work and returns the answer; None for a peer that is not installed.
    check : callable
        Takes the answer; returns a remark ("" for exact) or raises `WrongAnswer`.
    before : callable
        Runs before each `run`, untimed.
    facts : callable
        Takes the last answer; returns what else the JSON should hold.
    remark : str
        For the table.
    moved : int, optional
        Bytes it reads and writes, where they are not the case's.
    target : float, optional
        The ratio that is aimed at: its time over chunkq's, at least this.
    share : float, optional
        The same for a copy: chunkq's bytes a second over its own.
    """

    run: Callable[[], Any] | None
    check: Check = lambda answer: ""
    before: Callable[[], None] = _nothing
    facts: Callable[[Any], dict[str, Any]] = lambda answer: {}
    remark: str = ""
    moved: int | None = None
    target: float | None = None
    share: float | None = None


@dataclass(frozen=True)
class Case:
    """Contenders for the same work; `calls` runs in a row are timed as one where one is too short to time.

    `moved` is the bytes read and written, for a rate in GB/s. `most_rounds` bounds the rounds of all its contenders, where
    one is so slow that more would take too long.
    """

    name: str
    elements: int
    contenders: dict[str, Contender]
    calls: int = 1
    moved: int | None = None
    most_rounds: int | None = None


Maker = Callable[[], Case]


@dataclass(frozen=True)
class Row:
    """A line of the table; times are seconds of one call. `ratio` is this contender's time over chunkq's."""

    case: str
    contender: str
    elements: int
    status: str  # "timed", "absent" or "wrong"
    remark: str
    times: tuple[float, ...] = ()
    ratio: float | None = None
    moved: int | None = None
    cores: float | None = None  # processor time over wall time: what it used, whatever it was given
    aim: str = ""  # the target, and whether it was met
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def median(self) -> float:
        return median(self.times)

    @property
    def spread(self) -> float:
        """Slowest less fastest round, over the median."""
        return (max(self.times) - min(self.times)) / self.median

    @property
    def rate(self) -> str:
        moved = f", {self.moved / self.median / 1e9:.2f} GB/s" if self.moved else ""
        return f"{self.median / self.elements * 1e9:.3f} ns/element{moved}"

    def to_dict(self) -> dict[str, Any]:
        row = asdict(self) | self.facts
        del row["facts"]
        if self.times:
            row |= {"median": self.median, "min": min(self.times), "max": max(self.times), "spread": self.spread}
            row["ns_per_element"] = self.median / self.elements * 1e9
        if self.times and self.moved:
            row["gb_per_second"] = self.moved / self.median / 1e9
        return row


def aiming(contenders: dict[str, Contender], share: float | None = None, **targets: float) -> dict[str, Contender]:
    """The contenders with what is aimed at: ratios by name, and the share of memcpy's bytes a second."""
    aims = {name: replace(c, target=targets.pop(name, None)) for name, c in contenders.items()}
    if targets:
        raise KeyError(f"no such contenders: {', '.join(targets)}")
    if share is not None:
        aims["memcpy"] = replace(aims["memcpy"], share=share)
    return aims


def absent(package: str, error: ImportError) -> Contender:
    """A peer that is not installed: a row that says how to get it."""
    return Contender(None, remark=f"absent ({error.name or package} is missing): pip install 'chunkq[bench]' {package}")


# ---- checks


def exact(expected: Array) -> Check:
    """The very bits, signs of zeros and NaNs included."""

    def check(answer: Array) -> str:
        if answer.dtype != expected.dtype or answer.shape != expected.shape:
            raise WrongAnswer(f"is {answer.dtype} {answer.shape}, expected {expected.dtype} {expected.shape}")
        bits = f"u{expected.dtype.itemsize}"
        different = np.ascontiguousarray(answer).view(bits) != np.ascontiguousarray(expected).view(bits)
        if different.any():
            at = tuple(int(i) for i in np.unravel_index(int(np.argmax(different)), expected.shape))
            raise WrongAnswer(
                f"differs in {np.count_nonzero(different)} of {expected.size} elements, first at {at}: "
                f"{answer[at]!r}, expected {expected[at]!r}"
            )
        return ""

    return check


def within_one_level(expected: Array, level: Array) -> Check:
    """For a peer known to be inexact: no element more than one level off; the remark says how many are off at all."""

    def check(answer: Array) -> str:
        distance = np.abs(answer - expected)
        # a level is itself rounded; written so that NaN fails
        if not bool(np.all(distance <= level * np.float32(1.001))):
            raise WrongAnswer(f"is more than one level off somewhere: {float(np.nanmax(distance / level)):.3g} levels")
        share = np.count_nonzero(distance) / expected.size
        return f"not exact: {share:.0%} of elements differ, by at most one level" if share else ""

    return check


# ---- timing


def measure(case: Case, rounds: int) -> list[Row]:
    """Check every contender, time those that answered right, and give one row for each."""
    remarks, failures = {}, {}
    for name, contender in case.contenders.items():
        if contender.run is None:
            continue
        contender.before()
        try:
            remarks[name] = "; ".join(filter(None, (contender.remark, contender.check(contender.run()))))
        except WrongAnswer as error:
            failures[name] = f"WRONG ANSWER, not timed: {error}"
    load = OtherLoad()
    times, cores, last = _time(case, list(remarks), min(rounds, case.most_rounds or rounds))
    others = load.cpus()
    rows = []
    for name, contender in case.contenders.items():
        if name not in remarks:
            status = "wrong" if name in failures else "absent"
            rows.append(Row(case.name, name, case.elements, status, failures.get(name, contender.remark)))
            continue
        subject = times.get(SUBJECT)
        ratio = median(a / b for a, b in zip(times[name], subject, strict=True)) if subject else None
        facts = contender.facts(last[name]) | {"other_cpus": others}
        own = tuple(times[name])
        used, moved = median(cores[name]), contender.moved or case.moved
        aim = _aim(contender, ratio, case.moved)
        rows.append(Row(case.name, name, case.elements, "timed", remarks[name], own, ratio, moved, used, aim, facts))
    return rows


def _aim(contender: Contender, ratio: float | None, moved: int | None) -> str:
    """What is aimed at beside this contender, and whether this run saw it."""
    said = []
    if ratio is not None and contender.target is not None:
        said.append(f">= {contender.target:.2g} x: {'met' if ratio >= contender.target else 'MISSED'}")
    if ratio is not None and contender.share is not None and contender.moved and moved:
        share = ratio * moved / contender.moved
        met = "met" if share >= contender.share else "MISSED"
        said.append(f"{share:.0%} of its bytes/s, >= {contender.share:.0%}: {met}")
    return "; ".join(said)


Series = dict[str, list[float]]


def _time(case: Case, names: list[str], rounds: int) -> tuple[Series, Series, dict[str, Any]]:
    """Seconds of one call and cores used, round by round, and each contender's last answer."""
    times: Series = {name: [] for name in names}
    cores: Series = {name: [] for name in names}
    last: dict[str, Any] = {}
    for i in range(rounds):
        turn = i % max(1, len(names))
        for name in names[turn:] + names[:turn]:
            contender = case.contenders[name]
            run = contender.run
            assert run is not None  # absent ones have no name here
            contender.before()
            used, began = _processor_seconds(), time.perf_counter()
            for _ in range(case.calls):
                last[name] = run()
            seconds = time.perf_counter() - began
            times[name].append(seconds / case.calls)
            cores[name].append((_processor_seconds() - used) / seconds)
    return times, cores, last


def _processor_seconds() -> float:
    """Of all threads of this process and of its children that have ended."""
    usages = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class OtherLoad:
    """CPUs that others keep busy meanwhile: what the machine did less what this process and its ended children did.

    Without it a table made on a busy machine looks like one made on an idle one: a kernel whose threads wait for each other
    then seems to be slower on two cores than on one.
    """

    def __init__(self) -> None:
        self.began, self.busy, self.own = time.perf_counter(), self._busy(), _processor_seconds()

    @staticmethod
    def _busy() -> float | None:
        try:
            ticks = [int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        except OSError:
            return None  # no Linux: the table then says nothing of it
        idle = ticks[3] + ticks[4]
        return (sum(ticks) - idle) / os.sysconf("SC_CLK_TCK")

    def cpus(self) -> float | None:
        """Since this object was made, on average; stolen by the hypervisor counts too."""
        busy, seconds = self._busy(), time.perf_counter() - self.began
        if busy is None or self.busy is None or seconds < 0.5:
            return None  # the counters tick a hundred times a second: too coarse for less
        return max(0.0, (busy - self.busy - (_processor_seconds() - self.own)) / seconds)


# ---- the report


def environment() -> dict[str, Any]:
    """The machine, the commit and the versions that figures depend on."""
    import chunkq.kernels
    from chunkq.threads import DEFAULT_THREADS

    return {
        "cpu": _cpu_model(),
        "cores": DEFAULT_THREADS,
        "isa": chunkq.kernels.ISA,
        "commit": _commit(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str | None:
    if package == SUBJECT:  # a source tree has no metadata
        import chunkq

        return chunkq.__version__
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def _commit() -> str:
    """The commit of the source tree, marked where chunkq has been changed since; "unknown" outside a repository."""
    root = Path(__file__).resolve().parent.parent
    git = ["git", "-C", os.fspath(root)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain", "chunkq"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + (" + changes" if changed.stdout else "") + _stale()


def _stale() -> str:
    """A mark where the kernels in use were built before their source was last changed: the commit then says nothing."""
    from chunkq.kernels import kernels

    built = Path(str(kernels.__file__))
    sources = [s for kind in ("pyx", "pxi", "h") for s in built.parent.glob(f"*.{kind}")]  # none where it is installed
    return " (kernels older than their source)" if any(_newer(s, built) for s in sources) else ""


def _newer(source: Path, built: Path) -> bool:
    return source.stat().st_mtime > built.stat().st_mtime


def format_seconds(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.2f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _cells(row: Row, rounds: int) -> tuple[str, ...]:
    if row.status != "timed":
        return row.case, row.contender, "-", "-", "-", "-", "-", "-", "-", row.remark
    ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
    times = format_seconds(row.median), format_seconds(min(row.times)), f"{row.spread:.0%}"
    peak = f"peak {row.facts['peak_memory'] / 2**20:.0f} MiB" if "peak_memory" in row.facts else ""
    others = row.facts.get("other_cpus") or 0.0
    noise = f"other processes kept {others:.1f} CPUs busy" if others >= NOISE and row.contender == SUBJECT else ""
    fewer = f"{len(row.times)} rounds" if len(row.times) < rounds and row.contender == SUBJECT else ""
    remark = "; ".join(filter(None, (row.remark, peak, fewer, noise)))
    return row.case, row.contender, *times, f"{row.cores:.1f}", row.rate, ratio, row.aim, remark


def markdown(rows: list[Row], about: dict[str, Any], legend: str) -> str:
    """The table, with what the figures depend on above it."""
    head = ("case", "contender", "median", "min", "spread", "cores", "rate", "time / chunkq's", "target", "remark")
    table = [head, tuple("-" * len(h) for h in head), *(_cells(row, about["rounds"]) for row in rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(head) - 1)] + [0]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in table]
    versions = ", ".join(f"{name} {version or 'absent'}" for name, version in about["versions"].items())
    facts = (
        f"{about['cpu']}, {about['cores']} cores, {about['isa']} kernels, commit {about['commit']}, "
        f"Python {about['python']}, {versions}; {about['elements']:,} elements, medians of {about['rounds']} "
        "interleaved rounds; above 1 in the ratio column, chunkq is faster."
    )
    return "\n".join([facts, "", *lines, "", legend])
