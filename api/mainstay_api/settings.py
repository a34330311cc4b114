"""Settings, read from the environment once and never again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mainstay_api.kube import KubeSettings
from mainstay_api.redis_client import SCHEMES, scheme_of
from mainstay_core.base.errors import InvalidSpecError

MAX_AMOUNT = 1_000_000
"""Largest value of a bound on jobs and callers: more is a mistake."""
CLUSTER: Mapping[str, float] = {
    "pod_requests_per_s": 20.0,
    "job_requests_per_s": 50.0,
    "job_mib_per_s": 4.0,
    "person_requests_per_s": 20.0,
    "streams_per_pod": 4,
    "max_events": 10_000,
    "max_events_mib": 32,
}
"""Defaults of the bounds on jobs and callers where many share the api; whole ones are ``int``."""
LOCAL: Mapping[str, float] = {
    **CLUSTER,
    "pod_requests_per_s": 200.0,
    "job_requests_per_s": 400.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of one api process. A field's environment variable is MAINSTAY_ and its name."""

    redis_url: str
    """``MAINSTAY_REDIS_URL``, e.g. ``redis://host:6379/0``, ``rediss://`` for TLS,
    ``unix:///path/redis.sock``, or Sentinels and the master that they name:
    ``redis+sentinel://one:26379,two:26379/master/0``, ``rediss+sentinel://`` for TLS."""
    admin_token: str = ""
    """``MAINSTAY_ADMIN_TOKEN`` (or ``MAINSTAY_TOKEN``): people and the provider."""
    agent_token: str = ""
    """``MAINSTAY_AGENT_TOKEN`` (or ``MAINSTAY_TOKEN``): supervisors."""
    auth: str = "token"
    """``MAINSTAY_AUTH``: ``token`` or ``kubernetes`` (the API server says who asks)."""
    kube: KubeSettings | None = None
    """With ``kubernetes``: where the API server is."""
    operator_user: str = ""
    """``MAINSTAY_OPERATOR_USER``, e.g. ``system:serviceaccount:NAMESPACE:mainstay-operator``."""
    review_cache_s: float = 30.0
    """``MAINSTAY_REVIEW_CACHE_S``: how long an answer about a token is used; a revoked token and
    one of a deleted pod are refused that much later at most. 30 s: at 12,500 pods 400 reviews/s."""
    redis_password: str = ""
    """``MAINSTAY_REDIS_PASSWORD``, unless the url names one."""
    redis_ca_file: str = ""
    """``MAINSTAY_REDIS_CA_FILE``: who signed the certificate of a server with TLS."""
    redis_cert_file: str = ""
    """``MAINSTAY_REDIS_CERT_FILE``: our certificate, for a server that asks for one."""
    redis_key_file: str = ""
    """``MAINSTAY_REDIS_KEY_FILE``: its key."""
    redis_sentinel_password: str = ""
    """``MAINSTAY_REDIS_SENTINEL_PASSWORD``: of the Sentinels themselves."""
    host: str = "127.0.0.1"
    """``MAINSTAY_API_HOST``; loopback unless somebody says otherwise."""
    port: int = 0
    """``MAINSTAY_API_PORT``; 0 takes a free one and says which (``--port-file``)."""
    tick_pending_s: float = 0.1
    """Between looks at a job in which something waits for time to pass; below its probe_s."""
    tick_idle_s: float = 1.0
    """Between looks at any other job: silence is measured in tens of seconds."""
    lease_s: float = 3.0
    """After so long without renewal another replica turns silence into faults."""
    redis_timeout_s: float = 3.0
    """``MAINSTAY_REDIS_TIMEOUT_S``: of one call of Redis; then the request is answered with 503. A
    request that waits for others about the same job waits twice as long. Agents wait 10 s, and
    a write that is on disk before it is confirmed takes milliseconds: more than this is a Redis
    that is stopped or cut off."""
    max_conflicts: int = 64
    """Lost races of one event before the request fails; each means that another one won."""
    keep_alive_s: float = 10.0
    """Between comments on an idle event stream, below the idle timeout of common proxies."""
    max_events: int = 10_000
    """``MAINSTAY_MAX_EVENTS``: entries of a job's stream that are kept, about: its plans and its
    history. Each recovery has some five, so 2,000 recoveries are kept of it."""
    max_events_mib: int = 32
    """``MAINSTAY_MAX_EVENTS_MIB``: what these take in Redis at most, about. Fewer are kept of a job
    whose plans are large, but never fewer than 16. Redis has memory for 50 such jobs in 2 GiB."""
    pod_requests_per_s: float = 200.0
    """``MAINSTAY_POD_REQUESTS_PER_S``: requests of one supervisor per second, in the long run; ten
    times as many at once. 20 with ``kubernetes``: a supervisor sends a heartbeat and its news
    every second, more in a recovery. 200 in local mode: steps of tiny jobs take milliseconds,
    and nobody else is there. 429 beyond."""
    job_requests_per_s: float = 400.0
    """``MAINSTAY_JOB_REQUESTS_PER_S``: of all supervisors of a job, and 4 more for each of its
    pods. 50 with ``kubernetes``: twice what ten pods send in the midst of a recovery."""
    job_mib_per_s: float = 4.0
    """``MAINSTAY_JOB_MIB_PER_S``: bodies of a job's supervisors, and of a person; 64 KiB more for
    each pod. 256 ledger entries, the most that a supervisor sends at once, are 0.1 MiB."""
    person_requests_per_s: float = 20.0
    """``MAINSTAY_PERSON_REQUESTS_PER_S``: of one person, or all ServiceAccounts of a namespace;
    five times as many of all who read one job. A watching ``mainstay status`` asks twice a
    second. A report counts as ten."""
    streams_per_pod: int = 4
    """``MAINSTAY_STREAMS_PER_POD``: open at a time; the oldest ends for the newest. A supervisor
    has one, and perhaps others that it has lost and that still stand here."""
    metrics_port: int | None = None
    """``MAINSTAY_METRICS_PORT``: ``/metrics`` is there, without a token. None (unset, or empty): on
    the api's port, for who shows a token and may see all jobs."""
    fault_injection: bool = True
    """``MAINSTAY_FAULT_INJECTION``: whether faults may be injected; ``false`` with ``kubernetes``
    unless it is set: whoever may change a job could kill its pods and stop its ranks."""
    max_body_mib: int = 64
    """``MAINSTAY_MAX_BODY_MIB``: longest request body that is read; 413 beyond. The longest that
    anybody has reason to send is the plan of a job that the store has lost: 25 MB with 100,000
    ranks. A replica needs memory for several times as much."""
    log_level: str = "info"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Settings:
        """Return the settings that ``environment`` describes.

        Raises:
            InvalidSpecError: a variable is missing or cannot be used.
        """
        auth = environment.get("MAINSTAY_AUTH", "token")
        if auth not in ("token", "kubernetes"):
            raise InvalidSpecError("MAINSTAY_AUTH", f"is {auth!r}, must be token or kubernetes")
        callers = _tokens(environment) if auth == "token" else _cluster(environment)
        redis_url = environment.get("MAINSTAY_REDIS_URL", "")
        if not scheme_of(redis_url):
            known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
            raise InvalidSpecError(
                "MAINSTAY_REDIS_URL", f"is {redis_url!r}, must begin with one of {known}"
            )
        cert_file = environment.get("MAINSTAY_REDIS_CERT_FILE", "")
        key_file = environment.get("MAINSTAY_REDIS_KEY_FILE", "")
        if bool(cert_file) != bool(key_file):
            raise InvalidSpecError(
                "MAINSTAY_REDIS_CERT_FILE", "and MAINSTAY_REDIS_KEY_FILE belong together; set both"
            )
        return cls(
            redis_url=redis_url,
            auth=auth,
            **callers,
            redis_password=environment.get("MAINSTAY_REDIS_PASSWORD", ""),
            redis_ca_file=environment.get("MAINSTAY_REDIS_CA_FILE", ""),
            redis_cert_file=cert_file,
            redis_key_file=key_file,
            redis_sentinel_password=environment.get("MAINSTAY_REDIS_SENTINEL_PASSWORD", ""),
            host=environment.get("MAINSTAY_API_HOST", "127.0.0.1"),
            port=_port("MAINSTAY_API_PORT", environment.get("MAINSTAY_API_PORT", "0")),
            redis_timeout_s=_seconds(
                "MAINSTAY_REDIS_TIMEOUT_S", environment.get("MAINSTAY_REDIS_TIMEOUT_S", "3")
            ),
            max_body_mib=_mebibytes(
                "MAINSTAY_MAX_BODY_MIB", environment.get("MAINSTAY_MAX_BODY_MIB", "64")
            ),
            **_limits(environment, LOCAL if auth == "token" else CLUSTER),
            metrics_port=_port_or_none("MAINSTAY_METRICS_PORT", environment),
            fault_injection=_switch(
                "MAINSTAY_FAULT_INJECTION", environment, default=auth == "token"
            ),
            log_level=environment.get("MAINSTAY_LOG_LEVEL", "info").lower(),
        )


