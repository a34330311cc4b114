"""Admits callers in a cluster: the API server reviews their tokens and rights.

- A supervisor presents its pod's projected token, meant for its job alone. The
  token is bound to the pod, the pod is called like one of the job's, its ServiceAccount
  is the job's, or the one that the job's template names, and the pod that a request names
  and speaks for is that pod.
- The operator presents a token meant for the api and is known by its name.
- People present a token meant for the api, or the one they use with kubectl, and
  may read a job here if they may ``get`` it there, and change it if they may ``patch``.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
from dataclasses import dataclass, replace

from mainstay_api.auth import AgentAsk, Caller, JobName, forbidden, require_own, unauthorized
from mainstay_api.kube import FoundJob, KubeClient, KubeUnavailableError, Review
from mainstay_api.problems import ProblemError
from mainstay_api.reviews import Reviews
from mainstay_core.job.object_names import account_names, jobs_of_account
from mainstay_core.job.spec import API_AUDIENCE, JOB_AUDIENCE

logger = logging.getLogger(__name__)

STALE_AGENT_S = 600.0
"""How long supervisors are known while the API server does not answer."""
ACCESS_S = 10.0
"""How long an answer about what somebody may do is used."""
UNKNOWN_TOKEN_S = 10.0
"""How long a token that nobody knows is remembered. One that is good later is a rare thing: a pod's
whose own object the API server has not seen yet."""
METRICS_PATH = "/metrics"
"""Path of the metrics, as rights to it are granted in a cluster."""
_ACCOUNT = "system:serviceaccount:"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Account:
    """A ServiceAccount by what names it."""

    namespace: str
    name: str


class KubernetesAuth:
    """Admits by TokenReview and SubjectAccessReview.

    Args:
        client: of the API server.
        operator_user: name of the operator's ServiceAccount, as a TokenReview names it.
        review_cache_s: how long an answer about a token is used.
    """

    def __init__(self, client: KubeClient, operator_user: str, review_cache_s: float) -> None:
        self._client = client
        self._operator_user = operator_user
        self._agents = Reviews[Review](
            review_cache_s, stale_s=STALE_AGENT_S, refused_s=UNKNOWN_TOKEN_S
        )
        self._people = Reviews[Review](review_cache_s, refused_s=UNKNOWN_TOKEN_S)
        self._access = Reviews[bool](ACCESS_S)
        self._jobs = Reviews[FoundJob | None](ACCESS_S, stale_s=STALE_AGENT_S)

    async def admit_agent(self, ask: AgentAsk) -> Caller:
        todo = (
            f"send the pod's projected token, whose audience is {JOB_AUDIENCE}{ask.uid or ask.job}"
        )
        review = await self._review(self._agents, ask.token, f"{JOB_AUDIENCE}{ask.uid or ask.job}")
        if not review.authenticated:
            raise _refused(ask.token, review, todo)
        account = _account(review.username)
        if account is None or not review.pod:
            raise forbidden(f"the token of {review.username} is bound to no pod", todo)
        name = await self._job_of(account, review.pod_name, ask)
        if name is None or not _is_pod_of(name.name, review.pod_name):
            raise forbidden(
                f"pod {review.pod_name} as {review.username} is no pod of job {ask.job}",
                "use the ServiceAccount that the operator made for the job, or name another as "
                "serviceAccountName in the job's template",
            )
        require_own(review.pod, {ask.pod})
        return replace(_caller(review), pod=review.pod, job=name)

    async def _job_of(self, account: _Account, pod: str, ask: AgentAsk) -> JobName | None:
        """Return the name of the job that is asked for, None if the account is not one of its."""
        if ask.name is not None:
            if account.namespace != ask.name.namespace:
                return None
            if account.name in account_names(ask.name.name, ask.uid or ask.job):
                return ask.name
            return ask.name if await self._names_account(ask.name, account, ask) else None
        # The store has lost the job, and with it whose it is: the cluster knows.
        for job in jobs_of_account(account.name):
            name = JobName(namespace=account.namespace, name=job)
            if account.name not in account_names(job, ask.job):
                continue
            if await self._find(name, ask.job, account) is not None:
                return name
        # Pods are called by their job's name and a number.
        named = JobName(namespace=account.namespace, name=pod.rpartition("-")[0])
        return named if named.name and await self._names_account(named, account, ask) else None

    async def _names_account(self, name: JobName, account: _Account, ask: AgentAsk) -> bool:
        """Return whether the job that is asked for names the account in its template."""
        found = await self._find(name, ask.uid or ask.job, account)
        return found is not None and found.account == account.name

    async def _find(self, name: JobName, uid: str, account: _Account) -> FoundJob | None:
        """Return the job of this name, None if it is not the one of this uid.

        An answer is used again for the account that asks: a job may have named another one before.
        """

        async def fetch() -> FoundJob | None:
            found = await self._client.fetch_job(name.namespace, name.name)
            return found if found is not None and found.uid == uid else None

        try:
            return await self._jobs.ask((name, uid, account), fetch, lambda job: job is not None)
        except KubeUnavailableError as error:
            raise _unavailable(error) from error

    async def admit_person(self, token: str, verb: str, job: JobName | None) -> Caller:
        review, ours = await self._person(token)
        if ours and review.username == self._operator_user:
            return replace(_caller(review), sees_all=True, is_provider=True)
        if verb == "list":
            return replace(_caller(review), sees_all=await self._may(review, "list", "", ""))
        if job is None:
            # There is no such job: nothing but that will be said.
            return _caller(review)
        # A job without a namespace is nobody's, in a cluster.
        if not job.namespace or not await self._may(review, verb, job.namespace, job.name):
            raise forbidden(
                f"{review.username} may not {verb} trainingjobs.mainstay.dev {job.name} "
                f"in namespace {job.namespace}",
                f"ask for the right to {verb} it (it comes with the roles view and edit)",
            )
        return _caller(review)

    async def admit_operator(self, token: str) -> Caller:
        review, ours = await self._person(token)
        if not ours or review.username != self._operator_user:
            raise forbidden(
                f"{review.username} is not the operator",
                "create, change and delete TrainingJobs with kubectl; the operator does the rest",
            )
        return replace(_caller(review), sees_all=True, is_provider=True)

    async def admit_scraper(self, token: str) -> Caller:
        review, _ = await self._person(token)
        if not await self._may_scrape(review):
            raise forbidden(
                f"{review.username} may not get {METRICS_PATH}",
                f"grant it: a ClusterRole with nonResourceURLs [{METRICS_PATH!r}] and verbs "
                "['get'], as Prometheus has it for the API server's own metrics",
            )
        return _caller(review)

    async def may_list(self, caller: Caller, namespace: str) -> bool:
        if caller.sees_all:
            return True
        return bool(namespace) and await self._may(_review_of(caller), "list", namespace, "")

    async def aclose(self) -> None:
        await self._client.aclose()

    async def _person(self, token: str) -> tuple[Review, bool]:
        """Return whose token it is, and whether it is meant for the api and nobody else."""
        review = Review(authenticated=False)
        for audience in audiences_to_ask_for(token):
            review = await self._review(self._people, token, audience)
            if review.authenticated:
                return review, audience == API_AUDIENCE
        todo = f"send a token: kubectl create token ACCOUNT --audience {API_AUDIENCE}"
        raise _refused(token, review, todo)

    async def _review(self, reviews: Reviews[Review], token: str, audience: str) -> Review:
        if not token:
            return Review(authenticated=False)

        async def ask() -> Review:
            return await self._client.review_token(token, (audience,) if audience else ())

        # Never the token itself: what a dump of this process shows must be of no use.
        key = (hashlib.sha256(token.encode()).digest(), audience)
        try:
            return await reviews.ask(key, ask, lambda review: review.authenticated)
        except KubeUnavailableError as error:
            raise _unavailable(error) from error

    async def _may(self, review: Review, verb: str, namespace: str, name: str) -> bool:
        async def ask() -> bool:
            return await self._client.may(review, verb, namespace, name)

        try:
            return await self._access.ask((review, verb, namespace, name), ask, bool)
        except KubeUnavailableError as error:
            raise _unavailable(error) from error

    async def _may_scrape(self, review: Review) -> bool:
        async def ask() -> bool:
            return await self._client.may_get_path(review, METRICS_PATH)

        try:
            return await self._access.ask((review, METRICS_PATH), ask, bool)
        except KubeUnavailableError as error:
            raise _unavailable(error) from error


def audiences_to_ask_for(token: str) -> tuple[str, ...]:
    """Return for which audiences a person's token is to be reviewed, one after the other.

    A JSON Web Token says for whom it is meant (RFC 7519, section 4.1.3), so one review tells
    whether it is good; it is believed in nothing else. Any other token may be either.

    Returns:
        The api's audience, or an empty text for that of the API server itself, or both.
    """
    parts = token.split(".")
    if len(parts) != 3:
        return (API_AUDIENCE, "")
    try:
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except (ValueError, RecursionError):
        return (API_AUDIENCE, "")
    meant = claims.get("aud") if isinstance(claims, dict) else None
    if isinstance(meant, str):
        meant = [meant]
    if isinstance(meant, list):
        return (API_AUDIENCE,) if API_AUDIENCE in meant else ("",)
    return (API_AUDIENCE, "")


def _account(username: str) -> _Account | None:
    """Return namespace and name of a ServiceAccount, None for anybody else."""
    if not username.startswith(_ACCOUNT):
        return None
    namespace, _, name = username.removeprefix(_ACCOUNT).partition(":")
    return _Account(namespace=namespace, name=name) if namespace and name else None


def _is_pod_of(job: str, pod: str) -> bool:
    """Return whether a pod is called like one of a job's. Old API servers don't tell its name."""
    return not pod or pod.rpartition("-")[0] == job


def _caller(review: Review) -> Caller:
    return Caller(
        username=review.username, groups=review.groups, uid=review.uid, extra=review.extra
    )


def _review_of(caller: Caller) -> Review:
    return Review(
        authenticated=True,
        username=caller.username,
        groups=caller.groups,
        uid=caller.uid,
        extra=caller.extra,
    )


def _refused(token: str, review: Review, what_to_do: str) -> ProblemError:
    if not token:
        return unauthorized("the token is missing", what_to_do)
    # The reason may name other audiences and keys: for the log, not for a stranger.
    logger.info("a token was refused: %s", review.error)
    return unauthorized("the token is not the one that this needs", what_to_do)


def _unavailable(error: KubeUnavailableError) -> ProblemError:
    logger.warning("the API server is not reached: %s", error)
    return ProblemError(
        503,
        "auth-unavailable",
        "the Kubernetes API server does not say who is asking",
        "ask again: training goes on meanwhile, and nothing was decided",
    )
