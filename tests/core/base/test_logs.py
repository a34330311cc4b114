"""A record of a log is one line of pairs, whatever it holds."""

from __future__ import annotations

import io
import json
import logging
import re

from hypothesis import given
from hypothesis import strategies as st

from mainstay_core.base.logs import LogfmtFormatter, about

PAIR = re.compile(r'([a-z_]+)=("(?:[^"\\]|\\.)*"|[^\s"=\\]+)(?: |$)')


def read(line: str) -> dict[str, str]:
    """The pairs of a line, which must hold nothing else."""
    pairs, at = {}, 0
    while at < len(line):
        match = PAIR.match(line, at)
        assert match is not None, line[at:]
        key, value = match.groups()
        assert key not in pairs
        pairs[key] = json.loads(value) if value.startswith('"') else value
        at = match.end()
    return pairs


def logged(message: str, **fields: object) -> list[str]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LogfmtFormatter())
    logger = logging.Logger("some.module")
    logger.addHandler(handler)
    logger.warning("%s", message, extra=about(**fields))
    return stream.getvalue().splitlines()


@given(message=st.text(), job=st.text())
def test_whatever_is_told_is_one_line_and_read_back(message: str, job: str) -> None:
    (line,) = logged(message, job=job)

    pairs = read(line)
    assert (pairs["level"], pairs["logger"]) == ("warning", "some.module")
    assert (pairs["msg"], pairs["job"]) == (message, job)
    assert line.isascii()


def test_a_line_is_easy_to_read() -> None:
    (line,) = logged("it trains", job="research/tiny", decision="Started")

    time, rest = line.split(" ", 1)
    assert re.fullmatch(r"time=\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", time)
    assert rest == (
        'level=warning logger=some.module job=research/tiny decision=Started msg="it trains"'
    )


def test_a_trace_stays_within_its_line() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    record = logging.LogRecord("m", logging.ERROR, "f", 1, "crashed", (), info)

    line = LogfmtFormatter().format(record)

    assert "\n" not in line
    trace = read(line)["trace"]
    assert trace.startswith("Traceback (most recent call last):\n")
    assert trace.endswith("ValueError: two\nlines")
