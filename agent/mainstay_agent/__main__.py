"""Entry of the supervisor: ``python -m mainstay_agent``."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence

from mainstay_agent import probe
from mainstay_agent import settings as supervisor_settings
from mainstay_core.base.errors import InvalidSpecError, MainstayError
from mainstay_core.base.logs import start_logging
from mainstay_net.acceptor import raise_descriptor_limit

logger = logging.getLogger("mainstay_agent")


def main(arguments: Sequence[str]) -> int:
    """Run a supervisor with the settings of flags and environment; return the exit code."""
    try:
        asked = supervisor_settings.parse_check(arguments, os.environ)
        if asked is not None:
            why_not = probe.check(*asked)
            print(why_not or "ok")  # noqa: T201 - a command line's answer
            return 1 if why_not else 0
        settings = supervisor_settings.parse(arguments, os.environ)
    except InvalidSpecError as error:
        print(f"{error} (see --help)", file=sys.stderr)  # noqa: T201 - a command line's answer
        return 2
    start_logging("info")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    raise_descriptor_limit()
    # Imported here so that --help and bad settings are answered at once.
    from mainstay_agent.supervisor import Supervisor

    async def run() -> int:
        return await Supervisor(settings).run()

    try:
        return asyncio.run(run())
    except (MainstayError, OSError) as error:
        logger.error("%s", error)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
