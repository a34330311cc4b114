"""Keeps the objects of a job that the job owns, and touches none that others own.

An object is a job's own if the job's uid is that of its controller. What has the name but not
the owner is left as it is, and is told of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mainstay_operator.kube import KINDS, KubeClient, KubeError
from mainstay_operator.observed import job_of


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenName:
    """A name that a job needs, and that an object has which is not the job's own."""

    kind: str
    namespace: str
    name: str
    is_mainstays: bool = False
    """Whether it is the operator's or the api's, and never a job's."""

    def describe(self) -> str:
        """Return what it is and what follows, for people."""
        named = f"{self.kind} {self.namespace}/{self.name}"
        if self.is_mainstays:
            return f"{named} is that of operator or api: no job's pods get it"
        return (
            f"{named} is not this job's own and is left as it is; the job needs one of this name, "
            "so delete it if nobody needs it"
        )


async def keep_own(
    kube: KubeClient, uid: str, body: Mapping[str, Any], *, fixed: bool
) -> TakenName | None:
    """Make a job's object, or bring its own back to what it should be.

    Args:
        kube: client of the Kubernetes API.
        uid: of the job.
        body: the object.
        fixed: it stays what it was when it was made, like a secret.

    Returns:
        The name, if somebody else has an object of it; None if all is well.

    Raises:
        KubeError: the Kubernetes API refused; to be tried again.
    """
    metadata = body["metadata"]
    resource, namespace, name = KINDS[body["kind"]], metadata["namespace"], metadata["name"]
    found = await kube.fetch(resource, namespace, name)
    if found is None:
        # Created, never applied: an apply would take over what somebody makes just now.
        if await kube.create(body) is not None:
            return None
        found = await kube.fetch(resource, namespace, name)
        if found is None:
            raise KubeError(f"{body['kind']} {namespace}/{name} comes and goes", 409)
    if job_of(found) != uid:
        return TakenName(kind=body["kind"], namespace=namespace, name=name)
    if not fixed:
        # By its uid: what takes its place from here on is not changed, but refused.
        own = {**metadata, "uid": found["metadata"]["uid"]}
        await kube.apply({**body, "metadata": own})
    return None
