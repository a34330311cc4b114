"""Faults: they strike at a moment or at a place in the code, and some end again."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mainstay_core.base.shape import Order
from mainstay_core.control_plane.job_store import Change
from mainstay_core.sim import terms
from mainstay_core.sim.compute import Compute, Wrong
from mainstay_core.sim.engine import Process, ProcessKilled
from mainstay_core.sim.memory_faults import damage_segment, mute_stores
from mainstay_core.sim.scenarios.scenario import Fault
from mainstay_core.sim.services.provider import Pod
from mainstay_core.sim.stage import Stage
from mainstay_core.sim.store import NODE as STORE
from mainstay_core.sim.trainers.trainer import Trainer
from mainstay_core.supervisor.events import LeaveRequested

PATIENCE_S = 8.0
"""A point that is not passed within so long is not waited for."""
NEEDS_THREE = 3
"""Cells of a stage that it takes to find out which one's state is bad."""


class Faults:
    """The faults of one run, armed one after the other."""

    def __init__(self, world: Stage, faults: Iterable[Fault]) -> None:
        self._world, self._waiting = world, list(faults)
        self._rng = world.engine.rng
        self._armed: Fault | None = None
        self._point = ""
        self._passes = 0
        self._at: Process | None = None
        self._lasts_s = 0.0
        self._unfinished = 0
        self._gradient_due = self._state_due = self._type_due = False
        self._unseen_due = self._stick_due = self._guard_due = False
        self.struck: list[str] = []
        self.calm_since_s: float | None = None
        """When the last one was over; None before."""
        self._arm()

    # When -------------------------------------------------------------------

    def _arm(self) -> None:
        self._armed, self._point, self._passes = None, "", 0
        if not self._waiting:
            if self._unfinished == 0 and self.calm_since_s is None:
                self.calm_since_s = self._world.engine.now_s
            return
        fault = self._armed = self._waiting.pop(0)
        delay_s = PATIENCE_S if fault.at_s is None else fault.at_s
        self._point = fault.point
        self._world.engine.schedule(delay_s, None, self._due, (fault,))

    def _due(self, fault: Fault) -> None:
        if self._armed is not fault:
            return
        if fault.point:
            self._arm()
        else:
            self._strike(fault, None)

    def reach(self, trainer: Trainer, point: str) -> None:
        """A trainer is at a point; raises ProcessKilled if that was its end."""
        if point != self._point:
            return
        self._passes += 1
        fault = self._armed
        assert fault is not None
        if self._passes < fault.times:
            return
        self._strike(fault, trainer)
        if not trainer.alive:
            raise ProcessKilled

    def reach_api(self, api: Process, change: Change, point: str) -> None:
        """An api replica is about to commit a plan, or has just done it."""
        if point != self._point or change.plan is None:
            return
        self._passes += 1
        fault = self._armed
        assert fault is not None
        if self._passes < fault.times:
            return
        self._strike(fault, api)
        if not api.alive:
            raise ProcessKilled

    def _strike(self, fault: Fault, at: Process | None) -> None:
        self._point, self._armed = "", None
        where = f" at {fault.point} of {at.name}" if at is not None else ""
        self._world.engine.say("FAULT", f"{fault.kind}{where}")
        if self._world.pods:
            self.struck.append(fault.kind)
            self._world.checks.seen[f"fault at {fault.point}"] += at is not None
            self._at, self._lasts_s = at, fault.lasts_s
            getattr(self, "_" + fault.kind.replace("-", "_"))()
        self._arm()

    def _until(self, lasts_s: float, end: Callable[[], None]) -> None:
        """Have something end, and the run not be calm before that."""
        self._unfinished += 1

        def over() -> None:
            self._unfinished -= 1
            end()
            if self._unfinished == 0 and self._armed is None and not self._waiting:
                self.calm_since_s = self._world.engine.now_s

        self._world.engine.schedule(lasts_s, None, over)

    # Whom -------------------------------------------------------------------

    def _members(self) -> list[Trainer]:
        plan = self._world.newest_plan
        members = plan.members if plan is not None else ()
        lives = (self._world.trainers.get(m.incarnation) for m in members)
        return [t for t in lives if t is not None and t.alive]

    def _victim(self) -> Trainer | None:
        """Whoever is at the point, mostly; else any member, now and then a spare."""
        world, at = self._world, self._at
        if isinstance(at, Trainer) and self._rng.random() < 0.6:
            return at
        some = self._members()
        if not some or self._rng.random() < 0.15:
            some = [t for t in world.trainers.values() if t.alive]
        return self._rng.choice(some) if some else None

    def _node(self) -> str:
        victim = self._victim()
        known = victim is not None and victim.node in self._world.pods
        return victim.node if victim and known else self._rng.choice(sorted(self._world.pods))

    # What. Without any pod there is nothing to strike (see _strike). ---------

    def _kill_trainer(self) -> None:
        victim = self._victim()
        if victim is not None:
            victim.kill()

    def _kill_pod(self) -> None:
        self._world.pods[self._node()].kill()

    def _kill_meeting(self) -> None:
        """The pod where the quorum meets, or only one of its halves."""
        plan = self._world.newest_plan
        pod = self._world.pods.get(plan.rendezvous.pod) if plan is not None else None
        if pod is not None:
            self._rng.choice((pod.kill, pod.supervisor.kill, pod.launcher.kill))()

    def _kill_supervisor(self) -> None:
        self._world.pods[self._node()].supervisor.kill()

    def _kill_launcher(self) -> None:
        self._world.pods[self._node()].launcher.kill()

    def _node_loss(self) -> None:
        self._world.pods[self._node()].kill(silent=True)

    def _kill_some(self, some: Iterable[Trainer]) -> None:
        pods = self._rng.random() < 0.4
        for victim in list(some):
            if pods:
                self._world.pods[victim.node].kill()
            else:
                victim.kill()

    def _kill_replica(self) -> None:
        plan = self._world.newest_plan
        if plan is not None:
            chain = self._rng.choice(plan.chains)
            lives = {str(plan.members[i].incarnation) for i in chain.cells}
            self._kill_some(t for t in self._members() if t.incarnation in lives)

    def _kill_all_but_one(self) -> None:
        plan = self._world.newest_plan
        if plan is not None:
            chain = self._rng.choice(plan.chains)
            lives = {str(plan.members[i].incarnation) for i in chain.cells}
            self._kill_some(t for t in self._members() if t.incarnation not in lives)

    def _kill_stage(self) -> None:
        plan = self._world.newest_plan
        if plan is not None:
            position = self._rng.choice(plan.positions)
            lives = {str(m.incarnation) for m in position}
            self._kill_some(t for t in self._members() if t.incarnation in lives)

    def _inner_stage(self) -> list[Trainer]:
        """All cells of a stage that has two neighbours; of any stage, where none has or ends have
        twins.

        Of a stage with several ranks, now and then one rank of each cell.
        """
        plan = self._world.newest_plan
        if plan is None:
            return []
        last = self._world.config.shape.stages - 1
        has_twins = self._world.config.shape.order is Order.SWAPPED
        stage = self._rng.randint(*((1, last - 1) if last > 1 and not has_twins else (0, last)))
        inner = self._rng.choice((None, None, *range(plan.ranks_per_stage)))
        lives = {
            str(m.incarnation)
            for m in plan.members
            if m.rank.stage == stage and inner in (None, m.rank.inner)
        }
        return [t for t in self._members() if t.incarnation in lives]

    def _kill_inner(self) -> None:
        self._kill_some(self._inner_stage())

    def _stop_inner(self) -> None:
        """The pods of a stage are silent for a while, and come back with its true state."""
        for node in sorted({trainer.node for trainer in self._inner_stage()}):
            self._freeze(self._world.pods[node])

    def _kill_two(self) -> None:
        some = self._members()
        self._kill_some(self._rng.sample(some, min(2, len(some))))

    def _kill_all(self) -> None:
        self._kill_some(self._members())

    def _stop(self) -> None:
        victim = self._victim()
        if victim is not None:
            victim.stop()
            self._until(self._lasts_s, victim.resume)

    def _stop_pod(self) -> None:
        """A frozen virtual machine: everything on it, supervisor included."""
        pod = self._world.pods[self._node()]
        alone = self._rng.random() < 0.3
        self._freeze(pod, *([pod.supervisor] if alone else []))

    def _freeze(self, pod: Pod, *some: Process) -> None:
        """Stop the processes of a pod, or some of them, and have them go on later."""
        stopped = some or (pod.supervisor, pod.launcher, *pod.launcher.children.values())
        for process in stopped:
            process.stop()

        def resume() -> None:
            for process in stopped:
                process.resume()

        self._until(self._lasts_s, resume)

    def _cut(self, pairs: list[tuple[str, str]], lasts_s: float) -> None:
        network = self._world.network
        network.cut(pairs, reset=self._rng.random() < 0.4)
        self._world.engine.say("FAULT", f"cut {sorted({p[0] for p in pairs})}")
        self._until(lasts_s, lambda: network.mend(pairs))

    def _cut_pod(self) -> None:
        """A pod from its peers, from everybody, or from some."""
        node = self._node()
        others = [n for n in sorted(self._world.pods) if n != node]
        draw = self._rng.random()
        if draw < 0.4:
            others += self._world.api_nodes
        elif draw < 0.7 and others:
            others = self._rng.sample(others, self._rng.randint(1, len(others)))
        both = [(node, n) for n in others] + [(n, node) for n in others]
        self._cut(both, self._lasts_s)

    def _cut_api(self) -> None:
        """Supervisors from the api, not from their peers."""
        nodes = sorted(self._world.pods)
        some = self._rng.sample(nodes, self._rng.randint(1, len(nodes)))
        apis = self._world.api_nodes
        both = [(n, a) for n in some for a in apis] + [(a, n) for n in some for a in apis]
        self._cut(both, self._lasts_s)

    def _cut_one_way(self) -> None:
        node = self._node()
        others = [*(n for n in sorted(self._world.pods) if n != node), *self._world.api_nodes]
        some = self._rng.sample(others, self._rng.randint(1, len(others)))
        away = self._rng.random() < 0.5
        self._cut([(node, n) if away else (n, node) for n in some], self._lasts_s)

    def _reset(self) -> None:
        """A socket breaks and everybody lives."""
        ends = [
            e for e in self._world.network.ends if e.open and e.process.node != e.peer.process.node
        ]
        if ends:
            self._rng.choice(ends).reset("connection reset")

    def _slow(self) -> None:
        victim = self._victim()
        if victim is not None:
            victim.slow = 20.0

            def fast(victim: Trainer = victim) -> None:
                victim.slow = 1.0

            self._until(self._lasts_s, fast)

    def _bad_source(self) -> None:
        """Copies of a rank's state arrive damaged, for good, and no other rank has that state."""
        victim, plan = self._victim(), self._world.newest_plan
        place = plan.member_of(victim.slot, victim.incarnation) if victim and plan else None
        if victim is None or plan is None or place is None:
            return
        victim.heal_server.spoils = True
        position = plan.position_members(plan.position_of(place.index))
        lives = {str(m.incarnation) for m in position} - {str(victim.incarnation)}
        for other in [t for t in self._members() if t.incarnation in lives]:
            other.kill()

    def _corrupt_gradient(self) -> None:
        self._gradient_due = True

    def _corrupt_state(self) -> None:
        self._state_due = True

    def _corrupt_guard(self) -> None:
        self._guard_due = True

    def corrupt_guard(self, trainer: Trainer) -> None:
        """Spoil what a trainer guards, if it guards something: its next vote tells it."""
        last = trainer.state.version + 1 >= trainer.state.num_steps
        held = [copy.stage for copy in trainer.state.guarded]
        if self._guard_due and held and not last:
            self._guard_due = False
            self._world.engine.say(trainer.name, "guards something wrong")
            self._world.checks.seen["corrupt guard"] += 1
            trainer.guards_wrong, trainer.was_tampered = held[0], True
            trainer.copies[held[0]] = terms.term("corrupt", trainer.copies[held[0]])

    def _corrupt_type(self) -> None:
        self._type_due = True

    def _break_chain(self) -> None:
        """A chain loses its pipeline, and all its cells live."""
        victim = self._victim()
        if victim is not None:
            victim.connections.break_pipeline()

    def _corrupt_unseen(self) -> None:
        self._unseen_due = True

    def _stick(self) -> None:
        self._stick_due = True

    def goes_wrong(self, trainer: Trainer, shard_type: int) -> Wrong | None:
        """Have what a trainer computes next come out wrong."""
        how = None
        if self._type_due:
            how, self._type_due = Wrong.FOUND, False
        elif self._unseen_due or self._stick_due or trainer.sticks:
            if trainer.is_alone:
                return None  # nobody could see it
            compared = trainer.compared
            value = trainer.state.version, shard_type
            is_seen = compared is not None and shard_type == compared.type
            # What sticks is wrong again, whoever else computes it by then.
            if not (is_seen or (trainer.sticks and value in trainer.wrong)):
                return None  # nobody would see it
            trainer.sticks = trainer.sticks or self._stick_due
            trainer.was_wrong = True
            trainer.wrong.add(value)
            how, self._unseen_due, self._stick_due = Wrong.UNSEEN, False, False
        if how is not None:
            self._world.engine.say(trainer.name, f"computes something wrong: {how.value}")
        return how

    def corrupt_gradient(self, trainer: Trainer, compute: Compute) -> None:
        """Spoil a reduced gradient, where others of the stage have the right one."""
        if self._gradient_due and self._stage_size(trainer) > 1:
            self._gradient_due = False
            self._world.engine.say(trainer.name, "has a corrupt gradient")
            compute.reduced = terms.term("corrupt", trainer.name, compute.reduced)

    def corrupt_state(self, trainer: Trainer, compute: Compute) -> None:
        """Spoil a state, where a majority of the stage has the right one."""
        last = trainer.state.version + 1 >= trainer.state.num_steps
        alone = not any(t.tampered for t in self._members())
        able = alone and not last and self._stage_size(trainer) >= NEEDS_THREE
        if self._state_due and able:
            self._state_due = False
            self._world.engine.say(trainer.name, "has a corrupt state")
            trainer.tampered = trainer.was_tampered = True
            compute.params = terms.term("corrupt", compute.params)

    @staticmethod
    def _stage_size(trainer: Trainer) -> int:
        plan = trainer.state.plan
        assert plan is not None
        return len(plan.position_members(trainer.state.member_position))

    def _kill_api(self) -> None:
        world = self._world
        living = [a for a in world.apis.values() if a.alive]
        victims = living if self._rng.random() < 0.4 else living[:1]
        at = self._at
        if at is not None and at.name in [a.name for a in living]:
            victims = [a for a in living if a.name == at.name]
        for victim in victims:
            victim.kill()
            self._until(self._lasts_s, lambda node=victim.node: world.start_api(node))  # type: ignore[misc]

    def _store_outage(self) -> None:
        world = self._world
        if self._rng.random() < 0.3:
            node = self._rng.choice(world.api_nodes)
            self._cut([(node, STORE), (STORE, node)], self._lasts_s)
            return
        world.store.up = False

        def up() -> None:
            world.store.up = True

        self._until(self._lasts_s, up)

    def _lose_store(self, *, everything: bool) -> None:
        world = self._world
        if not any(pod.supervisor.state.registered for pod in world.pods.values()):
            return  # nobody could tell anything of the job: whoever made it has to make it again
        world.checks.fell_back = True
        world.store.up = False

        def up() -> None:
            world.store.lose(None if everything else self._rng.randrange)
            world.store.up = True

        self._until(min(self._lasts_s, 1.0) * self._rng.random(), up)

    def _store_flush(self) -> None:
        self._lose_store(everything=True)

    def _store_fallback(self) -> None:
        self._lose_store(everything=False)

    def _leave(self) -> None:
        """SIGTERM of a pod: it hands its work over."""
        self._world.pods[self._node()].supervisor.feed(LeaveRequested("told to end by SIGTERM"))

    def _drain(self) -> None:
        self._world.wishes.drain(self._node())

    def _suspend(self) -> None:
        """Somebody has the job stand still, and go on later, whether or not it came to stand."""
        wishes = self._world.wishes
        if self._rng.random() < 0.5:
            wishes.suspend_until_it_stands(self._lasts_s)
        else:
            wishes.begin_suspension()
            self._until(self._lasts_s, wishes.end_suspension)

    def _scale(self) -> None:
        """Another number of replicas or spares; now and then what it was, a while later."""
        wishes, config = self._world.wishes, self._world.config
        shape = config.shape
        replicas = self._rng.choice((None, *range(shape.min_replicas, shape.lanes + 1)))
        spares = self._rng.choice((0, 1, 2) if replicas is None else (None, None, 0, 1))
        wishes.scale(replicas, spares)
        if self._rng.random() < 0.4:
            self._until(self._lasts_s, lambda: wishes.scale(shape.replicas, config.spares))

    def _flap(self) -> None:
        """A trainer that dies again soon after each restart, a few times."""
        victim = self._victim()
        if victim is None:
            return
        node, index = victim.node, victim.slot.index
        victim.kill()
        for again in range(1, self._rng.randint(2, 4)):
            delay_s = again * (0.3 + 1.5 * self._rng.random())

            def strike() -> None:
                for trainer in list(self._world.trainers.values()):
                    if trainer.node == node and trainer.slot.index == index:
                        trainer.kill()

            self._until(delay_s, strike)

    def _damage_segment(self) -> None:
        damage_segment(self._world, self._rng)

    def _mute_stores(self) -> None:
        mute_stores(self._world)

    def _damage_checkpoint(self) -> None:
        disk = self._world.disk
        if disk.complete:
            version = self._rng.choice(sorted(disk.complete))
            (disk.torn if self._rng.random() < 0.5 else disk.flipped).add(version)
