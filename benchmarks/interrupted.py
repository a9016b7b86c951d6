"""A large run that is killed twice, continued, and verified: ``python -m benchmarks.interrupted --size 8GiB --out FILE``.

What is run are the commands a user would type, each in a process of its own. The first two are killed with SIGKILL, the
moment a third and two thirds of the target's objects exist.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.frame import environment
from chunkq.memory import format_size, parse_size
from chunkq.target import create_source

COLUMNS, ROWS = 4096, 1024  # of a chunk: 4 MiB of uint8, 16 MiB of float32


def write_source(folder: Path, size: int) -> None:
    """Bell-shaped codes, as weights have them, and a scale and zero point for each row."""
    rng = np.random.default_rng(0)
    chunks = max(3, size // (ROWS * COLUMNS))
    rows = chunks * ROWS
    array = create_source(str(folder / "x.zarr"), (rows, COLUMNS), (ROWS, COLUMNS), "uint8", ("row", "column"))
    block = np.clip(np.rint(rng.standard_normal((ROWS, COLUMNS), np.float32) * 24 + 128), 0, 255).astype(np.uint8)
    for index in range(chunks):
        # every chunk another one, at the cost of a copy
        array[index * ROWS : (index + 1) * ROWS] = np.roll(block, index * 7919 + 1)
    np.save(folder / "scale.npy", rng.uniform(0.001, 0.1, rows).astype(np.float32))
    np.save(folder / "zero_point.npy", rng.integers(100, 156, rows, np.uint8))


def objects(target: Path) -> int:
    """Stored objects of the target so far."""
    return sum(len(files) for _, _, files in os.walk(target / "c"))


def started(command: list[str], folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "chunkq.cli", *command],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def killed_at(command: list[str], folder: Path, count: int) -> dict[str, Any]:
    """Start a command and kill it when so many objects are there."""
    began = time.perf_counter()
    process = started(command, folder)
    while objects(folder / "y.zarr") < count and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return {
        "ended by": f"signal {-process.returncode}" if process.returncode < 0 else f"exit code {process.returncode}",
        "seconds": round(time.perf_counter() - began, 1),
        "objects afterwards": objects(folder / "y.zarr"),
    }


def finished(command: list[str], folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run a command to its end; how it ended, and the JSON document it printed."""
    began = time.perf_counter()
    process = started([*command, "--json"], folder)
    out, err = process.communicate()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with exit code {process.returncode}: {err or out}")
    return {"ended by": "exit code 0", "seconds": round(time.perf_counter() - began, 1)}, json.loads(out)


def rounded(value: Any) -> Any:
    """Three digits are enough of a time or a rate."""
    return f"{value:.3g}" if isinstance(value, float) else value


def report(size: int, max_mem: str, folder: Path) -> str:
    """Do it all and describe it in Markdown."""
    about = environment()
    write_source(folder, size)
    run = ["dequantize", "x.zarr", "y.zarr", "--scale", "scale.npy", "--zero-point", "zero_point.npy"]
    run += ["--max-mem", max_mem, "--no-progress"]
    units = size // (ROWS * COLUMNS)
    steps = [("run", killed_at(run, folder, units // 3)), ("the same again", killed_at(run, folder, 2 * units // 3))]
    ended, document = finished(run, folder)
    steps.append(("the same again", ended | document["report"]))
    ended, again = finished(run, folder)
    steps.append(("the same again", ended | {"units_done": again["report"]["units_done"]}))
    ended, checked = finished(["verify", "x.zarr", "y.zarr", "--max-mem", max_mem, "--no-progress"], folder)
    steps.append(("verify", ended | checked))
    plan, done = document["plan"], document["report"]
    stored = {
        name: sum(f.stat().st_size for f in (folder / name).rglob("*") if f.is_file()) for name in ("x.zarr", "y.zarr")
    }
    lines = [
        "# A large run, killed twice",
        "",
        f"Made by `python -m benchmarks.interrupted --size {format_size(size).replace(' ', '')} --max-mem {max_mem}`: "
        f"{format_size(plan['bytes_read'])} uint8 ({format_size(stored['x.zarr'])} stored) to "
        f"{format_size(plan['bytes_written'])} float32 ({format_size(stored['y.zarr'])} stored), a scale and a zero point "
        f"for each row, {plan['units']} units, {plan['workers']} {plan['scheduler']}, {plan['codecs']}.",
        "",
        f"Memory of the last part: {format_size(done['peak_memory'])} measured, "
        f"{format_size(done['projected_memory'])} projected, {format_size(done['max_mem'])} allowed. "
        f"Verified: {checked['checked']} of {checked['units']} units, "
        f"{len(checked['differing'])} differ, {len(checked['failed'])} unreadable, {checked['missing_objects']} missing.",
        "",
        "| step | how it went |",
        "|---|---|",
    ]
    lines += [
        f"| {name} | {', '.join(f'{k}: {rounded(v)}' for k, v in what.items() if v not in ([], ()))} |"
        for name, what in steps
    ]
    lines += ["", "| machine | |", "|---|---|", *(f"| {k} | {v} |" for k, v in about.items())]
    return "\n".join(lines) + "\n"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--size", default="8GiB", help="bytes of the source; the result has four times as many")
    options.add_argument("--max-mem", default="1GiB")
    options.add_argument("--folder", help="where there is room for both [a temporary one]")
    options.add_argument("--out", type=Path, help="write the report there as well")
    given = options.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="chunkq-large-", dir=given.folder))
    try:
        text = report(parse_size(given.size), given.max_mem, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(text)
    if given.out:
        given.out.write_text(text)


if __name__ == "__main__":
    main()
