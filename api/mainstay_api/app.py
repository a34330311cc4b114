"""The application, made by a factory: importing this module starts nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI

from mainstay_api import problems
from mainstay_api.auth import Auth, TokenAuth
from mainstay_api.bodies import BodyLimitMiddleware
from mainstay_api.connections import AdmissionMiddleware, Connections
from mainstay_api.heartbeats import HeartbeatWatch
from mainstay_api.kube import KubeClient
from mainstay_api.kube_auth import KubernetesAuth
from mainstay_api.limits import Limits
from mainstay_api.lines import Lines
from mainstay_api.long_work import long_answers
from mainstay_api.metrics import LatencyMiddleware, Metrics
from mainstay_api.plan_texts import PlanTexts
from mainstay_api.routes import agents, faults, health, jobs, lineage, operator, snapshots
from mainstay_api.settings import Settings
from mainstay_api.store_protocol import Store
from mainstay_api.streams import Streams
from mainstay_api.tasks import end_tasks
from mainstay_api.transactions import Transactions

DESCRIPTION = """Orders facts about training jobs, stores plans and answers people.

Agents use `/v1/jobs/{job}/agent/...`, people everything else, each with a bearer
token: docs/security.md says which. Errors have one form: `error`, `detail`, `what_to_do`."""


def create_app(settings: Settings, store: Store) -> FastAPI:
    """Return the application over ``store``; the store is closed with it."""
    metrics = Metrics()
    transactions = Transactions(store, settings, metrics)
    streams = Streams(
        store,
        settings.keep_alive_s,
        check_s=settings.review_cache_s,
        per_pod=settings.streams_per_pod,
    )
    auth = make_auth(settings)

    @contextlib.asynccontextmanager
    async def live(app: FastAPI) -> AsyncIterator[None]:
        del app
        ticking = asyncio.create_task(HeartbeatWatch(transactions, settings).run())
        try:
            yield
        finally:
            await end_tasks(ticking)
            await streams.aclose()
            await transactions.aclose()
            await store.aclose()
            await auth.aclose()

    app = FastAPI(title="Mainstay", version="1", description=DESCRIPTION, lifespan=live)
    app.state.settings = settings
    app.state.auth = auth
    app.state.transactions = transactions
    app.state.streams = streams
    app.state.metrics = metrics
    app.state.limits = Limits(settings)
    app.state.long_answers = long_answers()
    app.state.lines = Lines()
    app.state.plan_texts = PlanTexts()
    app.state.connections = Connections()
    app.add_middleware(BodyLimitMiddleware, limit_mib=settings.max_body_mib)
    app.add_middleware(LatencyMiddleware, metrics=metrics)
    app.add_middleware(AdmissionMiddleware, connections=app.state.connections)
    problems.install(app)
    for routes in (health, agents, jobs, lineage, snapshots, operator, faults):
        app.include_router(routes.router)
    if settings.metrics_port is None:
        app.include_router(health.guarded_metrics)
    return app


def create_metrics_app(app: FastAPI) -> FastAPI:
    """Return an application that serves the metrics of another one, and nothing else, to anybody.

    Its connections end with their first answer.
    """
    metrics = FastAPI(title="Mainstay metrics", openapi_url=None)
    metrics.state.metrics = app.state.metrics
    metrics.state.transactions = app.state.transactions
    metrics.state.connections = Connections()
    metrics.add_middleware(BodyLimitMiddleware, limit_mib=1)
    metrics.add_middleware(AdmissionMiddleware, connections=metrics.state.connections)
    problems.install(metrics)
    metrics.include_router(health.open_metrics)
    return metrics


def make_auth(settings: Settings) -> Auth:
    """Return how callers are admitted."""
    if settings.kube is None:
        return TokenAuth(settings.admin_token, settings.agent_token)
    client = KubeClient(settings.kube)
    return KubernetesAuth(client, settings.operator_user, settings.review_cache_s)
