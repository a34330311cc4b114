"""What a launcher tells a trainer that it forks: one value, sent as JSON over the Unix socket."""

from __future__ import annotations

from dataclasses import dataclass

from mainstay_core.jobspec import JobConfig


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
