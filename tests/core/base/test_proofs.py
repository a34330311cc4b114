"""Proofs between two ends of a connection: what they are good for, and for nothing else."""

from __future__ import annotations

import itertools
import random

import pytest

from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.base.frames import FrameParser, pack
from mainstay_core.base.proofs import (
    ANSWER_BYTES,
    DIGEST_BYTES,
    HELLO_BYTES,
    NONCE_BYTES,
    VERSION,
    CallerProof,
    ListenerProof,
    Purpose,
    RefusedPeerError,
)

HERE = "10.0.0.7:4711"
RNG = random.Random(5)


def caller(
    secret: str = "s3cret", listener: str = HERE, purpose: Purpose = Purpose.MEET
) -> CallerProof:
    return CallerProof(secret, RNG.randbytes(NONCE_BYTES), listener, purpose)


def listener(secret: str = "s3cret", address: str = HERE, *purposes: Purpose) -> ListenerProof:
    return ListenerProof(secret, RNG.randbytes(NONCE_BYTES), address, purposes or tuple(Purpose))


@pytest.mark.parametrize("purpose", Purpose)
@pytest.mark.parametrize("secret", ["s3cret", ""])
def test_two_that_know_the_secret_prove_it_to_each_other(purpose: Purpose, secret: str) -> None:
    calls, listens = caller(secret, purpose=purpose), listener(secret)

    answer = listens.received(calls.hello)
    assert listens.purpose is None, "the caller has proved nothing yet"
    proof = calls.answered(answer)
    assert listens.received(proof) == b""

    assert listens.purpose is purpose
    assert len(answer) == ANSWER_BYTES
    assert len(proof) == DIGEST_BYTES
    assert b"s3cret" not in calls.hello + answer + proof


def test_however_the_bytes_come_no_more_is_held_than_a_hello() -> None:
    for size in range(1, HELLO_BYTES + 1):
        calls, listens = caller(), listener()
        stream, answer = calls.hello, b""
        while stream:
            taken = min(size, listens.wanted)
            answer += listens.received(stream[:taken])
            stream = stream[taken:]
            assert 0 < listens.wanted <= HELLO_BYTES
        for byte in calls.answered(answer):
            assert listens.purpose is None
            listens.received(bytes([byte]))
        assert listens.purpose is Purpose.MEET


def test_without_the_secret_neither_side_is_believed() -> None:
    with pytest.raises(RemoteProtocolError, match="gave no proof of the job's secret"):
        caller("other").answered(listener().received(caller("other").hello))
    for secret in ("other", ""):
        calls, listens = caller(secret), listener()
        listens.received(calls.hello)
        with pytest.raises(RefusedPeerError, match="no proof of the job's secret") as refused:
            listens.received(RNG.randbytes(DIGEST_BYTES))
        assert refused.value.answer == b"", "a stranger is told nothing"
        assert listens.purpose is None


def test_one_wrong_bit_anywhere_proves_nothing() -> None:
    for position, bit in itertools.product(range(ANSWER_BYTES), range(8)):
        calls, listens = caller(), listener()
        answer = bytearray(listens.received(calls.hello))
        answer[position] ^= 1 << bit
        with pytest.raises(RemoteProtocolError):
            calls.answered(bytes(answer))
    for position, bit in itertools.product(range(DIGEST_BYTES), range(8)):
        calls, listens = caller(), listener()
        proof = bytearray(calls.answered(listens.received(calls.hello)))
        proof[position] ^= 1 << bit
        with pytest.raises(RefusedPeerError):
            listens.received(bytes(proof))


def test_a_listener_cannot_use_what_it_was_told_later() -> None:
    calls, first, second = caller(), listener(), listener()
    proof = calls.answered(first.received(calls.hello))
    first.received(proof)

    second.received(calls.hello)
    with pytest.raises(RefusedPeerError, match="no proof"):
        second.received(proof)


def test_a_listener_cannot_pass_on_to_a_third_what_it_is_told_now() -> None:
    """Who has taken over the address of a pod that is gone is called, and calls a pod meanwhile."""
    between, third = "10.0.0.9:1", listener(address="10.0.0.8:2")
    calls = caller(listener=between)

    with pytest.raises(RemoteProtocolError, match="gave no proof"):
        calls.answered(third.received(calls.hello))


