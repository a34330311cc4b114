"""One run of a job on this machine, from the checks to the report.

Order matters: everything that can be refused is refused before the first process
starts, and everything that is started belongs to one :class:`ChildProcesses`, which ends
it whichever way this function is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from mainstay_cli.base import network
from mainstay_cli.base.client import ApiClient
from mainstay_cli.base.exits import CliError, ExitCode, MachineError
from mainstay_cli.base.files import check_place, write_whole
from mainstay_cli.base.logs import last_line, read_since
from mainstay_cli.base.state_dir import RunRecord, StateDir
from mainstay_cli.local import manifests, preflight, shortage
from mainstay_cli.local.faults import ProcessFaults
from mainstay_cli.local.forge import Forge, start_forge
from mainstay_cli.local.pods import Kubelet
from mainstay_cli.local.pool import LocalPool
from mainstay_cli.local.processes import Child, ChildProcesses
from mainstay_cli.local.services import Services, ServiceSettings
from mainstay_cli.local.watch import MachineWatch
from mainstay_cli.views.monitor import JobState, Monitor
from mainstay_cli.views.progress import PlainProgress
from mainstay_core.base import codec
from mainstay_core.faults.points import FaultPoint
from mainstay_core.wire.api import ApiError

STOP_GRACE_S = 20.0
"""How long a stop asked for by Ctrl-C may take before everything is killed."""
GOODBYE_S = 5.0
"""How long processes of an ended job may take to leave by themselves."""
REPLACEMENTS_PER_POD = 4
"""Pods made anew in a run, per pod of the job."""
ASK_AGAIN_S = 0.25
"""Between two tries to ask an api that is away."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of a run on this machine. The job itself is in its file."""

    state_dir: Path
    api_port: int = 0
    report: Path | None = None
    repeats: tuple[dict[str, Any], ...] = ()
    """The forks of another run that this one makes again."""
    keep: bool = False
    """Whether the api goes on answering after the job has ended, until Ctrl-C."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The end of a run. ``report`` is the api's report."""

    state: str
    reason: str
    report: dict[str, Any]
    recoveries: list[dict[str, Any]]


def run_job(
    file: manifests.JobFile,
    faults: tuple[FaultPoint, ...],
    options: RunOptions,
    progress: PlainProgress,
) -> RunResult:
    """Run a job to its end and return how it ended; nothing of it is left running.

    Raises:
        CliError: it cannot be run here, failed, or was interrupted.
    """
    try:
        if options.report is not None:
            check_place(options.report, "--report")
        search = manifests.search_path(file.path)
        needs = preflight.Needs.from_environment()
        preflight.check_entrypoint(file.job, search)
        preflight.check_memory(file.job, needs)
        preflight.check_descriptors(file.job, needs)
        redis_server = preflight.find_redis_server()
        port = preflight.choose_port(options.api_port)
        with StateDir(options.state_dir) as state:
            preflight.check_disk(file.job, state.path, needs)
            run = _LocalRun(file, faults, state, port, redis_server, progress, options)
            return asyncio.run(run.run())
    except BaseExceptionGroup as group:
        first = _first_of(group)
        raise _name_shortage(first, options.state_dir) or first from group
    except (ApiError, OSError) as error:
        named = _name_shortage(error, options.state_dir)
        if named is None:
            raise
        raise named from error


