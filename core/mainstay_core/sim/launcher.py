"""A simulated launcher: forks, signals and reaps trainers; hosts the rendezvous store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mainstay_core.base.ids import Incarnation, PodUid
from mainstay_core.sim.engine import Process
from mainstay_core.sim.groups import RendezvousStore
from mainstay_core.sim.network import End
from mainstay_core.sim.trainer import Trainer

if TYPE_CHECKING:
    from mainstay_core.sim.world import World

EXIT_SUPERVISOR_GONE = 4


class Launcher(Process):
    """The warm parent of one pod's trainers (``mainstay_train.launcher``)."""

    def __init__(self, world: World, pod: PodUid, number: int) -> None:
        super().__init__(world.engine, f"{pod}^{number}", pod)
        self.world, self.pod = world, pod
        self.store_address = f"store@{pod}.{number}"
        RendezvousStore(self, world.network, self.store_address)
        self._socket = f"socket@{pod}.{number}"
        self.children: dict[Incarnation, Trainer] = {}
        self._supervisor: End | None = None
        self.at_end.append(self._kill_all)
        world.network.connect(self, self._socket, self._opened, lambda _: self.kill())

    def _opened(self, end: End) -> None:
        self._supervisor = end
        end.on_message, end.on_end = self._on_message, lambda _: self.kill()
        end.send(("launcher", None, None))

    def _on_message(self, message: tuple[str, int, Incarnation]) -> None:
        kind, slot, incarnation = message
        if kind == "fork":
            self.after(self.world.pace.fork_s(), self._fork, slot, incarnation)
        elif kind == "signal":
            for child in list(self.children.values()):
                if child.slot.index == slot:
                    child.kill()
        elif not self.children:
            self.kill()

    def _fork(self, slot: int, incarnation: Incarnation) -> None:
        trainer = self.world.new_trainer(self.pod, slot, incarnation)
        self.children[incarnation] = trainer
        trainer.at_end.append(lambda silent: self._ended(trainer, silent))
        self._say(("forked", slot, incarnation, None))
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
        if silent or not self.alive:
            return
        self.after(self.world.pace.reap_s(), self._reap, trainer)

    def _reap(self, trainer: Trainer) -> None:
        self.children.pop(trainer.incarnation, None)
        code = trainer.exit_code
        how = (code, None) if code is not None else (None, 9)
        self._say(("exited", trainer.slot.index, trainer.incarnation, how))

    def _say(self, message: tuple[str, int, Incarnation, Any]) -> None:
        if self._supervisor is not None:
            self._supervisor.send(message)

    def _kill_all(self, silent: bool) -> None:
        for child in list(self.children.values()):
            child.kill(silent=silent)
