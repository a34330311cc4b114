"""A simulated launcher: processes that fork, end and are reaped."""

from __future__ import annotations

from mainstay_core.base.ids import Incarnation, PodUid
from mainstay_core.sim.engine import Process
from mainstay_core.sim.network import End
from mainstay_core.sim.surroundings import Surroundings
from mainstay_core.sim.trainers.trainer import Trainer
from mainstay_core.supervisor.events import Exited, Forked
from mainstay_core.supervisor.launcher import (
    Event,
    ForkChild,
    LauncherState,
    Report,
    SignalChild,
    SupervisorLost,
    step,
)


class Launcher(Process):
    """The warm parent of one pod's trainers."""

    def __init__(self, world: Surroundings, pod: PodUid, number: int) -> None:
        super().__init__(world.engine, f"{pod}^{number}", pod)
        self.world, self.pod = world, pod
        self._socket = f"socket@{pod}.{number}"
        self._segments = f"segments@{pod}.{number}"
        self.children: dict[Incarnation, Trainer] = {}
        self._state = LauncherState()
        self._supervisor: End | None = None
        self.at_end.append(self._kill_all)
        world.network.connect(self, self._socket, self._opened, lambda _: self.kill())

    def _opened(self, end: End) -> None:
        self._supervisor = end
        end.on_message, end.on_end = self._feed, lambda _: self._feed(SupervisorLost())
        end.send(("launcher", None, None))

    def _feed(self, event: Event) -> None:
        done = step(self._state, event)
        self._state = done.state
        for action in done.actions:
            if isinstance(action, ForkChild):
                self.after(self.world.pace.fork_s(), self._fork, action.slot, action.incarnation)
            elif isinstance(action, SignalChild):
                self.children[action.child.incarnation].kill()
            elif isinstance(action, Report):
                assert self._supervisor is not None
                self._supervisor.send(action.what)
            else:
                self.kill()

    def _fork(self, slot: int, incarnation: Incarnation) -> None:
        trainer = Trainer(self.world, self.pod, slot, incarnation, self._segments)
        self.world.trainers[incarnation] = self.children[incarnation] = trainer
        trainer.at_end.append(lambda silent: self._ended(trainer, silent))
        self._feed(Forked(slot, incarnation, 1))
        self.world.network.connect(
            trainer,
            self._socket,
            lambda end: self._introduce(trainer, end),
            lambda _: trainer.kill(),
        )

    def _introduce(self, trainer: Trainer, end: End) -> None:
        end.send(("trainer", trainer.slot.index, trainer.incarnation))
        trainer.connected(end)

    def _ended(self, trainer: Trainer, silent: bool) -> None:
        if self.alive and not silent:
            self.after(self.world.pace.reap_s(), self._reap, trainer)

    def _reap(self, trainer: Trainer) -> None:
        del self.children[trainer.incarnation]
        signal = None if trainer.exit_code is not None else 9
        self._feed(Exited(trainer.slot.index, trainer.incarnation, trainer.exit_code, signal))

    def _kill_all(self, silent: bool) -> None:
        for child in list(self.children.values()):
            child.kill(silent=silent)
