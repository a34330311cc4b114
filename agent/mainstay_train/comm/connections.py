"""The sockets of one trainer for the plan it has adopted.

What of them ends when is decided by :mod:`mainstay_core.rank.connections`. Any thread may
end them; the main thread then comes back from whatever it waits in.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from mainstay_core.rank.connections import QuorumConnections
from mainstay_core.wire.plan import Chain, Plan
from mainstay_train.base.settings import TrainerSettings
from mainstay_train.comm.chains import ChainGroups
from mainstay_train.comm.ending import wait_for_aborts
from mainstay_train.comm.gather_client import GatherClient
from mainstay_train.comm.group import BACKENDS, Group


class Connections(QuorumConnections[GatherClient, Group, ChainGroups]):
    """The sockets of one trainer.

    Args:
        settings: addresses and the job's bounds.
        backend: ``gloo`` or ``nccl``.
    """

    def __init__(self, settings: TrainerSettings, backend: str) -> None:
        self.changed = threading.Condition(threading.RLock())
        """Guards everything here; notified when a plan arrives or the version grows."""
        super().__init__(self.changed)
        self._settings, self._backend = settings, backend
        self.on_plan: Callable[[dict[str, Any]], None] | None = None
        """Called (any thread) with a plan, as JSON, that came another way than by the uplink."""
        self.ended = False
        """Whether the job is over: there will be no further plan."""

    def end(self) -> None:
        """The job is over (any thread): wake whoever waits for a plan."""
        with self.changed:
            self.ended = True
            self.changed.notify_all()

    def adopt(self, plan: Plan, index: int) -> GatherClient:
        """Enter a quorum, once this rank's device is done with the groups that have ended.

        Raises:
            QuorumAborted: a newer unplanned plan is known already.
        """
        gather = super().adopt(plan, index)
        seconds = self._settings.config.operation_timeout_s
        timeout = timedelta(seconds=seconds)
        wait_for_aborts(BACKENDS[self._backend], timeout, self._end_failed_pipeline)
        return gather

    def _end_failed_pipeline(self) -> None:
        """End the chain's groups if their connections have failed.

        The device may stand in a receive for which nobody sends any more, before all that was
        aborted, and no operation tells that.
        """
        with self.changed:
            problem = self._pipeline.problem if self._pipeline is not None else ""
            if problem:
                self._end_pipeline(problem)

    def _join(self, plan: Plan, index: int) -> GatherClient:
        return GatherClient(
            plan.rendezvous.gather,
            str(plan.quorum),
            index,
            len(plan.members),
            self._settings.incarnation,
            self._settings.address,
            lambda why, _: self.lost_quorum(plan.quorum, why),
            self.on_plan,
        )

    def _chain_groups(self, name: str, plan: Plan, chain: Chain) -> ChainGroups:
        """Pipeline and inner mesh of this rank, not yet connected."""
        rank, width = plan.members[self.index].rank, plan.ranks_per_stage
        pipeline = mesh = None
        if plan.num_stages > 1:
            place = chain.cells.index(self.index)
            pipeline = self._group(name, place, len(chain.cells))
        if width > 1:
            mesh = self._group(f"{name}/s{rank.stage}", rank.inner, width)
        return ChainGroups(name, pipeline, mesh)

    def _group(self, name: str, rank: int, size: int) -> Group:
        return Group(
            name=name,
            meeting=self.gather(),
            rank=rank,
            size=size,
            address=self._settings.address,
            backend=self._backend,
            timeout_s=self._settings.config.operation_timeout_s,
            connect_s=self._settings.config.connect_s,
            unblock_s=self._settings.config.unblock_s,
        )
