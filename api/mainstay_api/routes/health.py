"""Probes, which need no token, and metrics, which need one or have a port of their own."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Depends, Response
from prometheus_client import CONTENT_TYPE_LATEST

from mainstay_api import examples
from mainstay_api.deps import GuardedRoute, MetricsDep, TransactionsDep, require_scraper

router = APIRouter(tags=["health"])
guarded_metrics = APIRouter(
    tags=["health"],
    dependencies=[Depends(require_scraper)],
    responses=examples.PROBLEMS,
    route_class=GuardedRoute,
)
"""For the api's own port, where every pod of every job calls."""
open_metrics = APIRouter()
"""For a port of their own."""


@router.get("/healthz")
async def is_alive() -> dict[str, str]:
    """The process serves. Says nothing about the store: restarting the api would not mend it."""
    return {"status": "ok"}


@router.get("/readyz")
async def is_ready(transactions: TransactionsDep) -> dict[str, str]:
    """The process serves and reaches its store; 503 otherwise."""
    await transactions.store.ping()
    return {"status": "ready"}


@guarded_metrics.get("/metrics", response_class=Response)
@open_metrics.get("/metrics", response_class=Response)
async def show_metrics(metrics: MetricsDep, transactions: TransactionsDep) -> Response:
    """Metrics of this process, for Prometheus; a job's series end with the job."""
    await transactions.refresh_metrics()
    text = await asyncio.to_thread(metrics.render)
    return Response(text, media_type=CONTENT_TYPE_LATEST)
