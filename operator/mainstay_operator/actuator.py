"""Acts in the cluster: makes and ends pods, keeps objects, tells Events."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from mainstay_core.base.logs import about
from mainstay_core.base.words import count
from mainstay_core.job.spec import API_VERSION, KIND, PLURAL
from mainstay_core.pool.observed import ObservedPod, find_example
from mainstay_core.pool.repair import PodEnd
from mainstay_operator import builders
from mainstay_operator.builders import PodOptions
from mainstay_operator.decisions import about_job, log_decision
from mainstay_operator.events import Note, build_event
from mainstay_operator.kube import KubeClient, KubeError
from mainstay_operator.metrics import Metrics
from mainstay_operator.observed import job_of, observe_pod
from mainstay_operator.ownership import TakenName, keep_own
from mainstay_operator.resources import (
    ENDED_AS,
    ENDED_FOR,
    FINALIZER,
    STATUS_MANAGER,
    JobView,
    ObjectNames,
)
from mainstay_operator.settings import Settings

logger = logging.getLogger(__name__)

PARALLEL = 32
"""Requests of one job at a time; the client bounds them per second as well."""
SECRET_BYTES = 32
FINALIZER_TRIES = 5
MAX_UNTOLD = 100
"""Events of a job that wait for a Kubernetes API which has no answer; the newest. Each is in the
log already."""


class NameTakenError(Exception):
    """A pod's name belongs to somebody else's pod."""

    def __init__(self, index: int) -> None:
        super().__init__(f"index {index} is taken")
        self.index = index


class Actuator:
    """Acts on the objects of jobs.

    Args:
        kube: client of the Kubernetes API.
        settings: of the operator.
        instance: name of this process, for Events.
        metrics: where pods are counted.
    """

    def __init__(
        self, kube: KubeClient, settings: Settings, instance: str, metrics: Metrics
    ) -> None:
        self.kube = kube
        self._metrics = metrics
        self._settings = settings
        self._resources = settings.supervisor_resources()
        self._instance = instance
        self._parallel = asyncio.Semaphore(PARALLEL)
        selector = (pair.partition("=") for pair in settings.api_selector.split(",") if pair)
        self._untold: dict[str, deque[dict[str, Any]]] = {}
        """By job, the Events that could not be made yet, with the time of what they tell."""
        self._api_selector = {key.strip(): value.strip() for key, _, value in selector}

    def pod_options(
        self,
        names: ObjectNames,
        pods: Iterable[ObservedPod],
        avoid_nodes: Iterable[str] = (),
        shun_nodes: Iterable[str] = (),
    ) -> PodOptions:
        """Return what new pods of a job get from the settings, beside the ``pods`` that it has."""
        settings, example = self._settings, find_example(pods)
        return PodOptions(
            agent_image=settings.agent_image if example is None else example.agent_image,
            account="" if example is None else example.account,
            pull_policy=settings.agent_pull_policy,
            api_url=settings.agent_api_url or settings.api_url,
            names=names,
            resources=self._resources,
            avoid_nodes=tuple(sorted(avoid_nodes)),
            shun_nodes=tuple(sorted(shun_nodes)),
        )

    async def remove_finalizer(self, view: JobView) -> None:
        """Take away the finalizer that the operator of the version before put there.

        Raises:
            KubeError: it is still there; to be tried again.
        """
        finalizers = view.finalizers
        for _ in range(FINALIZER_TRIES):
            if FINALIZER not in finalizers:
                return
            path = f"/metadata/finalizers/{finalizers.index(FINALIZER)}"
            patch = [
                {"op": "test", "path": "/metadata/uid", "value": view.uid},
                {"op": "test", "path": path, "value": FINALIZER},
                {"op": "remove", "path": path},
            ]
            if await self.kube.patch(PLURAL, view.namespace, view.name, patch):
                log_decision(view, "RemoveFinalizer", "that of the version before is taken away")
                return
            # It is no more, or others have changed the list.
            found = await self.kube.fetch(PLURAL, view.namespace, view.name)
            metadata = (found or {}).get("metadata") or {}
            if metadata.get("uid") != view.uid:
                return
            finalizers = tuple(metadata.get("finalizers") or ())
        raise KubeError(f"{view.name}: its finalizers change all the time", 409)

    async def find_names(self, view: JobView) -> ObjectNames:
        """Return the names of what the job has, or will have, beside its pods.

        A job that the operator of the version before began keeps its objects: its pods present
        that Secret to each other and are known by that ServiceAccount.
        """
        old = view.old_object_names()
        found = await self.kube.fetch("secrets", view.namespace, old.secret)
        is_old = found is not None and job_of(found) == view.uid
        return old if is_old else view.object_names()

    async def keep_objects(self, view: JobView, names: ObjectNames) -> tuple[TakenName, ...]:
        """Make, or bring back to what they should be, the objects that pods need beside them.

        Returns:
            Names that others have. While there are any, pods must not be made.
        """
        for name in (names.shared, view.account):
            if f"{view.namespace}/{name}" in self._settings.own_account_set:
                account = TakenName(
                    kind="ServiceAccount", namespace=view.namespace, name=name, is_mainstays=True
                )
                return (account,)
        secret = builders.build_secret(view, names, secrets.token_hex(SECRET_BYTES))
        bodies = [builders.build_service(view, names), builders.build_service_account(view, names)]
        if self._settings.network_policy:
            policy = builders.build_network_policy(
                view, names, self._api_selector, self._settings.api_namespace
            )
            bodies.append(policy)
        kept = await asyncio.gather(
            keep_own(self.kube, view.uid, secret, fixed=True),
            *(keep_own(self.kube, view.uid, body, fixed=False) for body in bodies),
        )
        return tuple(taken for taken in kept if taken is not None)

    async def keep_disruption_budget(
        self, view: JobView, names: ObjectNames, min_available: int
    ) -> TakenName | None:
        """Have evictions leave at least so many pods; return the name, if others have it."""
        budget = builders.build_disruption_budget(view, names, min_available)
        return await keep_own(self.kube, view.uid, budget, fixed=False)

    async def write_status(self, view: JobView, status: Mapping[str, Any]) -> bool:
        """Declare the whole status; return False if the job is no more."""
        body = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": _named(view),
            "status": dict(status),
        }
        try:
            await self.kube.apply_status(body, STATUS_MANAGER)
        except KubeError as error:
            if error.status in (404, 409):
                return False
            raise
        return True

    async def try_pod(self, view: JobView, options: PodOptions) -> str:
        """Return why no pod of the job's template can be made; "" if it is not at fault.

        One is made as a trial, of which the API server keeps nothing. What the cluster does not
        have or allow now (a quota, an account, a policy) is no fault of the template.

        Raises:
            KubeError: the Kubernetes API has no answer now, or none for this operator; to be tried
                again.
        """
        body = builders.build_pod(view, 0, options)
        refusal = await self._try(body, strict=True)
        if refusal is None:
            return ""
        if refusal.unauthorized:
            raise refusal
        if refusal.status == HTTPStatus.BAD_REQUEST:
            # Either a field that nobody knows, or the word of a webhook: that refuses either way.
            again = await self._try(body, strict=False)
            if again is not None and again.status == HTTPStatus.BAD_REQUEST:
                return ""
            if again is not None and not _is_final(again):
                raise again
        elif not _is_final(refusal):
            raise refusal
        elif refusal.status != HTTPStatus.UNPROCESSABLE_ENTITY or not refusal.fields:
            return ""
        what = "no pod can be made of spec.template and spec.supervisor.resources"
        return f"{what}: {refusal.answer}"

    async def _try(self, body: Mapping[str, Any], *, strict: bool) -> KubeError | None:
        async with self._parallel:
            try:
                await self.kube.try_create(body, strict=strict)
            except KubeError as error:
                return error
        return None

    async def make_pods(
        self, view: JobView, indexes: Sequence[int], options: PodOptions
    ) -> tuple[list[ObservedPod], list[Exception]]:
        """Make pods, all at once; return those that are there now, and what went wrong."""
        results = await asyncio.gather(
            *(self._make_pod(view, index, options) for index in indexes), return_exceptions=True
        )
        made = [r for r in results if isinstance(r, ObservedPod)]
        self._metrics.pods_made.inc(len(made))
        errors = [r for r in results if isinstance(r, Exception)]
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, Exception):
                raise result
        return made, errors

    async def _make_pod(self, view: JobView, index: int, options: PodOptions) -> ObservedPod:
        async with self._parallel:
            body = builders.build_pod(view, index, options)
            made = await self.kube.create(body)
            if made is None:
                # Made before an answer got lost, or somebody else's.
                made = await self.kube.fetch("pods", view.namespace, view.pod_name(index))
                # By its owner: whoever makes a pod chooses its labels.
                if made is None or job_of(made) != view.uid:
                    raise NameTakenError(index)
            return observe_pod(made)

    async def end_pods(self, view: JobView, ends: Sequence[PodEnd]) -> list[Exception]:
        """Delete pods, all at once; return what went wrong."""
        results = await asyncio.gather(
            *(self._end_pod(view, end) for end in ends), return_exceptions=True
        )
        return [r for r in results if isinstance(r, Exception)]

    async def _end_pod(self, view: JobView, end: PodEnd) -> None:
        async with self._parallel:
            if not end.force:
                # Said first: whoever looks later, a new operator too, knows that it was no failure.
                said = {ENDED_FOR: end.why, ENDED_AS: end.cause.value}
                patch = {"metadata": {"uid": end.uid, "annotations": said}}
                try:
                    await self.kube.merge("pods", view.namespace, end.name, patch)
                except KubeError as error:
                    if error.status != 409:
                        raise
                    return
            await self.kube.delete("pods", view.namespace, end.name, end.uid, force=end.force)
            self._metrics.pods_ended.labels(str(end.force).lower()).inc()
            how = "removed by force" if end.force else "deleted"
            log_decision(view, "EndPod", f"pod {end.name} is {how}: {end.why}")

    async def taint_node(self, name: str, key: str, effect: str) -> None:
        """Keep pods off a node, once; nothing if this operator may not change nodes."""
        if not self._settings.quarantine_nodes:
            logger.warning("node %s is not tainted: the operator may not (quarantineNodes)", name)
            return
        await self.kube.taint_node(name, key, effect)

    async def tell(self, view: JobView, notes: Iterable[Note]) -> None:
        """Make Events, all at once; those that cannot be made now wait for :meth:`tell_again`."""
        bodies = []
        for note in notes:
            log_decision(view, note.reason, note.message, warning=note.warning)
            bodies.append(build_event(view, note, time.time(), self._instance))
        problems = await asyncio.gather(*(self._make_event(view, body) for body in bodies))
        untold = [body for body, why in zip(bodies, problems, strict=True) if why]
        if untold:
            why = next(filter(None, problems))
            what = f"{count(len(untold), 'Event')} could not be made yet: {why}"
            logger.warning("%s", what, extra=about(**about_job(view)))
            self._untold.setdefault(view.uid, deque(maxlen=MAX_UNTOLD)).extend(untold)

    async def tell_again(self, view: JobView) -> None:
        """Make the job's Events that wait, until one cannot be made now either."""
        untold = self._untold.get(view.uid)
        while untold:
            if await self._make_event(view, untold[0]):
                return
            untold.popleft()
        self._untold.pop(view.uid, None)

    def drop_job(self, uid: str) -> None:
        """Forget a job that is no more."""
        self._untold.pop(uid, None)

    async def _make_event(self, view: JobView, body: Mapping[str, Any]) -> str:
        """Make an Event; return why that cannot be done now. One that is refused is given up."""
        try:
            async with self._parallel:
                await self.kube.create(body)
        except KubeError as error:
            if not _is_final(error):
                return str(error)
            fields = about_job(view)
            logger.warning("an Event could not be made: %s", error, extra=about(**fields))
        return ""


def _named(view: JobView) -> dict[str, str]:
    """Return the metadata by which one object is meant, and no later one of its name."""
    return {"name": view.name, "namespace": view.namespace, "uid": view.uid}


_NOT_NOW = frozenset(
    {HTTPStatus.UNAUTHORIZED, HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS}
)
"""Refusals of who asks, or of when: a token that has run out is replaced by a newer one."""


def _is_final(error: KubeError) -> bool:
    """Whether a refusal comes again: the API server is there, knows us, and is not too busy."""
    return 400 <= error.status < 500 and error.status not in _NOT_NOW
