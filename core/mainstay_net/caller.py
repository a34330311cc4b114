"""Proves the job's secret to a listener that was called, on a blocking socket."""

from __future__ import annotations

import secrets
import socket

from mainstay_core.base.proofs import ANSWER_BYTES, NONCE_BYTES, CallerProof, Purpose


def prove(connection: socket.socket, secret: str, listener: str, purpose: Purpose) -> None:
    """Prove to a listener that this process knows the job's secret, and have it prove the same.

    Args:
        connection: just connected; it blocks.
        secret: of the job.
        listener: the address that was called, as a plan or a report names it.
        purpose: what is wanted of the listener.

    Raises:
        RemoteProtocolError: the listener does not know the secret, or speaks another version.
        OSError: the connection ended first.
    """
    mine = CallerProof(secret, secrets.token_bytes(NONCE_BYTES), listener, purpose)
    connection.sendall(mine.hello)
    answer = b""
    while len(answer) < ANSWER_BYTES:
        data = connection.recv(ANSWER_BYTES - len(answer))
        if not data:
            raise ConnectionResetError("the listener closed the connection before its proof")
        answer += data
    connection.sendall(mine.answered(answer))