class _Interrupts:
    """Ctrl-C, once and twice."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    def install(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._count)

    def _count(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


@dataclass(frozen=True, slots=True)
class _Forges:
    """The two processes that fork what pods consist of."""

    trainers: Forge
    supervisors: Forge


class _LocalRun:
    """The processes of one run and what connects them."""

    def __init__(
        self,
        file: manifests.JobFile,
        faults: tuple[FaultPoint, ...],
        state: StateDir,
        port: int,
        redis_server: Path,
        progress: PlainProgress,
        options: RunOptions,
    ) -> None:
        self._options = options
        self._file = file
        self._faults = faults
        self._state = state
        self._port = port
        self._redis_server = redis_server
        self._progress = progress
        self._token = state.new_token()
        self._secret_file = state.new_secret()
        self._url = f"http://127.0.0.1:{port}"

    async def run(self) -> RunResult:
        interrupts = _Interrupts()
        interrupts.install()
        work = asyncio.create_task(self._work(interrupts), name="run")
        kill = asyncio.create_task(interrupts.second.wait())
        try:
            await asyncio.wait([work, kill], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                work.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await work
                raise CliError("interrupted, everything was killed", ExitCode.INTERRUPTED)
            return work.result()
        finally:
            kill.cancel()

    async def _work(self, interrupts: _Interrupts) -> RunResult:
        address_network, claim = network.claim_network(random.Random())
        with claim:
            async with ChildProcesses() as children, ApiClient(self._url, self._token) as client:
                forges = self._start_forges(children)
                services = Services(children, client, self._service_settings())
                started = asyncio.create_task(services.start())
                stop = asyncio.create_task(interrupts.first.wait())
                await _until_either([started, stop], [])
                if interrupts.first.is_set():
                    raise CliError("interrupted before the start", ExitCode.INTERRUPTED)
                uid = await self._create_job(client)
                pool = self._make_pool(children, forges, client, uid, address_network)
                async with _background(
                    services.keep(),
                    MachineWatch([self._state.path], services.logs).run(),
                    pool.run(),
                    _watch_forge("trainers", forges.trainers, self._state),
                    _watch_forge("supervisors", forges.supervisors, self._state),
                    ProcessFaults(client, uid, services).run(),
                ) as background:
                    return await self._follow(client, uid, pool, interrupts, background)

    async def _create_job(self, client: ApiClient) -> str:
        created = await client.create_job(
            {
                "manifest": self._file.manifest,
                "faults": [codec.encode(fault) for fault in self._faults],
                "checkpoint_dir": str(self._state.checkpoints),
                "repeats": list(self._options.repeats),
            }
        )
        uid = str(created["uid"])
        (self._state.path / "job.yaml").write_text(manifests.dump_yaml(self._file.manifest))
        (self._state.path / "faults.json").write_text(codec.dumps(self._faults))
        self._state.write_record(
            RunRecord(
                name=self._file.job.metadata.name,
                job=uid,
                url=self._url,
                state_dir=str(self._state.path),
                pid=os.getpid(),
                started_at_s=time.time(),
            )
        )
        self._progress.say(
            f"{self._file.job.metadata.name}: {self._file.job.num_pods} pods, api at {self._url}, "
            f"logs and token in {self._state.path}"
        )
        return uid

    async def _follow(
        self,
        client: ApiClient,
        uid: str,
        pool: LocalPool,
        interrupts: _Interrupts,
        background: list[asyncio.Task[None]],
    ) -> RunResult:
        """Show the job until it has ended, or until Ctrl-C has stopped it."""
        monitor = Monitor(client, uid, self._file.job.shape.steps, self._progress)
        watching = asyncio.create_task(monitor.watch())
        stop = asyncio.create_task(interrupts.first.wait())
        try:
            await _until_either([watching, stop], background)
            if interrupts.first.is_set() and not watching.done():
                pool.stop()
                self._progress.say("stopping; press Ctrl-C again to kill everything at once")
                with contextlib.suppress(ApiError, TimeoutError):
                    await client.stop_job(uid)
                    await asyncio.wait_for(asyncio.shield(watching), STOP_GRACE_S)
                    await _until_told(pool)
                    self._try_to_write(dict(await client.fetch(uid, "report")))
                raise CliError("interrupted, everything has ended", ExitCode.INTERRUPTED)
            pool.stop()
            closing = asyncio.create_task(
                self._close(client, uid, pool, monitor, await watching, interrupts.first)
            )
            keeping = background[:1]  # nothing else of it matters to a job that has ended
            try:
                await _until_either([closing], keeping)
                if self._options.keep and not interrupts.first.is_set():
                    state = closing.result().state
                    self._progress.say(f"the job {state}; the api stays until Ctrl-C")
                    await _until_either([stop], keeping)
                return closing.result()
            finally:
                closing.cancel()
        finally:
            for task in (watching, stop):
                task.cancel()

    async def _close(
        self,
        client: ApiClient,
        uid: str,
        pool: LocalPool,
        monitor: Monitor,
        job: JobState,
        interrupted: asyncio.Event,
    ) -> RunResult:
        """Ask for what is left of a job that has ended, and write its report.

        Raises:
            CliError: the api is away when somebody has pressed Ctrl-C.
        """
        await _until_told(pool)
        report = dict(await _ask(lambda: client.fetch(uid, "report"), interrupted))
        recoveries = list(await _ask(monitor.fetch_recoveries, interrupted))
        await _ask(monitor.show_rest, interrupted)
        for path in self._report_paths():
            write_report(report, path)
        return RunResult(state=job.state, reason=job.reason, report=report, recoveries=recoveries)

    def _report_paths(self) -> list[Path]:
        asked = self._options.report
        return [self._state.path / "report.json", *([asked] if asked is not None else [])]

    def _try_to_write(self, report: dict[str, Any]) -> None:
        """Write the report of a run that ends anyway; say where it cannot be written."""
        for path in self._report_paths():
            try:
                write_report(report, path)
            except OSError as error:
                self._progress.say(f"the report is not written: {error}")

    def _start_forges(self, children: ChildProcesses) -> _Forges:
        trainers = [f"--preload={module}" for module in self._preload()]
        return _Forges(
            start_forge(
                children,
                "mainstay_train.launcher.forge",
                self._state.logs / "trainers.log",
                self._environment(),
                [f"--trainers={self._file.job.shape.num_ranks}", *trainers],
            ),
            start_forge(
                children,
                "mainstay_agent.forge",
                self._state.logs / "supervisors.log",
                self._environment(),
            ),
        )

    def _make_pool(
        self,
        children: ChildProcesses,
        forges: _Forges,
        client: ApiClient,
        uid: str,
        address_network: str,
    ) -> LocalPool:
        async def start_supervisor(pod: str, name: str, address: str) -> Child:
            directory = self._state.pod_dir(pod)
            environment = {
                "MAINSTAY_API_URL": self._url,
                "MAINSTAY_TOKEN_FILE": str(self._state.path / "token"),
                "MAINSTAY_JOB": uid,
                "MAINSTAY_POD": pod,
                "MAINSTAY_POD_NAME": name,
                "MAINSTAY_ADDRESS": address,
                "MAINSTAY_POD_DIR": str(directory),
                "MAINSTAY_NUM_SLOTS": str(self._file.job.shape.ranks_per_pod),
            }
            snapshots = self._file.job.plan_snapshots()
            if snapshots is not None:
                environment["MAINSTAY_SNAPSHOT_MEMORY"] = str(snapshots.memory_bytes)
            log = str(directory / "supervisor.log")
            return await forges.supervisors.launch(pod, log=log, environment=environment)

        job = self._file.job
        kubelet = Kubelet(
            forge=forges.trainers,
            name=job.metadata.name,
            network=address_network,
            make_pod_dir=self._state.pod_dir,
            start_supervisor=start_supervisor,
        )
        return LocalPool(
            kubelet=kubelet,
            children=children,
            client=client,
            job=uid,
            handover_s=job.spec.recovery.handover_seconds,
            max_repairs=REPLACEMENTS_PER_POD * job.num_pods,
        )

    def _service_settings(self) -> ServiceSettings:
        socket = self._state.short / "redis.sock"
        environment = self._environment() | {
            "MAINSTAY_API_HOST": "127.0.0.1",
            "MAINSTAY_API_PORT": str(self._port),
            "MAINSTAY_REDIS_URL": f"unix://{socket}",
            "MAINSTAY_TOKEN": self._token,
        }
        return ServiceSettings(
            redis_server=self._redis_server,
            redis_directory=self._state.redis,
            redis_socket=socket,
            logs=self._state.logs,
            environment=environment,
        )

    def _preload(self) -> list[str]:
        """Return modules that every trainer needs; a user's are left to the trainers to import."""
        job = self._file.job
        module = job.spec.workload.entrypoint.rpartition(":")[0]
        # A user's code most likely trains with an optimizer of torch, which imports this.
        modules = [module] if module.startswith("mainstay_train.") else ["torch._dynamo"]
        return [*modules, "mainstay_train.comm.mesh"] if job.shape.ranks_per_stage > 1 else modules

    def _environment(self) -> dict[str, str]:
        """Return our environment with the user's modules findable and nothing buffered."""
        environment = {**os.environ, "MAINSTAY_SECRET_FILE": str(self._secret_file)}
        paths = [str(path) for path in manifests.search_path(self._file.path)]
        if environment.get("PYTHONPATH"):
            paths.append(environment["PYTHONPATH"])
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        environment["PYTHONUNBUFFERED"] = "1"
        return environment