def test_a_listeners_own_words_do_not_prove_a_caller() -> None:
    calls, listens = caller(), listener()
    answer = listens.received(calls.hello)

    with pytest.raises(RefusedPeerError, match="no proof"):
        listens.received(answer[-DIGEST_BYTES:])


def test_a_proof_is_for_its_purpose_alone() -> None:
    with pytest.raises(RefusedPeerError, match="nobody listens here for purpose 3"):
        listener("s3cret", HERE, Purpose.MEET, Purpose.GOSSIP).received(
            caller(purpose=Purpose.HEAL).hello
        )
    calls, listens = caller(purpose=Purpose.MEET), listener()
    hello = bytearray(calls.hello)
    hello[5] = Purpose.GOSSIP
    with pytest.raises(RemoteProtocolError, match="gave no proof"):
        calls.answered(listens.received(bytes(hello)))


def test_another_version_is_refused_by_name_on_both_sides() -> None:
    newer = bytearray(caller().hello)
    newer[4] = VERSION + 1
    with pytest.raises(RefusedPeerError, match=f"speaks version {VERSION + 1} .* this one version"):
        listener().received(bytes(newer))
    older = bytearray(listener().received(caller().hello))
    older[4] = VERSION - 1
    with pytest.raises(
        RemoteProtocolError, match=rf"speaks version {VERSION - 1} .* suspend the job and resume"
    ):
        caller().answered(bytes(older))


def test_a_listener_of_another_version_is_known_by_its_answer() -> None:
    newer = bytearray(caller().hello)
    newer[4] = VERSION + 1
    with pytest.raises(RefusedPeerError) as refused:
        listener().received(bytes(newer))
    answer = bytearray(refused.value.answer)
    answer[4] = VERSION + 1

    with pytest.raises(RemoteProtocolError, match=f"speaks version {VERSION + 1}"):
        caller().answered(bytes(answer))


def test_version_1_is_told_in_its_own_words() -> None:
    old = pack({"kind": "join", "quorum": "q1-a", "index": 0, "size": 2, "proof": "00"})
    listens = listener()
    assert listens.received(old[:5]) == listens.received(old[5:10]) == b""
    with pytest.raises(RefusedPeerError) as refused:
        listens.received(old[10:38])

    (said,) = FrameParser().feed(refused.value.answer)
    assert said.kind == "abort"
    assert "version 1" in said.head["why"]


def test_version_1_is_known_by_its_answer() -> None:
    old = pack({"kind": "abort", "why": "refused: RemoteProtocolError('frame of 1 + 2 bytes')"})

    with pytest.raises(RemoteProtocolError, match="an older version or something else"):
        caller().answered(old[:ANSWER_BYTES])


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n", b"\x16\x03\x01\x02\x00\x01", b"M", b"MSTX", b"\xff"]
)
def test_who_speaks_something_else_is_told_nothing(said: bytes) -> None:
    listens = listener()
    if said == b"M":
        assert listens.received(said) == b"", "that is how a hello begins"
        said = b"X"
    with pytest.raises(RefusedPeerError, match="does not speak as a pod does") as refused:
        listens.received(said)
    assert refused.value.answer == b""


def test_a_size_of_two_gibibytes_is_not_waited_for() -> None:
    listens = listener()
    with pytest.raises(RefusedPeerError):
        listens.received(b"\0\0\0\x02\0\0\0\0\x80\0\0\0" + b"{}")


def test_no_bytes_do_anything_but_be_refused() -> None:
    for _ in range(2000):
        listens = listener()
        noise = RNG.choice([b"", b"MSTY", b"MSTY\2", b"MSTY\2\1", b"\0\0"]) + RNG.randbytes(60)
        try:
            while noise:
                taken = min(RNG.randint(1, 40), listens.wanted)
                listens.received(noise[:taken])
                noise = noise[taken:]
        except RefusedPeerError:
            pass
        assert listens.purpose is None
