"""A copy is compared with all who have the state: wrong moments are handed on to nobody."""

from __future__ import annotations

import logging
import socket
import threading

import pytest
from tests.train.crew import ADDRESS
from tests.train.state.test_heal import WANTED, make_state, same

from mainstay_core.rank.serving import HealFailed, Source
from mainstay_train.exact.optimizer import StageState
from mainstay_train.kernels import bits
from mainstay_train.state import comparing
from mainstay_train.state.heal import HealClient, HealServer, masters_digest


def serve(*states: StageState | None) -> list[Source]:
    """Serve states on the slots a/0, b/0 and so on; None: a holder that has moved on."""
    servers = [HealServer(ADDRESS, lambda *_, state=state: state) for state in states]
    return [Source(f"{pod}/0", s.address) for pod, s in zip("abc", servers, strict=False)]


def heal(sources: list[Source], holders: list[Source], expected: str) -> StageState:
    joiner = make_state(None, "bfloat16")
    HealClient(ADDRESS).copy(
        joiner, sources=sources, wanted=WANTED, expected=expected, holders=holders
    )
    return joiner


def worn(kind: str) -> StageState:
    """A state of which one bit beside the masters is wrong."""
    state = make_state(1, "bfloat16")
    (tensor, *_) = [f.tensor for f in state.everything() if f.kind == kind and f.tensor.numel() > 9]
    bits.flip_bit(tensor, 5, 3)
    return state


@pytest.mark.parametrize("kind", ["exp_avg", "exp_avg_sq"])
def test_wrong_moments_of_a_source_are_not_handed_on(kind: str) -> None:
    good, bad = make_state(1, "bfloat16"), worn(kind)
    expected = masters_digest(good)
    assert masters_digest(bad) == expected

    copied = heal(serve(bad), [], expected)
    assert not same(copied, good), "without a comparison they are"

    two = serve(bad, good)
    for source in two:
        with pytest.raises(HealFailed, match=rf"{kind}:.* of the copy is not what [ab]/0 has"):
            heal([source], two, expected)

    three = serve(bad, good, make_state(1, "bfloat16"))
    with pytest.raises(HealFailed, match=rf"{kind}:.* is not what b/0, c/0 has"):
        heal(three[:1], three, expected)
    assert same(heal(three[1:], three, expected), good)


def test_a_copy_that_is_computed_with_is_compared_too() -> None:
    bad, good = worn("compute"), make_state(1, "bfloat16")
    expected = masters_digest(good)
    with pytest.raises(HealFailed, match=r"compute:.* of the copy is not what a/0 has"):
        heal(serve(bad), serve(bad), expected)
    assert same(heal(serve(good), serve(good, good), expected), good)


def test_a_holder_that_does_not_answer_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    good = make_state(1, "bfloat16")
    holders = serve(good, None)
    with caplog.at_level(logging.WARNING):
        copied = heal(holders[:1], holders, masters_digest(good))
    assert same(copied, good)
    assert "the copy is not compared with b/0: q2-abc is over here" in caplog.text


def test_a_comparison_ends_when_the_copy_is_no_longer_wanted() -> None:
    good, asked, going_on = make_state(1), threading.Event(), threading.Event()

    def never(*_: object) -> StageState | None:
        asked.set()
        going_on.wait()
        return None

    server = HealServer(ADDRESS, never)
    client, sources = HealClient(ADDRESS), serve(good)
    errors: list[HealFailed] = []

    def run() -> None:
        try:
            client.copy(
                make_state(),
                sources=sources,
                wanted=WANTED,
                expected=masters_digest(good),
                holders=[Source("b/0", server.address)],
            )
        except HealFailed as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    asked.wait()
    client.shutdown("a newer plan")
    thread.join()
    going_on.set()
    assert [str(error) for error in errors] == ["a newer plan"]


def test_a_comparison_ends_while_it_still_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    good, connects, going_on = make_state(1), threading.Event(), threading.Event()
    client, sources = HealClient(ADDRESS), serve(good)
    lost = Source("b/0", "192.0.2.1:1")
    connect = comparing.open_registered

    def open_registered(peer: str, local: str) -> socket.socket:
        if peer == lost.address:  # its node is gone: only the network's own limit ends a connect
            connects.set()
            going_on.wait()
            raise ConnectionRefusedError
        return connect(peer, local)

    monkeypatch.setattr(comparing, "open_registered", open_registered)
    ended = threading.Event()
    errors: list[HealFailed] = []

    def run() -> None:
        try:
            client.copy(
                make_state(),
                sources=sources,
                wanted=WANTED,
                expected=masters_digest(good),
                holders=[lost],
            )
        except HealFailed as error:
            errors.append(error)
        ended.set()

    threading.Thread(target=run, daemon=True).start()
    connects.wait()
    client.shutdown("a newer plan")
    was_ended = ended.wait(10.0)
    going_on.set()
    assert was_ended
    assert [str(error) for error in errors] == ["a newer plan"]
