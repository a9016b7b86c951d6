"""The compiled modules: one row of flags per instruction set, the OpenMP probe, every Cython directive.

CHUNKQ_OPENMP=auto|on|off   use OpenMP where it compiles and links (auto), insist on it, or build without
CHUNKQ_DEBUG=1              build with bounds checks and without optimisation
"""

import os
import platform
import sys
import tempfile
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError

KERNELS = "chunkq/kernels"
DEBUG = os.environ.get("CHUNKQ_DEBUG", "0") == "1"
OPENMP = os.environ.get("CHUNKQ_OPENMP", "auto")
MSVC = sys.platform == "win32"
X86 = platform.machine().lower() in ("x86_64", "amd64")

# The same bits on every instruction set: no contraction, no fast-math. Without -fno-trapping-math (it changes no bits)
# gcc does not vectorise FakeQuantize's comparisons.
EXACT = ["/O2", "/fp:precise"] if MSVC else ["-O3", "-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno"]
ISA_FLAGS = {"_kernels": []}
if X86:
    ISA_FLAGS["_kernels_avx2"] = ["/arch:AVX2"] if MSVC else ["-mavx2", "-mf16c"]

DIRECTIVES = {
    "language_level": 3,
    "boundscheck": DEBUG,
    "wraparound": False,
    "initializedcheck": DEBUG,
    "nonecheck": DEBUG,
    "cdivision": True,
    "overflowcheck": False,
    "embedsignature": True,
    # a prange inside a nogil function cannot raise; typing everything keeps Python objects out of the loops
    "legacy_implicit_noexcept": False,
}

OPENMP_CHOICES = (
    [(["/openmp"], [])] if MSVC else [(["-fopenmp"], ["-fopenmp"]), (["-Xpreprocessor", "-fopenmp"], ["-lomp"])]
)
OPENMP_PROGRAM = "#include <omp.h>\nint main(void) { return omp_get_max_threads() < 1; }\n"


def extensions() -> list[Extension]:
    flags = (["/Od"] if MSVC else ["-O1", "-g", "-ffp-contract=off"]) if DEBUG else EXACT
    depends = [
        f"{KERNELS}/{name}"
        for name in ("_kernels.pyx", "statistics.pxi", "elements.h", "statistics.h", "threads.h", "crc32c.h")
    ]
    kernels = [
        Extension(
            f"chunkq.kernels.{name}",
            [f"{KERNELS}/{name}.pyx"],
            depends=depends,
            include_dirs=[KERNELS],
            extra_compile_args=flags + isa,
        )
        for name, isa in ISA_FLAGS.items()
    ]
    cpu = Extension(
        "chunkq.kernels._cpu",
        [f"{KERNELS}/_cpu.pyx"],
        depends=[f"{KERNELS}/cpu.h"],
        include_dirs=[KERNELS],
    )
    return [*kernels, cpu]


class BuildKernels(build_ext):
    """build_ext that asks the compiler itself whether OpenMP works."""

    def build_extensions(self) -> None:
        if OPENMP not in ("auto", "on", "off"):
            raise SystemExit(f"CHUNKQ_OPENMP={OPENMP!r}: expected auto, on or off")
        found = None if OPENMP == "off" else self.openmp_flags()
        if OPENMP == "on" and found is None:
            raise SystemExit("CHUNKQ_OPENMP=on, but this compiler cannot compile and link an OpenMP program")
        for extension in self.extensions:
            if found and "_kernels" in extension.name:
                extension.extra_compile_args = [*extension.extra_compile_args, *found[0]]
                extension.extra_link_args = [*extension.extra_link_args, *found[1]]
        print(f"chunkq: OpenMP {'on' if found else 'off'}", file=sys.stderr)
        super().build_extensions()

    def openmp_flags(self) -> tuple[list[str], list[str]] | None:
        for compile_args, link_args in OPENMP_CHOICES:
            with tempfile.TemporaryDirectory() as folder:
                source = Path(folder, "probe.c")
                source.write_text(OPENMP_PROGRAM)
                try:
                    objects = self.compiler.compile([str(source)], output_dir=folder, extra_postargs=compile_args)
                    self.compiler.link_executable(objects, "probe", output_dir=folder, extra_postargs=link_args)
                except (CompileError, LinkError, OSError) as error:
                    print(f"chunkq: no OpenMP with {compile_args}: {error}", file=sys.stderr)
                    continue
                return compile_args, link_args
        return None


setup(
    ext_modules=cythonize(extensions(), compiler_directives=DIRECTIVES, force=DEBUG, annotate=False),
    cmdclass={"build_ext": BuildKernels},
)
