"""Tells the api of a job: that it is there, what changed in it, where its nodes are.

A job whose template the API server does not take is not told.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from mainstay_core.pool.observed import ObservedNode, ObservedPod
from mainstay_core.wire.api import ApiError
from mainstay_operator.actuator import Actuator
from mainstay_operator.api_client import ApiClient
from mainstay_operator.decisions import log_decision
from mainstay_operator.kube import RIGHTS_REMEDY, KubeError
from mainstay_operator.resources import JobView, ObjectNames
from mainstay_operator.state import ReconcilerState

TRIED_AGAIN_S = 60.0
"""A template of which no pod can be made is tried again so often."""
RECOVER_S = 30.0
"""How long a lost job is left to its supervisors, which recover it; then it is submitted anew."""


async def try_template(
    view: JobView,
    state: ReconcilerState,
    actuator: Actuator,
    names: ObjectNames,
    pods: Iterable[ObservedPod],
) -> bool:
    """Make a pod on trial of a template that is new, and keep a bad one from the api.

    A job that runs has a template that served: an API server that has become stricter does not stop
    it. A bad one is tried again now and then, as the API server may have changed.

    Returns:
        Whether the template has been tried. If not, the Kubernetes API has no answer now: the job
        is kept from the api until the next pass, or it would begin with a template of which nobody
        knows, and not be tried again.
    """
    if view.job is None:
        return True  # a change that is refused already
    now_s = time.time()
    made_of = (view.template, view.option("supervisor"), view.template_problem)
    is_late = bool(state.template_problem) and now_s - state.tried_at_s > TRIED_AGAIN_S
    if (state.tried != made_of or is_late) and not (view.runs or state.taken_names):
        problem = view.template_problem
        try:
            if not problem:
                problem = await actuator.try_pod(view, actuator.pod_options(names, pods))
        except KubeError as error:
            state.api_problem = f"whether a pod can be made of spec.template is not known: {error}"
            if error.unauthorized:
                state.api_problem += f"; {RIGHTS_REMEDY}"
            return False
        if state.template_problem and not problem:
            state.submitted, state.refused = -1, ""
        state.tried, state.tried_at_s, state.template_problem = made_of, now_s, problem
    if state.template_problem:
        state.refused, state.submitted = state.template_problem, view.generation
    return True


async def submit(view: JobView, state: ReconcilerState, api: ApiClient) -> None:
    """Make the job known, or what changed in it; what is refused is shown, not repeated.

    Raises:
        ApiError: the api was not reached, or is not able to.
    """
    if state.submitted == view.generation:
        return
    if view.job is None:  # what the api has goes on
        state.submitted = view.generation
        return
    # What was refused is another specification, even if the api does not answer now.
    state.refused = ""
    try:
        await api.submit_job(view.uid, view.namespace, view.manifest)
        log_decision(view, "Submit", f"the api has generation {view.generation}")
    except ApiError as error:
        if not error.is_final:
            raise
        state.refused = str(error)
    state.submitted = view.generation
    state.demand_at_s = 0.0


def note_unknown(state: ReconcilerState, pods: Iterable[ObservedPod]) -> None:
    """The api does not know the job: its supervisors recover it, else it is submitted anew."""
    now_s = time.time()
    if state.refused:
        return
    state.unknown_since_s = state.unknown_since_s or now_s
    nobody = not any(p.ready for p in pods)
    if nobody or now_s - state.unknown_since_s > RECOVER_S:
        state.submitted = -1
        state.unknown_since_s = 0.0


async def report_topology(
    view: JobView,
    state: ReconcilerState,
    api: ApiClient,
    *,
    pods: Iterable[ObservedPod],
    nodes: Mapping[str, ObservedNode] | None,
    again_s: float,
) -> None:
    """Tell where the nodes of pods are, before their supervisors come; and again, now and then,
    as the store may have been lost.

    Raises:
        ApiError: the api was not reached, or refused.
    """
    now_s = time.time()
    locations = view.locations(pods, nodes)
    late = now_s - state.topology_at_s > again_s
    if locations and (locations != state.topology or late):
        await api.report_topology(view.uid, locations)
        state.topology, state.topology_at_s = locations, now_s
