"""The one format of our containers' logs: a record is a line of ``key=value`` pairs (logfmt).

``time=2026-11-22T18:22:28.123Z level=info logger=mainstay_operator.decisions job=research/tiny
decision=Started msg="it trains"``. Whatever a message holds, it stays within its line: values with
anything but plain characters are written as JSON strings.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TextIO

_PLAIN = re.compile(r"[A-Za-z0-9_./:@,;+*#%&()<>\[\]{}!?$^~|-]+")
"""Values that need no quotes."""


def about(**fields: object) -> dict[str, Mapping[str, object]]:
    """Return what a logging call takes as ``extra``: fields that its line has beside the message.

    ``time``, ``level``, ``logger``, ``msg`` and ``trace`` are every line's own.
    """
    return {"fields": fields}


class LogfmtFormatter(logging.Formatter):
    """Writes a record as one line of pairs, with the trace of its exception if it has one."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC)
        pairs: dict[str, object] = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            **getattr(record, "fields", {}),
            "msg": record.getMessage(),
        }
        if record.exc_info:
            pairs["trace"] = self.formatException(record.exc_info)
        return " ".join(f"{key}={_quoted(str(value))}" for key, value in pairs.items())


def start_logging(level: str, stream: TextIO | None = None) -> None:
    """Have this process write its records in this format, on standard error unless told otherwise.

    Args:
        level: of the least that is written: debug, info, warning or error.
        stream: where to.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(LogfmtFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _quoted(value: str) -> str:
    return value if _PLAIN.fullmatch(value) else json.dumps(value)