def _tokens(environment: Mapping[str, str]) -> dict[str, Any]:
    shared = environment.get("MAINSTAY_TOKEN", "")
    admin = environment.get("MAINSTAY_ADMIN_TOKEN", shared)
    agent = environment.get("MAINSTAY_AGENT_TOKEN", shared)
    if not admin or not agent:
        raise InvalidSpecError(
            "MAINSTAY_TOKEN",
            "is not set; set it, or both MAINSTAY_ADMIN_TOKEN and MAINSTAY_AGENT_TOKEN",
        )
    return {"admin_token": admin, "agent_token": agent}


def _cluster(environment: Mapping[str, str]) -> dict[str, Any]:
    operator = environment.get("MAINSTAY_OPERATOR_USER", "")
    if not operator:
        raise InvalidSpecError(
            "MAINSTAY_OPERATOR_USER",
            "is not set; it names the operator's ServiceAccount: "
            "system:serviceaccount:NAMESPACE:NAME",
        )
    name = "MAINSTAY_REVIEW_CACHE_S"
    return {
        "kube": KubeSettings.from_environment(environment),
        "operator_user": operator,
        "review_cache_s": _seconds(name, environment.get(name, "30")),
    }


def _seconds(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < math.inf:
        raise InvalidSpecError(name, f"is {text!r}, must be a number of seconds above 0")
    return value


def _mebibytes(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise InvalidSpecError(name, f"is {text!r}, must be a whole number of MiB above 0")
    return int(text)


def _limits(environment: Mapping[str, str], defaults: Mapping[str, float]) -> dict[str, Any]:
    """Return the bounds on jobs and callers that differ between local mode and a cluster."""
    found: dict[str, Any] = {}
    for field, default in defaults.items():
        name = f"MAINSTAY_{field.upper()}"
        text = environment.get(name, "")
        found[field] = _amount(name, text, whole=isinstance(default, int)) if text else default
    return found


def _amount(name: str, text: str, *, whole: bool) -> float:
    kind = "whole number" if whole else "number"
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        value = 0
    if not 1 <= value <= MAX_AMOUNT:
        raise InvalidSpecError(name, f"is {text!r}, must be a {kind} from 1 to {MAX_AMOUNT}")
    return value


def _switch(name: str, environment: Mapping[str, str], *, default: bool) -> bool:
    text = environment.get(name, "") or str(default).lower()
    if text not in ("true", "false"):
        raise InvalidSpecError(name, f"is {text!r}, must be true or false")
    return text == "true"


def _port_or_none(name: str, environment: Mapping[str, str]) -> int | None:
    text = environment.get(name, "")
    return _port(name, text) if text else None


def _port(name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 0 <= int(text[:9]) <= 65_535:
        raise InvalidSpecError(name, f"is {text!r}, must be 0 to 65535")
    return int(text)
