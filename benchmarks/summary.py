"""The table of what was aimed at and seen, from the JSON of earlier runs: ``python -m benchmarks.summary FILE...``.

Written into RESULTS.md between its two marks; the text around them stays.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("RESULTS.md")
BEGIN, END = "<!-- summary -->", "<!-- end of summary -->"

HEAD = ("work", "beside", "its time / chunkq's", "aim", "spread, chunkq's and its")


def lines(runs: list[dict[str, Any]]) -> list[str]:
    """One line for each contender with an aim."""
    table = [HEAD, tuple("---" for _ in HEAD)]
    for run in runs:
        spreads = {row["case"]: row["spread"] for row in run["rows"] if row["contender"] == "chunkq" and row["times"]}
        for row in run["rows"]:
            if row["aim"]:
                both = f"{spreads[row['case']]:.0%}, {row['spread']:.0%}"
                table.append((row["case"], row["contender"], f"{row['ratio']:.2f}", row["aim"], both))
    return ["| " + " | ".join(cells) + " |" for cells in table]


def origin(run: dict[str, Any]) -> str:
    """Where a run's figures come from."""
    return (
        f"- {run['suite']}: {run['cpu']}, {run['cores']} cores, {run['isa']} kernels, commit {run['commit']}, "
        f"{run['elements']:,} elements, medians of {run['rounds']} interleaved rounds."
    )


def main(files: list[str]) -> int:
    if not files:
        print("usage: python -m benchmarks.summary FILE...  (JSON that the suites wrote)", file=sys.stderr)
        return 2
    runs = [json.loads(Path(file).read_text()) for file in files]
    before, rest = RESULTS.read_text().split(BEGIN)
    after = rest.split(END)[1]
    body = "\n".join([*map(origin, runs), "", *lines(runs)])
    RESULTS.write_text(f"{before}{BEGIN}\n{body}\n{END}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
