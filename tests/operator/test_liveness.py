"""When the operator says that it does not get on: values in, a sentence out."""

from __future__ import annotations

from mainstay_core.pool.observed import SeenNode
from mainstay_operator.liveness import Pulse, RunningLook
from mainstay_operator.node_cache import NodeCache


def problem(pulse: Pulse, now_s: float, *looks: RunningLook) -> str:
    return pulse.find_problem(looks, max_idle_s=300.0, qps=50.0, now_s=now_s)


def test_an_operator_without_jobs_that_is_answered_is_alive() -> None:
    pulse = Pulse(0.0)
    assert problem(pulse, 299.0) == ""

    pulse.note_answer(290.0, complete=True)

    assert problem(pulse, 590.0) == ""
    assert pulse.resync_age_s(590.0) == 300.0
    assert problem(pulse, 591.0) == "the Kubernetes API has answered no resync for 301 s"


def test_a_refusal_is_an_answer_but_no_resync() -> None:
    pulse = Pulse(0.0)
    pulse.note_answer(500.0, complete=False)

    assert problem(pulse, 600.0) == ""
    assert pulse.resync_age_s(600.0) == 600.0


def test_a_look_that_does_not_end_is_a_problem_whatever_the_others_do() -> None:
    pulse = Pulse(0.0)
    pulse.note_answer(1000.0, complete=True)
    look = RunningLook(job="n/stuck", since_s=600.0)

    assert problem(pulse, 900.0, look) == ""
    assert problem(pulse, 1000.0, look) == "a look at n/stuck has not ended for 400 s"


def test_a_job_of_many_pods_is_given_the_time_that_they_take() -> None:
    pulse = Pulse(0.0)
    pulse.note_answer(1000.0, complete=True)
    look = RunningLook(job="n/large", since_s=600.0, num_pods=10_000)

    assert problem(pulse, 1000.0, look) == ""


def test_a_watch_that_shows_nothing_of_what_there_is_is_a_problem() -> None:
    pulse = Pulse(0.0)
    pulse.note_missed("pods", 100.0)
    pulse.note_missed("pods", 350.0)
    pulse.note_answer(400.0, complete=True)

    assert "the watch of pods has shown nothing for 301 s" in problem(pulse, 401.0)
    # A list may just have been faster than the watch.
    pulse.note_watched("pods")
    assert problem(pulse, 401.0) == ""


def test_nodes_that_a_list_shows_are_put_right_unless_the_watch_was_there_later() -> None:
    cache = NodeCache()
    for name in ("stays", "goes", "told"):
        cache.learn(SeenNode(name=name))
    cache.begin_list()
    assert cache.learn(SeenNode(name="told", cordoned=True))

    listed = [SeenNode(name=name) for name in ("stays", "told", "new")]

    assert cache.put_right(listed)
    assert {n.name for n in cache.show().values() if n.gone} == {"goes"}
    assert cache.show()["told"].cordoned
    assert "new" in cache.show()
    cache.begin_list()
    assert not cache.put_right([*listed[:1], SeenNode(name="told", cordoned=True), listed[2]])
