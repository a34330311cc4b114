"""One run: the job, its pods, its api, and somebody who replaces what is lost."""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace

from mainstay_core.base.errors import MainstayError
from mainstay_core.coordinator.state import CoordinatorState
from mainstay_core.job.phase import JobPhase
from mainstay_core.rank import machine as rank_machine
from mainstay_core.sim.engine import Violation
from mainstay_core.sim.faults import Faults
from mainstay_core.sim.scenarios.scenario import Scenario
from mainstay_core.sim.stage import Stage
from mainstay_core.sim.trainers.trainer import Trainer
from mainstay_core.supervisor.state import MAX_NAMED
from mainstay_core.wire.facts import Named
from mainstay_core.wire.plan import follows

CALM_S = 240.0
"""Once faults are over and everything can be replaced, a job must finish within so long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a run."""

    seed: int
    violation: str = ""
    """Empty if everything held."""
    where: str = ""
    """Who waited for whom, or the traceback."""
    finished_s: float = 0.0
    num_events: int = 0
    num_checks: int = 0
    num_plans: int = 0
    faults: tuple[str, ...] = ()
    seen: dict[str, int]
    trace: tuple[str, ...] = ()


class World(Stage):
    """Everything that happens in one run, its faults included.

    Args:
        scenario: what is drawn of the seed.
        tracing: whether a trace is kept.
    """

    def __init__(self, scenario: Scenario, *, tracing: bool = False) -> None:
        super().__init__(scenario, tracing=tracing)
        self.strikes = Faults(self, scenario.faults)
        self.faults = self.strikes

    # The run ----------------------------------------------------------------

    def run(self) -> Outcome:
        """Run until the job has ended, or something is wrong."""
        violation = where = ""
        try:
            with _decided_once():
                self._run()
        except Violation as found:
            violation, where = str(found), self.describe()
        except (AssertionError, LookupError, TypeError, ValueError, MainstayError) as error:
            violation = f"{type(error).__name__}: {error}"
            where = traceback.format_exc(limit=-6)
        finally:
            self.engine.close_unbegun()
        engine = self.engine
        return Outcome(
            seed=self.scenario.seed,
            violation=violation,
            where=where,
            finished_s=engine.now_s,
            num_events=engine.num_events,
            num_checks=self.checks.num_checks,
            num_plans=len(self.checks.plans),
            faults=tuple(self.strikes.struck),
            seen=dict(self.checks.seen),
            trace=tuple(engine.trace),
        )

    def _run(self) -> None:
        engine = self.engine
        store, follows, state = self.store, self.provider.follows, self.store.last
        while store.last is state or not store.last.terminal:
            state = store.last
            if not engine.step():
                raise Violation("I5: nothing can happen any more")
            if store.job is None and not follows and not self._is_known():
                self.checks.seen["abandoned"] += 1
                return
            calm_s = self.strikes.calm_since_s
            if calm_s is not None and engine.now_s > calm_s + CALM_S:
                raise Violation(f"I5: no end {CALM_S:.0f} s after the last fault")
        state = self.store.last
        if state.phase is JobPhase.FAILED and self.checks.undecided:
            self.checks.seen["no majority"] += 1
            return
        if state.phase is not JobPhase.COMPLETE:
            raise Violation(f"I5: the job is {state.phase}: {state.outcome}")
        self.checks.finished(state, self._named_as_told(state))
        if self.store.job is not None and self._is_all_told():
            self.checks.mirrored(self.store.job.ledger)

    def _named_as_told(self, state: CoordinatorState) -> list[Named]:
        """Return the words of named devices that supervisors remember and have told the store."""
        supervisors = [pod.supervisor for pod in self.pods.values() if pod.supervisor.alive]
        told: list[Named] = []
        for supervisor in supervisors:
            known_as_named = {word.named for word in supervisor.state.named}
            if not supervisor.heard_named <= known_as_named and len(known_as_named) < MAX_NAMED:
                raise Violation(f"I8: {supervisor.pod} has forgotten which devices were named")
            talk = supervisor.conversation
            known = talk.registered
            if known is not None and known.restored_at_s == state.restored_at_s and talk.has_told:
                told += supervisor.state.named
        return told

    def _is_all_told(self) -> bool:
        """Whether nobody who lives still has a ledger entry to tell, or has not read one yet."""
        supervisors = [pod.supervisor for pod in self.pods.values() if pod.supervisor.alive]
        if any(s.stopped for s in supervisors):
            return False
        return all(s.conversation.has_mirrored for s in supervisors) and not any(
            trainer.alive and trainer.has_entries_to_repeat for trainer in self.trainers.values()
        )

    def _is_known(self) -> bool:
        """Whether some pod knows the job; else only who made it can make it again."""
        return any(
            pod.supervisor.alive and pod.supervisor.state.registered for pod in self.pods.values()
        )

    def describe(self) -> str:
        """Return who waits for whom."""
        state = self.store.last
        quorum = state.plan.quorum if state.plan else None
        job = f"job: {state.phase}, step {state.step}, plan {quorum}, "
        lines = [job + f"suspicion {state.suspicion}, waiting {state.waiting}"]
        members = {str(m.incarnation): m for m in state.plan.members} if state.plan else {}
        for name, trainer in self.trainers.items():
            if not trainer.alive and name not in members:
                continue
            seat = f"member {members[name].index} {members[name].rank}" if name in members else "-"
            newest = trainer.connections.newest
            what = "dead" if not trainer.alive else "stopped" if trainer.stopped else "lives"
            settled = "settled" if self._settled(trainer) else "not settled"
            lines.append(
                f"  {name:<8} on {trainer.node:<6} {seat:<20} {what}, {trainer.state.phase} v"
                f"{trainer.state.version} in {trainer.quorum} ({settled}), waits in "
                f"{trainer.waits_in}, newest plan seen {newest.quorum if newest else None}"
            )
        for pod in self.pods.values():
            slots = ", ".join(str(s.phase) for s in pod.supervisor.state.slots)
            alive = "lives" if pod.supervisor.running else "is gone or stopped"
            lines.append(f"  {pod.uid} {alive}: {slots}")
        return "\n".join(lines)

    @staticmethod
    def _settled(trainer: Trainer) -> bool:
        return trainer.quorum is not None and trainer.state.settled == trainer.quorum.id


@contextlib.contextmanager
def _decided_once() -> Iterator[None]:
    """Have ranks of one plan that judge the same votes, or settle on the same reports, do it once.

    A rank of a job does so once in any case, and what it decides on may be large.
    """
    before = {name: getattr(rank_machine, name) for name in ("settle", "judge")}
    try:
        for name, decide in before.items():
            setattr(rank_machine, name, follows(decide))
        yield
    finally:
        for name, decide in before.items():
            setattr(rank_machine, name, decide)


def simulate(scenario: Scenario, *, tracing: bool = False) -> Outcome:
    """Run a scenario to its end.

    What a run leaves behind goes after it, at once. On the way the collector of garbage would look
    at everything that lives again and again, and find little.
    """
    if not gc.isenabled():
        return World(replace(scenario), tracing=tracing).run()
    gc.disable()
    try:
        return World(replace(scenario), tracing=tracing).run()
    finally:
        gc.enable()
        gc.collect(0)
