"""Where a trainer of a test halts: points between any two instructions of the protocol.

The trainer's own code runs; what is wrapped here says where it is and waits, in the main thread,
until the test lets it go on (or kills or stops it). ``corrupt-...@STEP``
flips a bit instead, ``wrong-type@STEP`` one of a complete type of which a check finds late that it
is wrong, ``wrong-send@STEP`` one in what a stage sends on, which no check of its own sees
(``wrong-sends``: always; ``wrong-from@STEP``: from that step on; ``wrong-witness@STEP``: of the
compared type; ``sticks@STEP``: of that type each time in the step; ``wrong-gradient@STEP``: its
gradient, in a loop of one's own), ``wrong-gives`` one in all that a rank gives its cell while
others compute the type, too, ``reset-stage@STEP`` resets the sockets of the reduction.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from tests.train.crew import ADDRESS

from mainstay_core.job.config import JobConfig
from mainstay_train.base.settings import TrainerSettings
from mainstay_train.checks.executions import CheckedKernels
from mainstay_train.comm.gather_client import GatherClient
from mainstay_train.compute.engine import Engine
from mainstay_train.compute.interpreter import Interpreter
from mainstay_train.exact.optimizer import StageState
from mainstay_train.exact.reduction import Reducer
from mainstay_train.launcher import main
from mainstay_train.session.driver import Driver
from mainstay_train.session.session import Session
from mainstay_train.state.heal import HealClient

STEP_POINTS = (
    "computing",
    "computed",
    "reduce-posting",
    "reduce-scattered",
    "reduced",
    "vote-posting",
    "vote-posted",
    "vote-gathered",
    "applying",
    "written-first",
    "written",
)
"""In the order of a step; ``@STEP`` follows."""
SETTLE_POINTS = ("settle-posting", "settle-posted", "settle-gathered")
"""``@qID`` follows."""
HEAL_POINTS = ("heal-asking", "heal-received", "healed")
"""``@qID`` follows."""


@dataclass(frozen=True, slots=True)
class Start:
    """What a waiting process becomes."""

    life: str
    pod: str
    halts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class At:
    """The trainer halts here."""

    point: str


@dataclass(frozen=True, slots=True)
class Computes:
    """The trainer begins to work through types."""

    step: int
    types: tuple[int, ...]
    compares: bool
    """Whether it executes its kernels twice."""


def run_life(pipe: Connection, config: JobConfig, path: str) -> None:
    """Wait for a start, then be that trainer."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    start: Start = pipe.recv()
    _Points(pipe, start.halts).install()
    settings = TrainerSettings(
        config=config,
        pod=start.pod,
        slot=0,
        incarnation=start.life,
        address=ADDRESS,
        socket=path,
        work_dir=os.path.dirname(path),
    )
    os._exit(main.run_trainer(settings))


