"""Planned changes that somebody asks for: a suspension and its end, other numbers of replicas.

Stands for whoever owns the job's definition: a wish is told until the api has taken it,
the newest one counts, and a store that lost it is told again. A permission is no wish: it is given
once, and one that the store has lost is lost.
"""

from __future__ import annotations

from mainstay_core.coordinator.events import (
    ApproximationAllowed,
    ApproximationWithdrawn,
    ScaleRequested,
)
from mainstay_core.job.phase import JobPhase
from mainstay_core.sim.engine import Steps, Violation
from mainstay_core.sim.scenarios.scenario import Ahead
from mainstay_core.sim.services.provider import Provider

LOOK_S = 0.5
OFFER_S = 0.05
"""A permission that is refused, as nobody trains yet or something is lost, is offered again; later
each time."""
HEARD = 200
REFUSED = (409, 422)
"""The job is over, or cannot do it: the same wish would be refused again."""
UNKNOWN = 404
PERSON = "ann"


class Wishes:
    """The wishes for one run's job: suspensions and numbers of replicas.

    Args:
        provider: in whose name the api is asked.
    """

    def __init__(self, provider: Provider) -> None:
        self._provider, self._world = provider, provider.world
        self._num_suspensions = 0
        """Suspensions that are not over."""
        self._heard: bool | None = False
        """The wish that the api has taken, or refused; None while nobody knows which it has.

        At first the job runs, as it was made.
        """
        self._asking = self._looking = False
        self._late = False
        """Whether a wish got no answer: it may be carried out at any time."""

    @property
    def suspend(self) -> bool:
        """Whether the job is to stand still."""
        return self._num_suspensions > 0

    def drain(self, pod: str) -> None:
        """Ask, once, to have a pod's work handed over."""
        provider = self._provider
        provider.spawn(provider.ask_once("drain", pod))

    def scale(self, replicas: int | None, spares: int | None) -> None:
        """Want another number of replicas or spares."""
        self._provider.spawn(self._scale(ScaleRequested(replicas=replicas, spares=spares)))

    def begin_suspension(self) -> None:
        """Want the job to stand still."""
        self._num_suspensions += 1
        self._poke()

    def end_suspension(self) -> None:
        """Want it to go on, if nobody else wants it to stand still."""
        self._num_suspensions -= 1
        self._poke()

    def suspend_until_it_stands(self, lasts_s: float) -> None:
        """Want the job to stand still; go on ``lasts_s`` after the last pod has ended."""
        self.begin_suspension()
        self._provider.spawn(self._watch(lasts_s))

    def _watch(self, lasts_s: float) -> Steps[None]:
        world = self._world
        while not self._stands():
            yield LOOK_S
            if world.store.last.terminal:
                return
        world.checks.seen["stood still"] += 1
        yield lasts_s
        self.end_suspension()

    def _stands(self) -> bool:
        state = self._world.store.state
        if state is None:
            return False
        if not state.suspend and self._is_refused():
            return True
        pods = self._provider.pods.values()
        return state.phase is JobPhase.SUSPENDED and not any(pod.runs for pod in pods)

    def _is_refused(self) -> bool:
        return self._world.config.shape.checkpoint_every_steps == 0

    def _poke(self) -> None:
        if not self._asking:
            self._asking = True
            self._provider.spawn(self._tell_suspend())
        if not self._looking:
            self._looking = True
            self._provider.spawn(self._look())

    def _tell_suspend(self) -> Steps[None]:
        """Tell the newest wish until it is heard, one request at a time."""
        while self._heard is not self.suspend:
            wanted = self.suspend
            # Without the answer nobody knows what the api has: where the store takes a wish and
            # only its answer is lost, the api says that the store is away (503). So a wish is
            # told even if it is the one that was heard before the wish without an answer.
            self._heard = None
            status = yield from self._provider.ask("suspend", wanted)
            self._late = self._late or status == 0
            if status == HEARD or status in REFUSED:
                self._heard = wanted
            else:
                yield LOOK_S
        self._asking = False

    def _look(self) -> Steps[None]:
        """Look whether what was heard stays so; a store that lost it is told again."""
        world = self._world
        while not world.store.last.terminal:
            if not self._asking and self._heard is self.suspend and not self._agrees(self.suspend):
                if not self._excused:
                    what = "suspend the job" if self.suspend else "have the job go on"
                    raise Violation(f"I5: the wish to {what} was heard and is forgotten")
                self._heard = None
                self._poke()
            yield LOOK_S

    def _agrees(self, wanted: bool) -> bool:
        state = self._world.store.state
        return state is None or state.suspend is wanted or self._is_refused()

    @property
    def _excused(self) -> bool:
        """Whether a wish may be lost, or an older one come after a newer one."""
        return self._late or self._world.checks.fell_back

    def allow_ahead(self, ahead: Ahead) -> None:
        """Have a person allow one recovery ahead of a loss, and perhaps take that back."""
        self._provider.spawn(self._allow(ahead))

    def _allow(self, ahead: Ahead) -> Steps[None]:
        world, checked = self._world, self._world.checks.permissions
        yield ahead.at_s
        limit, status, pause_s = ahead.after_lost_steps, 0, OFFER_S
        while status != HEARD and not world.store.last.terminal:
            checked.asked(limit)
            allowed = ApproximationAllowed(who=PERSON, after_lost_steps=limit)
            status = yield from self._provider.ask("approximate", allowed)
            refused = status in (*REFUSED, UNKNOWN)
            checked.answered(granted=status == HEARD, refused=refused)
            yield pause_s
            pause_s = min(2 * pause_s, LOOK_S)
        if ahead.withdrawn_after_s is None:
            return
        yield ahead.withdrawn_after_s
        status = 0
        while status not in (HEARD, *REFUSED) and not world.store.last.terminal:
            withdrawn = ApproximationWithdrawn(who=PERSON)
            status = yield from self._provider.ask("approximate", withdrawn)
            if status == HEARD:
                checked.withdrawn()
            yield LOOK_S

    def _scale(self, request: ScaleRequested) -> Steps[None]:
        while True:
            status = yield from self._provider.ask("scale", request)
            if status == HEARD or status in REFUSED:
                return
            yield LOOK_S
