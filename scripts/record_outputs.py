"""Records what a checkout produces, so that two versions can be compared.

Usage: python scripts/record_outputs.py OUT.json [--tree DIR] [--only SECTION,...]
       python scripts/record_outputs.py --compare A.json B.json

The sections:

files         CRD and its reference, manifests, golden wire messages: their text
chart         what Helm renders of the chart, by values (needs helm)
conversation  a job told to the api by hand: every answer, every GET route, the stream, OpenAPI
sim           what is summed up of simulated jobs
rest          the GET routes during a local run (which fields they have) and after it (all of it)
run           the examples, undisturbed and with faults: digests and losses of every step;
              `--only run:demo` is one of them

What no two runs share (times, random names, ports, pids) is replaced before it is written. The
checkout in DIR runs in its own .venv, by its commands and over HTTP, so that any version can be
recorded. --compare names each difference by its path; its exit code is 1 if there is one.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from recording import charts, conversation, examples

ROOT = Path(__file__).resolve().parent.parent
SIM_SEEDS = "0:60"
MAX_DIFF_LINES = 40


def record_files(tree: Path) -> dict[str, Any]:
    """Return the text of what is generated or promised, by its place, without comments."""
    patterns = ("charts/mainstay/files/**/*", "charts/mainstay/*.json", "manifests/*.yaml")
    paths = [p for pattern in patterns for p in sorted(tree.glob(pattern)) if p.is_file()]
    found = {str(p.relative_to(tree)): _without_comments(p.read_text()) for p in paths}
    golden = sorted(tree.glob("tests/**/golden/**/*.json"))
    found |= {f"golden/{p.parent.name}/{p.name}": p.read_text() for p in golden}
    reference = (tree / "docs/trainingjob.md").read_text().partition("\n## Spec\n")[2]
    return found | {"docs/trainingjob.md": reference}


def _without_comments(text: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))


def record_sim(tree: Path) -> dict[str, Any]:
    """Return what ``mainstay sim`` sums up of its first seeds."""
    command = [str(tree / ".venv/bin/mainstay"), "sim", "--seeds", SIM_SEEDS]
    done = subprocess.run(command, cwd=tree, check=False, capture_output=True, text=True)
    first, *rest = done.stdout.splitlines() or [""]
    # The first line ends with the seconds it took.
    return {"exit": done.returncode, "summary": [first.rpartition(" in ")[0], *rest]}


SECTIONS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "files": record_files,
    "chart": charts.record,
    "conversation": conversation.record,
    "sim": record_sim,
    "rest": examples.record_rest,
    **{f"run:{name}": partial(examples.record_run, name) for name in examples.EXAMPLES},
}


def find_differences(left: Any, right: Any, path: str = "") -> Iterator[str]:
    """Yield one text for each place where two records differ."""
    if isinstance(left, dict) and isinstance(right, dict):
        for key in sorted(left.keys() | right.keys()):
            here = f"{path}/{key}"
            if key not in right or key not in left:
                yield f"{here}: only in the {'first' if key in left else 'second'}"
            else:
                yield from find_differences(left[key], right[key], here)
    elif isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        for i, (one, other) in enumerate(zip(left, right, strict=True)):
            yield from find_differences(one, other, f"{path}/{i}")
    elif left != right:
        _, _, *diff = difflib.unified_diff(_lines(left), _lines(right), n=0, lineterm="")
        if len(diff) > MAX_DIFF_LINES:
            diff[MAX_DIFF_LINES:] = [f"... and {len(diff) - MAX_DIFF_LINES} lines more"]
        yield "\n    ".join([f"{path}:", *diff])


def _lines(value: Any) -> list[str]:
    text = value if isinstance(value, str) else json.dumps(value, indent=1, sort_keys=True)
    # Two values that differ never have equal lines: those of a text show how it ends.
    return [repr(line) for line in text.splitlines(keepends=True)]


def compare(first: Path, second: Path) -> int:
    """Print the differences of two records; return the exit code."""
    left, right = (json.loads(path.read_text()) for path in (first, second))
    for name in sorted(left.keys() ^ right.keys()):
        print(f"/{name}: not compared, it is only in {first if name in left else second}")
    both = left.keys() & right.keys()
    found: dict[str, list[str]] = {}
    for name in sorted(both):
        for difference in find_differences(left[name], right[name], f"/{name}"):
            found.setdefault(_kind(difference), []).append(difference)
    for alike in found.values():
        print(alike[0] + (f"\n    (and {len(alike) - 1} more like it)" if alike[1:] else ""))
    print(f"{len(found)} kinds of differences in {', '.join(sorted(both))}")
    return 1 if found else 0


def _kind(difference: str) -> str:
    """Return a difference without what tells it from others like it: answer and place in a list."""
    return re.sub(r"/\d+(?=[/:])", "/*", re.sub(r"^/conversation/\d+ [^/]*", "", difference))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", nargs="?", type=Path, metavar="OUT.json")
    parser.add_argument("--tree", type=Path, default=ROOT, metavar="DIR", help="[this checkout]")
    parser.add_argument("--only", default=",".join(SECTIONS), metavar="SECTION,...")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("A.json", "B.json"))
    options = parser.parse_args()
    if options.compare:
        return compare(*options.compare)
    wanted = options.only.split(",")
    if options.out is None:
        parser.error("OUT.json is missing")
    tree = options.tree.resolve()
    if Path(sys.prefix) != tree / ".venv":
        python = str(tree / ".venv/bin/python")
        os.execv(python, [python, __file__, *sys.argv[1:]])
    names = [name for name in SECTIONS if {name, name.partition(":")[0]} & {*wanted}]
    unknown = {*wanted} - {*SECTIONS, "run"}
    if unknown:
        parser.error(f"unknown sections: {', '.join(sorted(unknown))}")
    recorded = {}
    for name in names:
        began_s = time.monotonic()
        recorded[name] = SECTIONS[name](tree)
        sys.stderr.write(f"== {name}: {time.monotonic() - began_s:.0f} s\n")
        options.out.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
