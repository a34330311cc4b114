"""A supervisor's settings: from flags, else from the environment. They are read once."""

from __future__ import annotations

import argparse
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.segments.frames import SOCKET_NAME as SNAPSHOT_SOCKET_NAME

MAX_SOCKET_PATH_BYTES = 107
"""Longest path of a Unix socket (unix(7), sun_path without its final zero)."""

MAX_SNAPSHOT_BYTES = 1 << 40
"""More than the memory of a machine."""

SOCKET_NAME = "supervisor.sock"
"""In the pod's directory."""

_EPILOG = """\
Every option may be given by the environment instead; an option wins.
SIGTERM: the pod serves on until its work is handed over to others, for at most
the job's recovery.handoverSeconds; SIGINT ends it at once.
Exit codes: 0 the job is over, or the pod's work is handed over; 1 the parent is
gone or something unexpected happened; 2 bad settings; 143 ended by a signal
before its work was handed over. With --check: 0 it is well, 1 it is not.

example:
  MAINSTAY_TOKEN_FILE=/run/token python -m mainstay_agent --api-url http://127.0.0.1:8000 \\
      --job 4f1c --pod demo-1-a1b2c3 --address 127.9.8.2 --pod-dir /tmp/demo/pods/1
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorSettings:
    """One supervisor's place in the world."""

    api_url: str
    """Base url of the api; of several replicas on one store, all of them, parted by commas."""
    job: str
    """UID of the job."""
    pod: str
    """UID of the pod."""
    pod_name: str
    address: str
    """Address of the pod; the gather server listens on it."""
    pod_dir: Path
    """Holds the Unix socket and the logs."""
    num_slots: int = 1
    domain: str = ""
    """Failure domain, e.g. the node's name."""
    token: str = ""
    token_file: Path | None = None
    """Read instead of ``token``, and again when it changes or the api refuses it: projected tokens
    rotate."""
    secret_file: Path | None = None
    """Holds the job's secret, which pods of the job prove to each other to know."""
    snapshot_memory: int = 0
    """Bytes of the pod's store of segments; 0 in a job without snapshots."""
    parent_fd: int | None = None
    """Read end of a pipe from the parent; its end is this pod's end."""

    @property
    def api_urls(self) -> tuple[str, ...]:
        """Base urls of the api's replicas, at least one."""
        return tuple(url.strip().rstrip("/") for url in self.api_url.split(",") if url.strip())

    @property
    def socket(self) -> Path:
        """The Unix socket for launcher and trainers."""
        return self.pod_dir / SOCKET_NAME

    @property
    def snapshot_socket(self) -> Path:
        """The Unix socket of the store of segments, for trainers."""
        return self.pod_dir / SNAPSHOT_SOCKET_NAME

    def read_token(self) -> str:
        """Return the token to present.

        Raises:
            OSError: the token file cannot be read.
        """
        if self.token_file is not None:
            return self.token_file.read_text().strip()
        return self.token

    def read_secret(self) -> str:
        """Return the job's secret, empty when there is none.

        Raises:
            OSError: its file cannot be read.
        """
        return self.secret_file.read_text().strip() if self.secret_file is not None else ""


def parse(arguments: Sequence[str], environ: Mapping[str, str]) -> SupervisorSettings:
    """Return the settings from flags and environment.

    Raises:
        InvalidSpecError: one is missing or cannot be used; it is named.
        SystemExit: ``--help`` was asked for, or an option does not exist.
    """
    args = _parser(environ).parse_args(arguments)
    for name in ("api_url", "job", "pod", "address", "pod_dir"):
        if not getattr(args, name):
            flag = f"--{name.replace('_', '-')}"
            raise InvalidSpecError(flag, f"is missing; give it, or {_variable(name)}")
    if args.num_slots < 1:
        raise InvalidSpecError("--num-slots", f"is {args.num_slots}, must be at least 1")
    if not 0 <= args.snapshot_memory <= MAX_SNAPSHOT_BYTES:
        raise InvalidSpecError(
            "--snapshot-memory",
            f"is {args.snapshot_memory}, must be a number of bytes from 0 to {MAX_SNAPSHOT_BYTES}",
        )
    settings = SupervisorSettings(
        api_url=args.api_url,
        job=args.job,
        pod=args.pod,
        pod_name=args.pod_name or args.pod,
        address=args.address,
        pod_dir=Path(args.pod_dir),
        num_slots=args.num_slots,
        domain=args.domain,
        token=environ.get("MAINSTAY_TOKEN", ""),
        token_file=Path(args.token_file) if args.token_file else None,
        secret_file=Path(args.secret_file) if args.secret_file else None,
        snapshot_memory=args.snapshot_memory,
        parent_fd=args.parent_fd if args.parent_fd is not None else _stdin_pipe(),
    )
    if not settings.api_urls:
        raise InvalidSpecError("--api-url", f"is {args.api_url!r}, which holds no url")
    _check(settings)
    return settings


