"""The command line: ``python -m benchmarks kernels``, ``statistics``, ``pipeline``, ``codecs`` or ``scale``.

Exit code 0: all that was timed answered right; 1: a contender answered wrong (its row says how); 2: a wrong request.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from benchmarks import codecs, frame, kernels, pipeline, scale, statistics

SUITES: dict[str, Any] = {"kernels": kernels, "statistics": statistics, "pipeline": pipeline, "codecs": codecs}

Named = TypeVar("Named")

EPILOG = """\
examples:
  python -m benchmarks kernels                        64 M elements, larger than most caches: several minutes
  python -m benchmarks kernels --rows last,small      the cases with one of these words in their name
  python -m benchmarks kernels --list                 the cases
  python -m benchmarks pipeline --json pipeline.json  256 MiB to 1 GiB, without a codec and with zstd: several minutes
  python -m benchmarks pipeline --elements 1073741824 1 GiB to 4 GiB; on disk unless /dev/shm has 10 GiB free
  python -m benchmarks codecs                         the target's codecs by themselves: ratio, speed both ways
  python -m benchmarks scale                          planning, no-op units, listing, by the number of objects

The table goes to stdout, progress to stderr. Every answer is checked before it is timed. Peers come with
pip install 'chunkq[bench]'; one that is missing has a row that says so.
"""


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Time chunkq against its peers: operators and statistics in memory, zarr to zarr, codecs, many units.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("suite", choices=(*SUITES, "scale"))
    top.add_argument(
        "--quick", action="store_true", help="fewer elements (16 M; codecs: 4 M; scale: 10 k units) and rounds"
    )
    top.add_argument(
        "--json", type=Path, metavar="FILE", help="write the rows, machine, versions and commit there as well"
    )
    top.add_argument("--elements", type=positive, metavar="N", help="elements of the tensor; scale: units")
    top.add_argument("--rounds", type=positive, metavar="N", help="rounds; every contender runs once in each")
    top.add_argument("--rows", metavar="NAME,...", help="only cases with one of these words in their name")
    top.add_argument(
        "--only", metavar="NAME,...", help="beside chunkq only contenders with one of these words in their name"
    )
    top.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there as well")
    top.add_argument("--list", action="store_true", help="print the names of the cases and stop")
    return top


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a positive integer")
    return value


def chosen(named: dict[str, Named], words: str | None, option: str = "--rows") -> dict[str, Named]:
    """Those with one of the words in their name; none is an error, so that a typing mistake is not an empty table."""
    if words is None:
        return named
    wanted = [word.strip().lower() for word in words.split(",") if word.strip()]
    found = {name: value for name, value in named.items() if any(word in name.lower() for word in wanted)}
    if not found:
        raise RequestError(f"{option} {words}: no case has such a name; there are: {'; '.join(named)}")
    return found


def beside(case: frame.Case, words: str | None) -> frame.Case:
    """The case with chunkq and the contenders asked for; a copy's rate stays, which others are measured by."""
    kept = chosen(case.contenders, words, "--only")
    always = {name: c for name, c in case.contenders.items() if name in (frame.SUBJECT, "memcpy")}
    return replace(case, contenders={name: c for name, c in case.contenders.items() if name in kept or name in always})


class RequestError(Exception):
    """A wrong request."""


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.suite == "scale":
        return main_of_scale(options)
    module = SUITES[options.suite]
    elements = options.elements or (module.QUICK_ELEMENTS if options.quick else module.ELEMENTS)
    rounds = options.rounds or (frame.QUICK_ROUNDS if options.quick else frame.ROUNDS)
    cases = chosen(module.cases(elements), options.rows)
    if options.list:
        print("\n".join(cases))
        return 0
    # before the first case: a tree that changes meanwhile must not lend its new commit to old kernels
    about = frame.environment() | {"suite": options.suite, "elements": elements, "rounds": rounds}
    markdown = getattr(module, "markdown", frame.markdown)  # some suites have a table of their own
    rows: list[frame.Row] = []
    for name, make in cases.items():
        print(f"{name} ...", file=sys.stderr, flush=True)
        rows += frame.measure(beside(make(), options.only), rounds)
        save(options, markdown(rows, about, module.LEGEND), about, rows)
    print(markdown(rows, about, module.LEGEND))
    return int(any(row.status == "wrong" for row in rows))


def save(options: argparse.Namespace, table: str, about: dict[str, Any], rows: list[Any]) -> None:
    """Write what there is so far: a run that is broken off has not been for nothing."""
    if options.markdown:
        title = "" if table.startswith("# ") else f"# {options.suite.capitalize()}\n\n"
        options.markdown.write_text(f"{title}{table}\n")
    if options.json:
        options.json.write_text(json.dumps(about | {"rows": [row.to_dict() for row in rows]}, indent=1) + "\n")


def main_of_scale(options: argparse.Namespace) -> int:
    """Its rows are no contenders of each other: they have a table of their own."""
    elements = options.elements or (scale.QUICK_ELEMENTS if options.quick else scale.ELEMENTS)
    rounds = options.rounds or (1 if options.quick else scale.ROUNDS)
    cases = chosen(scale.cases(elements), options.rows)
    if options.list:
        print("\n".join(cases))
        return 0
    about = frame.environment() | {"suite": "scale", "elements": elements, "rounds": rounds, "load": os.getloadavg()[0]}
    rows: list[scale.Row] = []
    for name, make in cases.items():
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            rows += make(rounds)
        except frame.WrongAnswer as error:
            print(f"{name}: WRONG ANSWER, not timed: {error}", file=sys.stderr)
            return 1
    about["load_after"] = os.getloadavg()[0]
    print(scale.markdown(rows, about))
    save(options, scale.markdown(rows, about), about, rows)
    return 0


# Guarded: the pipeline's worker processes import this module anew.
if __name__ == "__main__":
    try:
        sys.exit(main())
    except RequestError as error:
        print(f"python -m benchmarks: error: {error}", file=sys.stderr)
        sys.exit(2)
