"""The operator as a process."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.logs import about, start_logging
from mainstay_net.acceptor import raise_descriptor_limit
from mainstay_operator.settings import parse


def main() -> int:
    """Run until told to end; return the exit code."""
    # In a container nobody else ends a process 1 that has no handler: it would go on as if it had
    # heard nothing, and act beside its successor.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    # Imported here, as that takes longest.
    from mainstay_operator.elector import LeadershipLostError
    from mainstay_operator.handlers import serve

    try:
        settings = parse(sys.argv[1:], os.environ)
    except InvalidSpecError as error:
        print(f"mainstay-operator: {error}", file=sys.stderr)  # noqa: T201
        return 2
    start_logging(settings.log_level)
    raise_descriptor_limit()
    # kopf tells every event that it passes on, aiohttp every probe that it answers.
    for name in ("kopf", "aiohttp.access"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        asyncio.run(serve(settings))
    except InvalidSpecError as error:
        logging.getLogger(__name__).error("%s", error)
        return 2
    except LeadershipLostError as error:
        # Started again, by Kubernetes, it waits for its turn.
        logging.getLogger(__name__).error("%s", error, extra=about(decision="Stop"))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
