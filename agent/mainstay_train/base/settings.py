"""Settings that a launcher gives to the trainer that it forks, as JSON over the Unix socket."""

from __future__ import annotations

from dataclasses import dataclass

from mainstay_core.job.config import JobConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """One life of a trainer: written by the supervisor, read by the trainer."""

    config: JobConfig
    pod: str
    """UID of the pod."""
    slot: int
    incarnation: str
    """Random name of this life; a restarted trainer is somebody else."""
    address: str
    """Address of the pod: data sockets are bound to it."""
    socket: str
    """Path of the supervisor's Unix socket."""
    work_dir: str
    """Directory for logs and scratch files of this pod."""


DEFAULT_TRAINER = "mainstay_train.launcher.main:run_trainer"
DEFAULT_PRELOAD = "torch._dynamo"
"""Imported before trainers are forked, unless something else is named: torch's own optimizers
import it, which would take each trainer seconds. The built-in models do without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherSettings:
    """The places of a launcher's pod and of its supervisor."""

    pod: str
    """UID of the pod."""
    pod_dir: str
    """Directory for the launcher's own logs."""
    socket: str
    """Path of the supervisor's Unix socket."""
    relay: bool = False
    """Whether what trainers print goes to the launcher's own output, each line marked with its
    slot, as in a container; else to files in ``work_dir``."""
    trainer: str = DEFAULT_TRAINER
    """``module:function``, called with TrainerSettings, returns the exit code."""
    connect_s: float = 60.0
    """How long to wait for the supervisor's socket, in seconds. Both start at once;
    a supervisor that is not there after a minute did not start at all."""