def parse_check(arguments: Sequence[str], environ: Mapping[str, str]) -> tuple[Path, str] | None:
    """Return the supervisor's socket and what is to be checked there; None if nothing is.

    Raises:
        InvalidSpecError: the directory of the pod is missing.
    """
    args = _parser(environ).parse_args(arguments)
    if args.check is None:
        return None
    if not args.pod_dir:
        raise InvalidSpecError("--pod-dir", "is missing; give it, or MAINSTAY_POD_DIR")
    return Path(args.pod_dir) / SOCKET_NAME, str(args.check)


def _check(settings: SupervisorSettings) -> None:
    if len(os.fsencode(settings.socket)) > MAX_SOCKET_PATH_BYTES:
        raise InvalidSpecError(
            "--pod-dir", f"{settings.socket} is too long for a Unix socket; use a shorter path"
        )
    if not settings.pod_dir.is_dir():
        raise InvalidSpecError("--pod-dir", f"{settings.pod_dir} is not a directory")
    try:
        settings.read_token()
    except OSError as error:
        raise InvalidSpecError("--token-file", f"cannot be read: {error}") from error
    try:
        settings.read_secret()
    except OSError as error:
        raise InvalidSpecError("--secret-file", f"cannot be read: {error}") from error


def _stdin_pipe() -> int | None:
    """Return 0 if standard input is a pipe: that of whoever started us. Containers have none."""
    try:
        return 0 if stat.S_ISFIFO(os.fstat(0).st_mode) else None
    except OSError:
        return None


def _variable(name: str) -> str:
    return f"MAINSTAY_{name.upper()}"


def _parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mainstay_agent",
        description="Supervisor of one pod: registers it at the api, has its launcher fork "
        "trainers, passes plans on, hosts the gathers of quorums that meet here.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def add(name: str, about: str, default: str = "") -> None:
        variable = _variable(name)
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            default=environ.get(variable, default),
            help=f"{about} [{variable}]",
        )

    add("api_url", "base url of the api, e.g. http://127.0.0.1:8000; several parted by commas")
    add("job", "UID of the job")
    add("pod", "UID of the pod")
    add("pod_name", "name of the pod, for people (the UID)")
    add("address", "address of the pod for data connections")
    add("pod_dir", "directory for socket and logs; a short path")
    add("domain", "failure domain, e.g. the node's name")
    add("token_file", "file with the bearer token; MAINSTAY_TOKEN holds the token itself")
    add("secret_file", "file with the job's secret, which its pods prove to each other to know")
    parser.add_argument(
        "--check",
        choices=("ready", "live"),
        help="ask the supervisor that runs in POD_DIR how it is; exit with 0 if it is well",
    )
    slots = environ.get("MAINSTAY_NUM_SLOTS", "1")
    parser.add_argument(
        "--num-slots",
        type=int,
        default=int(slots) if slots.isdigit() else 0,
        help="accelerators, and trainers, of the pod (1) [MAINSTAY_NUM_SLOTS]",
    )
    memory = environ.get("MAINSTAY_SNAPSHOT_MEMORY", "0")
    parser.add_argument(
        "--snapshot-memory",
        type=int,
        default=int(memory) if memory.isdigit() else -1,
        help="bytes of the pod's store of segments, as the job's spec.snapshots.memory says; 0 in "
        "a job without snapshots (0) [MAINSTAY_SNAPSHOT_MEMORY]",
    )
    fd = environ.get("MAINSTAY_PARENT_FD", "")
    parser.add_argument(
        "--parent-fd",
        type=int,
        default=int(fd) if fd.isdigit() else None,
        help="inherited read end of a pipe: its end ends the pod; standard input if that is a "
        "pipe [MAINSTAY_PARENT_FD]",
    )
    return parser
