"""Benchmarks of chunkq against its peers: ``python -m benchmarks SUITE``; ``--help`` names the suites and says more.

``python -m`` puts the current folder first on the module path. In a source tree that was installed but not built in place
that would import a chunkq without compiled kernels; the tree then steps behind the installed package.
"""

import os
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent

if "chunkq" not in sys.modules and not any((_ROOT / f"chunkq/kernels/_cpu{s}").exists() for s in EXTENSION_SUFFIXES):
    _own = [entry for entry in sys.path if os.path.realpath(entry or os.curdir) == str(_ROOT)]
    sys.path[:] = [entry for entry in sys.path if entry not in _own] + _own
