"""Makes traces: the moments at which a job fails, drawn from a seed or read from CSV."""

from __future__ import annotations

import csv
import io
import math
import random

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.words import quote

COLUMN = "time_s"
"""The column of a trace that is read: seconds since the run began."""
MAX_FAILURES = 1_000_000
"""Failures of a trace. A longer one is a mistake of the mean time between them."""
MAX_TIME_S = 1e10
"""Latest moment of a trace, some three hundred years."""


def draw_poisson(rng: random.Random, mtbf_s: float, horizon_s: float) -> tuple[float, ...]:
    """Return the failures of a Poisson process, ascending.

    Args:
        rng: what is drawn from.
        mtbf_s: mean seconds between failures, above 0.
        horizon_s: the run's length; failures are before it.

    Raises:
        InvalidSpecError: there would be more than a trace may have.
    """
    if horizon_s / mtbf_s > MAX_FAILURES / 2:
        raise InvalidSpecError(
            "mtbf",
            f"is {mtbf_s:g} s, must be at least {2 * horizon_s / MAX_FAILURES:g} s "
            f"for a run of {horizon_s:g} s",
        )
    failures: list[float] = []
    now_s = rng.expovariate(1 / mtbf_s)
    while now_s < horizon_s:
        failures.append(now_s)
        now_s += rng.expovariate(1 / mtbf_s)
    return tuple(failures)


def draw_count(rng: random.Random, num_failures: int, horizon_s: float) -> tuple[float, ...]:
    """Return so many failures of a Poisson process, ascending.

    Given their number they are spread evenly over the run.
    """
    return tuple(sorted(rng.uniform(0.0, horizon_s) for _ in range(num_failures)))


def read_trace(text: str) -> tuple[float, ...]:
    """Return the failures of a trace in CSV: a heading line, then one failure a line.

    The heading names the column ``time_s``. Other columns are not read. Empty lines are skipped.

    Args:
        text: CSV, lines as they come from a file.

    Returns:
        Seconds since the run began, ascending.

    Raises:
        InvalidSpecError: the heading lacks the column, or a line has no usable moment; the line's
            number is named.
    """
    rows = csv.reader(io.StringIO(text))
    place: int | None = None
    failures: list[float] = []
    try:
        for row in rows:
            if not any(cell.strip() for cell in row):
                continue
            if place is None:
                place = _find_column(row, rows.line_num)
                continue
            if len(failures) == MAX_FAILURES:
                raise _bad_line(rows.line_num, f"is one more than {MAX_FAILURES} failures")
            least_s = failures[-1] if failures else 0.0
            failures.append(_read_moment(row, place, rows.line_num, least_s))
    except csv.Error as error:
        raise _bad_line(rows.line_num, f"is no CSV: {error}") from error
    if place is None:
        raise _bad_line(1, f"must be a heading that names the column {COLUMN}")
    return tuple(failures)


def _find_column(row: list[str], line: int) -> int:
    headings = [cell.strip() for cell in row]
    if COLUMN not in headings:
        shown = quote(",".join(headings))
        raise _bad_line(line, f"is {shown}, must be a heading that names the column {COLUMN}")
    return headings.index(COLUMN)


def _read_moment(row: list[str], place: int, line: int, least_s: float) -> float:
    if place >= len(row):
        raise _bad_line(line, f"has no column {COLUMN}")
    cell = row[place].strip()
    try:
        moment_s = float(cell)
    except ValueError:
        moment_s = math.nan
    if not 0 <= moment_s <= MAX_TIME_S:
        raise _bad_line(
            line, f"{COLUMN} is {quote(cell)}, must be a number of seconds from 0 to {MAX_TIME_S:g}"
        )
    if moment_s < least_s:
        raise _bad_line(
            line, f"{COLUMN} is {cell}, before the {least_s:g} of the line above; sort the lines"
        )
    return moment_s


def _bad_line(line: int, problem: str) -> InvalidSpecError:
    return InvalidSpecError(f"trace line {line}", problem)
