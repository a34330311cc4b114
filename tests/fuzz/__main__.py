"""``python -m tests.fuzz``: inputs without end for everything that reads what strangers write.

With files: judges these again, as the tests do. Exits with 1 if anything came of an input that is
not documented; the input lies in ``tests/fuzz/corpus`` then.
"""

from __future__ import annotations

import argparse
import secrets
import sys
from pathlib import Path

from tests.fuzz import runner
from tests.fuzz.targets import NAMES, load


def main(args: list[str]) -> int:
    asked = _parse(args)
    if asked.files:
        return _again(asked.files)
    seed = secrets.randbelow(1 << 32) if asked.seed is None else asked.seed
    _say(f"seed {seed}: the same seed makes the same inputs (--seed {seed})")
    names = asked.targets.replace(",", " ").split() or list(NAMES)
    first, stop = 0, asked.inputs
    if asked.only is not None:
        first, stop = asked.only, asked.only + 1
    failed = 0
    for name in names:
        task = runner.Task(
            target=name,
            load=load,
            seed=seed,
            first=first,
            step=1,
            stop=stop,
            seconds=asked.seconds / len(names) if stop is None else float("inf"),
        )
        jobs = 1 if asked.only is not None else asked.jobs
        tally = runner.run(task, jobs, _say, asked.corpus)
        failed += len(tally.findings)
        _say(f"{name:<12} {tally}")
    return 1 if failed else 0


def _parse(args: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="inputs to judge again")
    parser.add_argument("--seconds", type=float, default=60.0, help="for all targets together (60)")
    parser.add_argument("--inputs", type=int, help="of each target, instead of a time")
    parser.add_argument("--only", type=int, help="the number of one input")
    parser.add_argument("--seed", type=int, help="drawn and printed if left out")
    parser.add_argument("--targets", default="", help=f"of {', '.join(NAMES)}; all if left out")
    parser.add_argument("--jobs", type=int, default=1, help="processes (1)")
    parser.add_argument(
        "--corpus", type=Path, default=runner.CORPUS, help="where inputs that show a fault go"
    )
    asked = parser.parse_args(args)
    unknown = sorted({*asked.targets.replace(",", " ").split()} - {*NAMES})
    if unknown:
        parser.error(f"there is no target {unknown[0]}: name one of {', '.join(NAMES)}")
    return asked


def _again(files: list[Path]) -> int:
    failed = 0
    for path in files:
        name = path.resolve().parent.name
        if name not in NAMES:
            raise SystemExit(f"{path}: the folder must be named after a target: {', '.join(NAMES)}")
        found = runner.examine(load(name), path.read_bytes())
        if isinstance(found, runner.Finding):
            failed += 1
            _say(f"{path}: {found.what}\n{found.told}")
        else:
            _say(f"{path}: {'accepted' if found else 'refused, as documented'}")
    return 1 if failed else 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