class _Points:
    def __init__(self, pipe: Connection, wanted: tuple[str, ...]) -> None:
        self._pipe, self._wanted = pipe, set(wanted)
        self._session: Session | None = None
        self._stuck: int | None = None
        """The type that comes out wrong each time in a step."""

    def install(self) -> None:
        """Wrap the trainer's parts in this process."""
        after(Session, "__init__", self._note_session)
        around(GatherClient, "post", self._post)
        around(GatherClient, "wait", self._wait)
        around(Engine, "compute", self._compute)
        around(Engine, "reduce", self._reduce)
        around(Interpreter, "_send_f", self._send_f)
        before(Reducer, "_gather", lambda *_: self._step_point("reduce-scattered"))
        around(StageState, "apply", self._apply)
        around(HealClient, "copy", self._copy)
        around(Driver, "completed", self._completed)
        around(CheckedKernels, "_communicate", self._communicate)
        after(HealClient, "_fetch", lambda *_: self._quorum_point("heal-received"))

    def _note_session(self, session: Session, *_: Any) -> None:
        self._session = session

    @property
    def _state(self) -> Any:
        assert self._session is not None
        return self._session.state

    def _halt(self, point: str) -> None:
        if point not in self._wanted:
            return
        self._wanted.remove(point)
        self._pipe.send(At(point))
        self._pipe.recv()

    def _step_point(self, name: str) -> None:
        self._halt(f"{name}@{self._state.version}")

    def _quorum_point(self, name: str) -> None:
        self._halt(f"{name}@q{self._state.plan.quorum.id}")

    def _point(self, key: str, what: str) -> None:
        if key == "settle":
            self._quorum_point(f"settle-{what}")
        else:
            self._step_point(f"vote-{what}")

    def _post(self, post: Callable[..., None], client: GatherClient, key: str, body: bytes) -> None:
        self._point(key, "posting")
        post(client, key, body)
        self._point(key, "posted")

    def _wait(self, wait: Callable[..., list[bytes]], client: GatherClient, key: str) -> Any:
        bodies = wait(client, key)
        self._point(key, "gathered")
        return bodies

    def _compute(
        self, compute: Callable[..., None], engine: Engine, types: Any, *rest: Any
    ) -> None:
        self._pipe.send(Computes(self._state.version, tuple(types), engine.checks.compares))
        self._step_point("computing")
        compute(engine, types, *rest)
        if types and f"wrong-type@{self._state.version}" in self._wanted:
            self._wanted.remove(f"wrong-type@{self._state.version}")
            wrong = engine.store.held()[0]
            flip_bit(engine.store.partials[wrong])
            engine.types.wrong.add(wrong.last)
        self._step_point("computed")

    def _send_f(self, send: Callable[..., None], interpreter: Interpreter, action: Any) -> None:
        once = f"wrong-send@{self._state.version}"
        compared = self._state.step_plan.compared if self._state.step_plan else None
        copy = f"wrong-witness@{self._state.version}"
        is_copy = compared is not None and (action.type, action.micro_batch) == (compared.type, 1)
        if copy in self._wanted and is_copy:
            self._wanted.remove(copy)
            flip_bit(interpreter._flow(action).output.view(-1))  # type: ignore[union-attr]
        if f"sticks@{self._state.version}" in self._wanted:
            if compared is not None and self._stuck is None:
                self._stuck = compared.type
            if action.type == self._stuck:
                flip_bit(interpreter._flow(action).output.view(-1))  # type: ignore[union-attr]
        begins = [int(p.partition("@")[2]) for p in self._wanted if p.startswith("wrong-from@")]
        is_wrong = any(self._state.version >= step for step in begins)
        if "wrong-sends" in self._wanted or once in self._wanted or is_wrong:
            flip_bit(interpreter._flow(action).output.view(-1))  # type: ignore[union-attr]
        if once in self._wanted:
            self._wanted.remove(once)
        send(interpreter, action)

    def _communicate(
        self, communicate: Callable[..., Any], kernels: Any, func: Any, args: Any, *rest: Any
    ) -> Any:
        if "wrong-gives" in self._wanted:
            flip_bit(args[0].view(-1))
        return communicate(kernels, func, args, *rest)

    def _completed(self, completed: Callable[..., None], driver: Driver, shard_type: int) -> None:
        compared = self._state.step_plan.compared
        wrong = f"wrong-gradient@{self._state.version}"
        if wrong in self._wanted and compared is not None and compared.type == shard_type:
            partials = driver.engine.store.partials
            flip_bit(partials[next(p for p in partials if p.first == p.last == shard_type)])
        completed(driver, shard_type)

    def _reduce(self, reduce: Callable[..., None], engine: Engine, *args: Any) -> None:
        self._step_point("reduce-posting")
        if f"reset-stage@{self._state.version}" in self._wanted and args[0] is not None:
            self._wanted.remove(f"reset-stage@{self._state.version}")
            args[0]._shut_all()  # the sockets alone: nobody decided anything
        reduce(engine, *args)
        if f"corrupt-gradient@{self._state.version}" in self._wanted:
            self._wanted.remove(f"corrupt-gradient@{self._state.version}")
            flip_bit(engine.reducer.reduced)
        self._step_point("reduced")

    def _apply(
        self, apply: Callable[..., None], state: StageState, *args: Any, **named: Any
    ) -> None:
        self._step_point("applying")
        first = state._optimizers[0]
        step = first.step

        def written(*step_args: Any) -> Any:
            result = step(*step_args)
            self._step_point("written-first")
            return result

        first.step = written  # type: ignore[method-assign]
        try:
            apply(state, *args, **named)
        finally:
            first.step = step  # type: ignore[method-assign]
        if f"corrupt-state@{self._state.version}" in self._wanted:
            flip_bit(state.flats()[0].tensor)
        self._step_point("written")

    def _copy(self, copy: Callable[..., str], client: HealClient, *args: Any, **named: Any) -> str:
        self._quorum_point("heal-asking")
        digest = copy(client, *args, **named)
        self._quorum_point("healed")
        return digest


def flip_bit(tensor: torch.Tensor) -> None:
    """Flip the lowest bit of the first element's mantissa."""
    bits = tensor.view(torch.int32)
    bits[0] = bits[0] ^ 1


def around(owner: type, name: str, wrapper: Callable[..., Any]) -> None:
    """Have ``wrapper(original, self, ...)`` called in place of a method."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def called(*args: Any, **named: Any) -> Any:
        return wrapper(original, *args, **named)

    setattr(owner, name, called)


def before(owner: type, name: str, call: Callable[..., None]) -> None:
    """Have ``call(self, ...)`` called before a method."""

    def wrapper(original: Callable[..., Any], *args: Any, **named: Any) -> Any:
        call(*args)
        return original(*args, **named)

    around(owner, name, wrapper)


def after(owner: type, name: str, call: Callable[..., None]) -> None:
    """Have ``call(self, ...)`` called after a method."""

    def wrapper(original: Callable[..., Any], *args: Any, **named: Any) -> Any:
        result = original(*args, **named)
        call(*args)
        return result

    around(owner, name, wrapper)
