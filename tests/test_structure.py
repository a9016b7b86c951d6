"""The shape of the package: imports run one way, and what is heavy is imported late."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import chunkq

PACKAGE = Path(chunkq.__file__).parent

# a module may import those of earlier rows
ORDER = [
    {"errors", "buffers", "interrupts"},
    {"dtypes", "memory", "retry", "transport", "figures"},
    {"spec", "grid", "kernels", "page"},
    {"threads", "packing", "layout", "places", "direct"},
    {"run", "lock", "contents"},
    {"store", "groups", "exact"},
    {"operands", "objects", "stored", "statistics"},
    {"shards", "admission"},
    {"listing"},
    {"target"},
    {"units", "graph", "ops"},
    {"execute", "linear", "calibration", "comparison"},
    {"cluster", "metadata"},
    {"workers", "journal"},
    {"report"},
    {"job"},
    {"planning"},
    {"checking", "streaming", "demo", "arguments", "console", "survey"},
    {"options"},
    {"calibrating", "comparing", "kept"},
    {"measuring"},
    {"cli"},
]
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}
# each calls what knows its types
LATE = {("ops", "graph"), ("ops", "metadata"), ("calibration", "kept")}


def imports(path):
    """Modules of chunkq and outside that a file imports, wherever in the file, types aside."""
    tree = ast.parse(path.read_text())
    typing_only = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ([f"chunkq.{a.name}" for a in node.names] if node.module == "chunkq" else [node.module])


def test_every_module_has_its_place():
    assert {p.stem for p in PACKAGE.glob("*.py")} - {"__init__"} | {"kernels"} == set(RANK)


@pytest.mark.parametrize("name", sorted(set(RANK) - {"kernels"}))
def test_imports_run_one_way(name):
    for module in imports(PACKAGE / f"{name}.py"):
        other = module.split(".")[1] if module.startswith("chunkq.") else None
        if other in RANK and other != name and (name, other) not in LATE:
            assert RANK[other] < RANK[name], f"{name} imports {other}"


def test_few_modules_touch_zarr_and_one_dask_array():
    users = {path.stem: set(imports(path)) for path in PACKAGE.glob("*.py")}
    assert {name for name, found in users.items() if any(m.startswith("dask.array") for m in found)} == {"graph"}
    zarr_users = {name for name, found in users.items() if any(m.split(".")[0] == "zarr" for m in found)}
    # units sets zarr's configuration; the others read, write and list
    assert zarr_users == {
        "admission", "contents", "direct", "kept", "listing", "lock", "objects", "places", "shards", "store", "stored",
        "target", "units"
    }  # fmt: skip


def test_importing_chunkq_is_light():
    code = "import sys, chunkq; print([m for m in ('dask', 'zarr', 'click', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_running_a_plan_does_not_import_dask_array():
    code = "import sys, chunkq.job; print('dask.array' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
