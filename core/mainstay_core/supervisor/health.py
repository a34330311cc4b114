"""The file in which a supervisor shows how it is, and the probe that reads it without any Python.

A probe runs every few seconds in each pod: a Python for it would cost more than the supervisor
itself. So the supervisor writes one line and touches the file; a shell looks how old it is.
"""

from __future__ import annotations

HEALTH_FILE = "health"
"""In the pod's directory."""
WELL = "ok"
SHOW_EVERY_S = 2.0
"""Between two touches: well within STALE_S, and a change is seen by the next probe but one."""
STALE_S = 15
"""A file that is older is that of a supervisor that ended or hangs: no supervisor's loop is busy
for so long."""
_READ = f"""\
file="$MAINSTAY_POD_DIR/{HEALTH_FILE}"
[ -e "$file" ] || exec python -m mainstay_agent --check "$0"
if [ -z "$(find "$file" -newermt '{STALE_S} seconds ago')" ]; then
    echo "the supervisor has not shown for {STALE_S} s how it is"
    exit 1
fi
[ "$0" = ready ] || exit 0
read -r why_not <"$file"
[ "$why_not" = {WELL} ] || {{ echo "$why_not"; exit 1; }}
"""


def show_health(why_not: str) -> str:
    """Return what the file holds: one line.

    Args:
        why_not: why the pod is not ready; empty if it is.
    """
    return (" ".join(why_not.split()) or WELL) + "\n"


def probe_command(what: str) -> list[str]:
    """Return the command of an exec probe in the supervisor's container.

    Where there is no file (before the supervisor runs, where it cannot write one, and in an
    image that is older than this one) the supervisor is asked.

    Args:
        what: ``live`` if the supervisor gets on, ``ready`` if every slot has a trainer as well.
    """
    return ["sh", "-c", _READ, what]
