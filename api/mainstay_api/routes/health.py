"""Probes and metrics: no token, no secrets."""

from __future__ import annotations

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from mainstay_api.deps import MetricsDep, TransactionsDep

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def is_alive() -> dict[str, str]:
    """The process serves. Says nothing about the store: restarting the api would not mend it."""
    return {"status": "ok"}


@router.get("/readyz")
async def is_ready(transactions: TransactionsDep) -> dict[str, str]:
    """The process serves and reaches its store; 503 otherwise."""
    await transactions.store.ping()
    return {"status": "ready"}


@router.get("/metrics", response_class=Response)
async def show_metrics(metrics: MetricsDep, transactions: TransactionsDep) -> Response:
    """Metrics of this process, for Prometheus; a job's series end with the job."""
    await transactions.refresh_metrics()
    return Response(metrics.render(), media_type=CONTENT_TYPE_LATEST)
