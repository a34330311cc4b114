"""When the operator says that it does not get on: values in, a sentence out."""

from __future__ import annotations

from mainstay_core.pool.observed import ObservedNode
from mainstay_operator.liveness import Liveness, RunningPass
from mainstay_operator.node_cache import NodeCache


def problem(liveness: Liveness, now_s: float, *passes: RunningPass) -> str:
    return liveness.find_problem(passes, max_idle_s=300.0, qps=50.0, now_s=now_s)


def test_an_operator_without_jobs_that_is_answered_is_alive() -> None:
    liveness = Liveness(0.0)
    assert problem(liveness, 299.0) == ""

    liveness.note_answer(290.0, complete=True)

    assert problem(liveness, 590.0) == ""
    assert liveness.resync_age_s(590.0) == 300.0
    assert problem(liveness, 591.0) == "the Kubernetes API has answered no resync for 301 s"


def test_a_refusal_is_an_answer_but_no_resync() -> None:
    liveness = Liveness(0.0)
    liveness.note_answer(500.0, complete=False)

    assert problem(liveness, 600.0) == ""
    assert liveness.resync_age_s(600.0) == 600.0


def test_a_pass_that_does_not_end_is_a_problem_whatever_the_others_do() -> None:
    liveness = Liveness(0.0)
    liveness.note_answer(1000.0, complete=True)
    running = RunningPass(job="n/stuck", since_s=600.0)

    assert problem(liveness, 900.0, running) == ""
    assert problem(liveness, 1000.0, running) == "a pass over n/stuck has not ended for 400 s"


def test_a_job_of_many_pods_is_given_the_time_that_they_take() -> None:
    liveness = Liveness(0.0)
    liveness.note_answer(1000.0, complete=True)
    running = RunningPass(job="n/large", since_s=600.0, num_pods=10_000)

    assert problem(liveness, 1000.0, running) == ""


def test_a_watch_that_shows_nothing_of_what_there_is_is_a_problem() -> None:
    liveness = Liveness(0.0)
    liveness.note_missed("pods", 100.0)
    liveness.note_missed("pods", 350.0)
    liveness.note_answer(400.0, complete=True)

    assert "the watch of pods has shown nothing for 301 s" in problem(liveness, 401.0)
    # A list may just have been faster than the watch.
    liveness.note_watched("pods")
    assert problem(liveness, 401.0) == ""


def test_nodes_that_a_list_shows_are_put_right_unless_the_watch_was_there_later() -> None:
    cache = NodeCache()
    for name in ("stays", "goes", "told"):
        cache.note_node(ObservedNode(name=name))
    cache.begin_list()
    assert cache.note_node(ObservedNode(name="told", cordoned=True))

    listed = [ObservedNode(name=name) for name in ("stays", "told", "new")]

    assert cache.apply_list(listed)
    assert {n.name for n in cache.show().values() if n.gone} == {"goes"}
    assert cache.show()["told"].cordoned
    assert "new" in cache.show()
    cache.begin_list()
    assert not cache.apply_list([*listed[:1], ObservedNode(name="told", cordoned=True), listed[2]])
