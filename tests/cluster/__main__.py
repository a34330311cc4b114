"""``python -m tests.cluster up [NODES] [images]``: a real cluster to play with, until Ctrl-C.

The same that the tests use, without root a control plane alone. With ``images`` those of this
checkout are built and put on the nodes, so that the chart can be installed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

from tests.cluster import building, leftovers, play, toolbox
from tests.cluster.cluster import run_cluster, run_control_plane


def main(args: list[str]) -> int:
    if not args or args[0] not in ("up", "clean", "prepare"):
        usage = "up [NODES] [images] | prepare [images] | clean"
        sys.stderr.write(f"usage: python -m tests.cluster {usage}\n")
        return 2
    if args[0] == "clean":
        leftovers.sweep()
        return 0
    if args[0] == "prepare":
        return prepare("images" in args)
    numbers = [arg for arg in args[1:] if arg.isdigit()]
    unknown = [arg for arg in args[1:] if not arg.isdigit() and arg != "images"]
    if unknown or len(numbers) > 1:
        sys.stderr.write(f"cluster: {(unknown or numbers)[-1]!r}: one number of nodes, or images\n")
        return 2
    num_nodes = int(numbers[0]) if numbers else 3
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        with contextlib.ExitStack() as stack:
            say = toolbox.say_to_stdout
            if num_nodes == 0 or os.getuid() != 0:
                plane = stack.enter_context(run_control_plane(say))
                say("a control plane is up; nodes need root" if num_nodes else "it is up")
            else:
                plane = stack.enter_context(run_cluster(num_nodes, say))
                say(f"a cluster of {num_nodes} nodes is up")
                if "images" in args:
                    play.add_mainstay(plane, say)
            say(f"export KUBECONFIG={plane.kubeconfig} PATH={plane.tools}:$PATH")
            say("Ctrl-C ends it")
            with contextlib.suppress(KeyboardInterrupt):
                signal.pause()
            say("cleaning up")
    except toolbox.CannotRunError as error:
        sys.stderr.write(f"cluster: {error}\n")
        return 1
    return 0


def prepare(images: bool) -> int:
    """Build and install all that clusters are made of; with images those of this checkout too."""
    say = toolbox.say_to_stdout
    try:
        toolbox.build(say)
        if images:
            toolbox.require_nodes()
            toolbox.ensure_packages(say)
            building.make_images(say)
    except toolbox.CannotRunError as error:
        say(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
