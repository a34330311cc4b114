"""Finds out which namespaces the operator can serve.

With rights in single namespaces, a namespace that is deleted takes those in it along. The jobs of
the others must not suffer from that.
"""

from __future__ import annotations

import asyncio
import logging

from mainstay_core.job.spec import PLURAL
from mainstay_operator.kube import KubeClient, KubeError
from mainstay_operator.metrics import Metrics
from mainstay_operator.settings import Settings

logger = logging.getLogger(__name__)

ANSWERED = (403, 404)
"""Refusals that asking again would not mend: missing rights, no such resource."""


async def is_gone(kube: KubeClient, namespace: str) -> bool:
    """Return whether there is no such namespace, for sure.

    Raises:
        KubeError: the API server did not answer.
    """
    try:
        return await kube.fetch("namespaces", "", namespace) is None
    except KubeError as error:
        if error.status not in ANSWERED:
            raise
        return False


async def await_open(kube: KubeClient, settings: Settings, metrics: Metrics) -> tuple[str, ...]:
    """Wait until some of the operator's namespaces can be served; return them."""
    while not (found := await await_answer(kube, settings, metrics)):
        await asyncio.sleep(settings.resync_s)
    return found


async def await_answer(kube: KubeClient, settings: Settings, metrics: Metrics) -> tuple[str, ...]:
    """Return the operator's namespaces in which jobs and pods may be listed.

    While the Kubernetes API does not answer, it is asked again.
    """
    while True:
        try:
            found = tuple([n for n in settings.namespace_list if await _is_open(kube, n)])
        except KubeError as error:
            logger.warning("which namespaces can be served is not known: %s", error)
            await asyncio.sleep(settings.resync_s)
        else:
            metrics.note_answer(complete=False)
            return found


async def _is_open(kube: KubeClient, namespace: str) -> bool:
    try:
        for resource in (PLURAL, "pods"):
            await kube.list(resource, namespace, limit=1)
    except KubeError as error:
        if error.status not in ANSWERED:
            raise
        return False
    return True
