"""Two tenants at one api: one misuses all that its token allows, the other's job goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.support.tenant import hostile_tenant
from tests.api.conftest import AGENT_TOKEN

from mainstay_api.settings import CLUSTER

STEPS = 5
ASKED_PER_S = 6.0
"""So little that whoever misuses a token asks for more on the slowest machine. The other job asks
for less than the ten seconds' worth that may come at once."""


def test_a_tenant_that_misuses_its_token_stops_nobody_else(
    new_api: Callable[..., Any], new_job: Callable[..., Any], listen: Any, own_redis: Any
) -> None:
    api = new_api(
        own_redis.url, **{**CLUSTER, "max_events": 100, "pod_requests_per_s": ASKED_PER_S}
    )
    loud, quiet = new_job(api), new_job(api)
    host = api.url.removeprefix("http://")
    with hostile_tenant(host, loud.uid, AGENT_TOKEN, connections=8, pause_s=0.02) as did:
        # Every call here must succeed: to be refused, or not be answered, fails the test.
        quiet.start()
        listener = listen(quiet)
        listener.wait(lambda each: each.plans() == [1])
        for step in range(STEPS):
            quiet.commit(step)
            quiet.beat("pod-0")
            assert api.get(f"{quiet.path}/summary")["training"]["step"] == step + 1
        quiet.kill(1)
        listener.wait(lambda each: each.plans() == [1, 2])
        quiet.settle(step=STEPS)
        quiet.commit(STEPS)
        assert api.get(f"{quiet.path}/recoveries")[0]["method"] == "mask"
        assert api.get("/readyz")["status"] == "ready"
    # On a slow machine it may never ask for too much; tests/api/test_limits.py says what follows.
    assert sum(did.values()) > 0
    assert did.get("500", 0) == 0, did
    # It has left what it may leave, and the job can still be looked at and ended.
    assert len(api.get(f"{loud.path}/events")) <= 300
    assert api.client.delete(loud.path).status_code == 200
    assert api.get(f"{quiet.path}")["step"] == STEPS + 1
