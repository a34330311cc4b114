"""Admits callers: the credentials of a request, and the check of local mode.

Agents, people and the provider (who makes the pods: the operator, or local mode)
are admitted apart; :mod:`mainstay_api.kube_auth` is the other implementation.
docs/security.md says what each may do.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Protocol

from mainstay_api.problems import ProblemError
from mainstay_core.base.ids import JobUid
from mainstay_core.base.words import quote

MAX_QUOTED_PODS = 5
"""Pods that a refusal quotes: a request may speak for thousands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobName:
    """The name and the namespace under which a job was submitted."""

    namespace: str
    """Empty in local mode."""
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}:{self.name}" if self.namespace else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentAsk:
    """The job and the pod that a supervisor's request claims to come from."""

    token: str
    job: str
    """The job in the path."""
    uid: JobUid | None
    """None: the store does not know the job."""
    name: JobName | None
    """The name of the known job."""
    pod: str
    """The pod that the header names; empty without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """A caller that was admitted by the headers of its request alone."""

    username: str
    groups: tuple[str, ...] = ()
    uid: str = ""
    extra: tuple[tuple[str, tuple[str, ...]], ...] = ()
    pod: str = ""
    """The pod to which the token is bound; empty for people and in local mode."""
    job: JobName | None = None
    """The job that the ServiceAccount was made for; None of people, and in local mode."""
    sees_all: bool = False
    """May list the jobs of all namespaces."""
    is_provider: bool = False
    """Makes the pods: the operator, or local mode, whose people have the same token."""


class Auth(Protocol):
    """Admits callers: every method raises ProblemError (401, 403, 503) or admits."""

    async def admit_agent(self, ask: AgentAsk) -> Caller:
        """Admit a supervisor to the routes of its job."""
        ...

    async def admit_person(self, token: str, verb: str, job: JobName | None) -> Caller:
        """Admit a person, or the operator.

        Args:
            token: what they present.
            verb: ``get``, ``list`` or ``patch`` of trainingjobs.
            job: the job; None when no job, or no job that is known, is named.
        """
        ...

    async def admit_operator(self, token: str) -> Caller:
        """Admit the provider, and nobody else."""
        ...

    async def admit_scraper(self, token: str) -> Caller:
        """Admit who may read the metrics of all jobs."""
        ...

    async def may_list(self, caller: Caller, namespace: str) -> bool:
        """Return whether the caller may see the jobs of a namespace."""
        ...

    async def aclose(self) -> None:
        """Close all connections."""
        ...


def unauthorized(detail: str, what_to_do: str) -> ProblemError:
    """Return the answer to a caller who is not known."""
    return ProblemError(401, "unauthorized", detail, what_to_do)


def forbidden(detail: str, what_to_do: str) -> ProblemError:
    """Return the answer to a caller who is known and may not."""
    return ProblemError(403, "forbidden", detail, what_to_do)


def require_own(pod: str, named: Collection[str]) -> None:
    """Let a request speak for the pod of its token alone.

    Args:
        pod: to which the token is bound; empty in local mode, where tokens are bound to none.
        named: the pods for which header or body speak.

    Raises:
        ProblemError: it speaks for another one.
    """
    others = sorted({*named} - {pod}) if pod else ()
    if others:
        raise forbidden(
            f"the token is bound to pod {pod}, the request speaks for "
            + ", ".join(map(quote, others[:MAX_QUOTED_PODS])),
            "name the token's own pod in the header Mainstay-Pod and in the body",
        )


class TokenAuth:
    """Local mode: one random token for people and the provider, one (or the same) for agents."""

    def __init__(self, admin_token: str, agent_token: str) -> None:
        if not admin_token or not agent_token:
            raise ValueError("a token is empty")
        self._admin = admin_token
        self._agent = agent_token

    async def admit_agent(self, ask: AgentAsk) -> Caller:
        """Whoever may do everything may do this as well."""
        return self._admit(ask.token, "MAINSTAY_AGENT_TOKEN", self._agent, self._admin)

    async def admit_person(self, token: str, verb: str, job: JobName | None) -> Caller:
        del verb, job
        return await self.admit_operator(token)

    async def admit_operator(self, token: str) -> Caller:
        caller = self._admit(token, "MAINSTAY_ADMIN_TOKEN", self._admin)
        return replace(caller, is_provider=True)

    async def admit_scraper(self, token: str) -> Caller:
        return await self.admit_operator(token)

    async def may_list(self, caller: Caller, namespace: str) -> bool:
        del caller, namespace
        return True

    async def aclose(self) -> None:
        """Nothing is open."""

    def _admit(self, token: str, name: str, *accepted: str) -> Caller:
        given = token.encode()
        # Every comparison is made, in constant time: the answer tells nothing about a token.
        matches = [hmac.compare_digest(given, expected.encode()) for expected in accepted]
        if any(matches):
            return Caller(username="token", sees_all=True)
        raise unauthorized(
            "the token is missing" if not given else "the token is not the one that this needs",
            f"send 'Authorization: Bearer TOKEN' with the api's {name} (or MAINSTAY_TOKEN)",
        )
