"""Loopback addresses for pods: a /24 of 127/8 per run, held while the run lives.

Linux answers on all of 127.0.0.0/8 without any set-up, so every pod can have an
address of its own, and several runs at once do not meet.
"""

from __future__ import annotations

import random
import socket

from mainstay_cli.base.exits import MachineError

CLAIM_PORT = 47470
"""A bound UDP socket on .1 is the claim; the kernel releases it however its holder ends."""
MAX_TRIES = 64


def claim_network(rng: random.Random) -> tuple[str, socket.socket]:
    """Return the first three bytes of a free network, ``127.x.y``, and the claim to keep.

    Raises:
        MachineError: no address of 127/8 can be used.
    """
    reason = ""
    for _ in range(MAX_TRIES):
        network = f"127.{rng.randint(1, 254)}.{rng.randint(0, 254)}"
        claim = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            claim.bind((f"{network}.1", CLAIM_PORT))
        except OSError as error:
            claim.close()
            reason = str(error.strerror)
            continue
        return network, claim
    raise MachineError(f"no loopback network is free: {reason}")
