"""Entry of a trainer process, called in the child that the launcher forked."""

from __future__ import annotations

import logging
import os
import sys

import torch

from mainstay_core.errors import InvalidSpecError
from mainstay_core.facts import Fact, FactKind
from mainstay_core.ids import Incarnation, PodUid
from mainstay_train import digests, fingerprint, numerics, workload
from mainstay_train.engine import BlockTraining
from mainstay_train.session import Session
from mainstay_train.settings import TrainerSettings
from mainstay_train.uplink import Status, Uplink

logger = logging.getLogger(__name__)

EXIT_USER_ERROR = 10
"""The user's model or configuration cannot work; a FAILED fact said why."""


def warm_up() -> None:
    """Do once in the warm parent what every trainer would do first.

    The first optimizer step of a process imports two seconds' worth of torch, switching
    on determinism another one, and the digests' key tables are the same for all.
    """
    numerics.setup("cpu")
    digests.warm_up()
    probe = torch.nn.Parameter(torch.zeros(1))
    probe.grad = torch.zeros(1)
    torch.optim.AdamW([probe], fused=True).step()


def choose_device(wanted: str, slot: int) -> str:
    """Return the device of a slot: ``auto`` is cuda where there is one.

    Raises:
        InvalidSpecError: ``wanted`` is none of auto, cpu, cuda.
    """
    if wanted not in ("auto", "cpu", "cuda"):
        raise InvalidSpecError("device", f"is {wanted!r}, must be auto, cpu or cuda")
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return "cpu"
    return f"cuda:{slot % max(1, torch.cuda.device_count())}"


def choose_backend(wanted: str, device: str, ranks_per_pod: int) -> str:
    """Return the communicator backend: nccl where every rank has a device of its own.

    Raises:
        InvalidSpecError: nccl is asked for on a CPU, or the name is unknown.
    """
    if wanted not in ("auto", "gloo", "nccl"):
        raise InvalidSpecError("backend", f"is {wanted!r}, must be auto, gloo or nccl")
    cuda = device.startswith("cuda")
    if wanted == "nccl" and not cuda:
        raise InvalidSpecError("backend", "nccl needs device cuda; use gloo on CPU")
    own_device = cuda and torch.cuda.device_count() >= ranks_per_pod
    if wanted == "nccl" or (wanted == "auto" and own_device):
        return "nccl"
    return "gloo"


def run_trainer(settings: TrainerSettings) -> int:
    """Run one life of a trainer; returns its exit code."""
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format=f"%(asctime)s {settings.pod}/{settings.slot} %(levelname)s %(message)s",
        force=True,
    )
    config = settings.config
    session: Session | None = None
    try:
        device = choose_device(config.device, settings.slot)
        with workload.user_code("setting up the device"):
            numerics.setup(device)
        backend = choose_backend(config.backend, device, config.shape.ranks_per_pod)
        with workload.user_code(f"loading {config.entrypoint}"):
            loaded = workload.load(config.entrypoint, config.workload, config.args)
            loaded.stages(config.shape.stages)
            extra = {**loaded.fingerprint(), "reduction": f"canonical/{backend}"}
        print_of = fingerprint.fingerprint(device, dtype=loaded.dtype, extra=extra)
        hello = {
            "slot": settings.slot,
            "incarnation": settings.incarnation,
            "pid": os.getpid(),
            "fingerprint": print_of,
        }
        training = BlockTraining(workload=loaded, config=config, device=device)
        session = Session(settings, training, backend)
        session.run(hello)
    except (InvalidSpecError, workload.WorkloadError) as error:
        logger.exception("the workload cannot run")
        if session is None:
            _tell_failure(settings, str(error))
        else:
            session.fail(str(error))
        return EXIT_USER_ERROR
    return 0


def _tell_failure(settings: TrainerSettings, why: str) -> None:
    """Say why the job cannot run, before there is a session."""
    uplink = Uplink(settings.socket, Status(), settings.config.heartbeat_s, _ignore, _ignore)
    fact = Fact(
        kind=FactKind.FAILED,
        pod=PodUid(settings.pod),
        slot=settings.slot,
        incarnation=Incarnation(settings.incarnation),
        evidence=why,
    )
    uplink.send(
        {
            "kind": "hello",
            "slot": settings.slot,
            "incarnation": settings.incarnation,
            "pid": os.getpid(),
            "fingerprint": {},
        }
    )
    uplink.tell(fact)


def _ignore(*_: object) -> None:
    return None
