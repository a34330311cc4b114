"""Remembers a job's pods between two looks, so that every loss is told, and counted once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from mainstay_core.base.ids import PodUid
from mainstay_core.pool.losses import Loss, PodDemand, find_losses, is_lost
from mainstay_core.pool.observed import ObservedNode, ObservedPod


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMemory:
    """The memory of whoever keeps a job's pods, from one look to the next.

    Only :attr:`counted` has to outlive a process: the rest is found out again.
    """

    before: Mapping[PodUid, ObservedPod] = field(default_factory=dict)
    """Pods that lived at the last look, and lost ones that the api was not told of yet."""
    accounted: frozenset[PodUid] = frozenset()
    """Pods whose loss was counted, and said to people."""
    counted: tuple[float, ...] = ()
    """Wall clock of each loss that counts against the budget of repairs."""
    leaving: frozenset[PodUid] = frozenset()
    """Pods that the api has said to be leaving: it names none any more that is gone."""

    def after_hearing(self, demand: PodDemand) -> PoolMemory:
        """Return the memory after the api has said what it wants."""
        return replace(self, leaving=(self.leaving & self.before.keys()) | demand.leaving)

    def with_last_words(self, words: Mapping[PodUid, ObservedPod]) -> PoolMemory:
        """Return the memory with how known pods were last seen, just before they vanished."""
        known = {uid: pod for uid, pod in words.items() if uid in self.before}
        return replace(self, before={**self.before, **known})

    def find_losses(
        self,
        pods: Iterable[ObservedPod],
        nodes: Mapping[str, ObservedNode] | None,
        demand: PodDemand,
        now_s: float,
    ) -> tuple[Loss, ...]:
        """Return the pods that are surely gone, those among them that are accounted for as well."""
        leaving = self.leaving | demand.leaving
        return find_losses(self.before, pods, nodes, demand, now_s, leaving)

    def find_untold(
        self,
        pods: Iterable[ObservedPod],
        nodes: Mapping[str, ObservedNode] | None,
        demand: PodDemand,
        now_s: float,
    ) -> tuple[Loss, ...]:
        """Return the losses to tell before the api is asked again, by what it wanted last.

        A pod that is lost to that old demand alone was told of when the demand was new.
        """
        losses = self.find_losses(pods, nodes, demand, now_s)
        return tuple(loss for loss in losses if loss.uid in self.before)

    def account(self, losses: Iterable[Loss]) -> tuple[PoolMemory, tuple[Loss, ...]]:
        """Return the memory with these losses counted, and those that were not counted before."""
        new = tuple(loss for loss in losses if loss.uid not in self.accounted)
        counted = tuple(loss.at_s for loss in new if loss.counts)
        memory = replace(
            self,
            accounted=self.accounted | {loss.uid for loss in new},
            counted=(*self.counted, *counted),
        )
        return memory, new

    def count(self, at_s: float) -> PoolMemory:
        """Return the memory with something else that burns the budget: a launcher's end."""
        return replace(self, counted=(*self.counted, at_s))

    def after_look(
        self,
        pods: Iterable[ObservedPod],
        nodes: Mapping[str, ObservedNode] | None,
        losses: Iterable[Loss],
        *,
        told: bool,
    ) -> PoolMemory:
        """Return the memory after a repair was carried out.

        Args:
            pods: that exist, those that were made by it among them.
            nodes: by name; None if nodes are not watched.
            losses: that it found.
            told: whether the api has heard of them. If not they are found again, to be told.
        """
        before = {p.uid: p for p in pods if not is_lost(p, nodes)}
        if not told:
            lost = {loss.uid for loss in losses}
            before |= {uid: self.before[uid] for uid in lost if uid in self.before}
        return replace(self, before=before)
