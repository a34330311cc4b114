"""Entry of a trainer process, called in the child that the launcher forked."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from functools import partial

import torch

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.job import protections
from mainstay_train.base.aborts import JobOver
from mainstay_train.base.decorator import Loop
from mainstay_train.base.settings import TrainerSettings
from mainstay_train.compute.engine import BlockTraining, inner_mesh
from mainstay_train.exact import digests, fingerprint, numerics, optimizer
from mainstay_train.model import workload
from mainstay_train.session import failing, loop
from mainstay_train.session.driver import Driver
from mainstay_train.session.session import Session

logger = logging.getLogger(__name__)

EXIT_USER_ERROR = 10
"""The user's model or configuration cannot work; a FAILED fact said why."""


def warm_up() -> None:
    """Do once in the warm parent what every trainer would do first.

    The first optimizer step of a process imports parts of torch, and the digests' key tables are
    the same for all.
    """
    numerics.setup("cpu")
    digests.warm_up()
    probe = torch.nn.Parameter(torch.zeros(1))
    probe.grad = torch.zeros(1)
    optimizer.adamw()([("probe", probe)]).step()


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
    report_failure: Callable[[str], None] = partial(failing.report_failure, settings)
    try:
        name = choose_device(config.device, settings.slot)
        with workload.user_code("setting up the device"):
            device = numerics.setup(name)
        backend = choose_backend(config.backend, name, config.shape.ranks_per_pod)
        with workload.user_code(f"loading {config.entrypoint}"):
            entrypoint = workload.find(config.entrypoint)
        if isinstance(entrypoint, Loop):
            driver = Driver(settings, device, backend)
            report_failure = driver.fail
            loop.run(entrypoint, driver)
            return 0
        training, hello = _load_blocks(settings, entrypoint, name, backend)
        session = Session(settings, training, backend)
        report_failure = session.fail
        session.run(hello)
    except JobOver:
        return 0
    except (InvalidSpecError, workload.WorkloadError) as error:
        logger.exception("the workload cannot run")
        report_failure(str(error))
        return EXIT_USER_ERROR
    return 0


def _load_blocks(
    settings: TrainerSettings, entrypoint: workload.Entrypoint, device: str, backend: str
) -> tuple[BlockTraining, dict[str, object]]:
    """What is trained, and how this trainer introduces itself."""
    config = settings.config
    with workload.user_code(f"loading {config.entrypoint}"):
        loaded = workload.call(config.entrypoint, entrypoint, config.workload, config.args)
        loaded.stages(config.shape.stages)
        inner = loaded.inner_fingerprint(inner_mesh(config, device, 0))
        extra = {**loaded.fingerprint(), **inner, protections.ENTRY_KEY: protections.BLOCKS}
        extra["reduction"] = f"canonical/{backend}"
    hello: dict[str, object] = {
        "slot": settings.slot,
        "incarnation": settings.incarnation,
        "pid": os.getpid(),
        "fingerprint": fingerprint.fingerprint(device, dtype=loaded.dtype, extra=extra),
    }
    return BlockTraining(workload=loaded, config=config, device=device), hello
