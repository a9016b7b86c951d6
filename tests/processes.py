"""Command-line runs as real processes: started, stopped at a chosen moment, and what they leave on the disk."""

import hashlib
import os
import select
import subprocess
import sys
from pathlib import Path

#: Seconds after which a test gives up on what should have happened long before.
PATIENCE = 60


def start(*arguments):
    """A command-line run in a session of its own."""
    command = [sys.executable, "-m", "chunkq.cli", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def run(*arguments):
    """A command-line run to its end; its exit code and what it said."""
    process = start(*arguments)
    out, err = process.communicate(timeout=2 * PATIENCE)
    return process.returncode, out, err


def finished(*arguments):
    """What a run that must end well printed on stdout."""
    code, out, err = run(*arguments)
    assert code == 0, err
    return out


def descendants(pid):
    """Every living process below one."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in task.read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue
        for child in children:
            found += [child, *descendants(child)]
    return found


def all_ended(pids, seconds=15):
    """Wait until processes are gone; False where one stays."""
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            waiting = select.poll()
            waiting.register(descriptor, select.POLLIN)
            if not waiting.poll(seconds * 1000):
                return False
        finally:
            os.close(descriptor)
    return True


def holds_lock(process, target):
    """Wait until a run holds the lock of its target; False where it ended before."""
    lock = Path(target) / "chunkq.lock"
    while process.poll() is None:
        if lock.exists():
            return True
        select.select([], [], [], 0.002)
    return False


def contents(folder):
    """Every file below a folder: its name and the digest of its bytes."""
    folder = Path(folder)
    files = [path for path in folder.rglob("*") if not path.is_dir()]
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def versions(folder):
    """Every stored object below a folder, and which write of it is there."""
    folder = Path(folder)
    found = {}
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if path.is_file() and not name.endswith((".partial", ".lock")) and "zarr.json" not in name:
            status = path.stat()
            found[name] = (status.st_ino, status.st_mtime_ns)
    return found