async def _watch_forge(what: str, forge: Forge, state: StateDir) -> None:
    await asyncio.shield(forge.child.ended)
    log = state.logs / f"{what}.log"
    lacks = shortage.find_in(read_since(log, 0))
    cause = f"; {shortage.explain(lacks, [state.path])}" if lacks else ""
    why = f"the forge of {what} ended: {last_line(log)} (see {log}){cause}"
    raise CliError(why, ExitCode.FAILED)


async def _until_told(pool: LocalPool) -> None:
    """Wait until pods have left: supervisors tell the last of the ledger before that.

    Only then is the report whole. One that does not leave is not waited for.
    """
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(pool.wait_ended(), GOODBYE_S)


async def _ask(question: Callable[[], Awaitable[T]], interrupted: asyncio.Event) -> T:
    """Ask the api until it answers: it may be away just now, and is started again.

    Raises:
        CliError: it is away, and nobody wants to wait for it any more.
    """
    while True:
        try:
            return await question()
        except ApiError as error:
            if not error.is_away:
                raise
            if interrupted.is_set():
                why = f"interrupted: the job has ended, and its report is not written: {error}"
                raise CliError(why, ExitCode.INTERRUPTED) from error
        await asyncio.sleep(ASK_AGAIN_S)


def _name_shortage(error: BaseException, place: Path) -> MachineError | None:
    """Return an error that names what this machine lacks, if that is what an error comes from."""
    lacks = None if isinstance(error, CliError) else shortage.of_error(error)
    if lacks is None:
        return None
    return MachineError(f"{shortage.explain(lacks, [place])} ({error})")


async def _until_either(
    tasks: list[asyncio.Task[Any]], background: list[asyncio.Task[None]]
) -> None:
    """Wait for one of the tasks; raise what any of them or of the background raises meanwhile."""
    waiting: set[asyncio.Task[Any]] = {*tasks, *background}
    while not any(task.done() for task in tasks):
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()


@contextlib.asynccontextmanager
async def _background(
    *work: Coroutine[Any, Any, None],
) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Run coroutines beside the body and cancel them after it."""
    tasks = [asyncio.create_task(item) for item in work]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first single exception of a group."""
    first = group.exceptions[0]
    return _first_of(first) if isinstance(first, BaseExceptionGroup) else first


def write_report(report: dict[str, Any], path: Path) -> None:
    """Write a report as indented JSON."""
    write_whole(path, json.dumps(report, indent=1) + "\n")
