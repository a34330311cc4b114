"""What is remembered of pods between two looks: losses are told in any case, and counted once."""

from __future__ import annotations

from tests.core.pool.test_repair import NOW_S, demand, pod, uid

from mainstay_core.pool.memory import PoolMemory
from mainstay_core.pool.observed import ObservedPod, PodPhase


def failed(index: int, at_s: float = 0.0) -> ObservedPod:
    return pod(index, phase=PodPhase.FAILED, failure="code 1", ended_at_s=at_s)


def test_a_loss_is_found_again_until_the_api_has_heard_of_it_and_counted_once() -> None:
    memory = PoolMemory().after_look([pod(0), pod(1)], None, (), told=True)
    wanted = demand(2)

    losses = memory.find_losses([failed(0), pod(1)], None, wanted, NOW_S)
    memory, new = memory.account(losses)
    assert [loss.uid for loss in new] == [uid(0)]

    memory = memory.after_look([failed(0), pod(1)], None, losses, told=False)
    again = memory.find_losses([failed(0), pod(1)], None, wanted, NOW_S + 60)
    memory, new = memory.account(again)
    assert ([loss.uid for loss in again], new) == ([uid(0)], ())
    assert memory.counted == (NOW_S,)

    memory = memory.after_look([failed(0), pod(1)], None, again, told=True)
    assert memory.find_losses([failed(0), pod(1)], None, wanted, NOW_S + 60) == ()
    # An old demand still names the pod as living.
    assert memory.find_untold([failed(0), pod(1)], None, demand(2, 0, 1), NOW_S + 60) == ()


def test_a_loss_has_the_time_at_which_its_end_was_seen() -> None:
    memory = PoolMemory().after_look([pod(0), pod(1)], None, (), told=True)

    seen, unseen = memory.find_losses([failed(0, NOW_S - 7)], None, demand(2), NOW_S)

    assert (seen.at_s, unseen.at_s) == (NOW_S - 7, NOW_S)


def test_a_pod_that_was_leaving_is_remembered_as_such_until_its_loss_is_told() -> None:
    memory = PoolMemory().after_look([pod(0), pod(1)], None, (), told=True)
    memory = memory.after_hearing(demand(2, 0, 1, leaving=frozenset({uid(0)})))
    memory = memory.after_hearing(demand(2, 1))

    losses = memory.find_losses([failed(0), failed(1)], None, demand(2, 1), NOW_S)
    assert [(loss.leaving, loss.counts) for loss in losses] == [(True, False), (False, True)]

    memory = memory.after_look([], None, losses, told=True).after_hearing(demand(2))
    assert memory.leaving == frozenset()


def test_the_last_words_of_a_pod_count_only_if_it_was_known() -> None:
    memory = PoolMemory().after_look([pod(0)], None, (), told=True)

    words = {uid(i): pod(i, ended_for="the job does not need it") for i in (0, 1)}
    memory = memory.with_last_words(words)

    assert set(memory.before) == {uid(0)}
    (loss,) = memory.find_losses([], None, demand(1), NOW_S)
    assert loss.evidence == "the operator ended pod demo-0: the job does not need it"
