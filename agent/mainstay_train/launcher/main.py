"""Entry of a trainer process, called in the child that the launcher forked."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Collection

import torch

from mainstay_core.base.errors import InvalidSpecError, brief
from mainstay_core.dmr.settings import Mode
from mainstay_core.job.config import JobConfig, LogKind
from mainstay_core.wire import rules
from mainstay_train.base import heap
from mainstay_train.base.aborts import JobOver
from mainstay_train.base.crashes import crash_of
from mainstay_train.base.decorator import Loop
from mainstay_train.base.device import accelerator_of, check_devices, choose_backend, choose_device
from mainstay_train.base.settings import TrainerSettings
from mainstay_train.compute import purity
from mainstay_train.compute.loader import Loader
from mainstay_train.compute.training import BlockTraining, inner_mesh
from mainstay_train.exact import fingerprint, numerics, optimizer
from mainstay_train.model import compilation, pipeline, trial, workload
from mainstay_train.session import failing, loop
from mainstay_train.session.driver import Driver
from mainstay_train.session.session import Session
from mainstay_train.sums import digests

logger = logging.getLogger(__name__)

EXIT_CRASHED = 1
"""An exception ended the program: a frame to the supervisor said which."""
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


def run_trainer(settings: TrainerSettings) -> int:
    """Run one life of a trainer; returns its exit code."""
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format=f"%(asctime)s {settings.pod}/{settings.slot} %(levelname)s %(message)s",
        force=True,
    )
    if not heap.keep_freed():
        logger.info("this C library's heap is left as it is: it is not glibc's")
    life = _Life(settings)
    try:
        life.run()
    except JobOver:
        return 0
    except (InvalidSpecError, workload.WorkloadError) as error:
        logger.exception("the workload cannot run")
        life.teller.fail(brief(error), crash_of(error))
        return EXIT_USER_ERROR
    except (Exception, SystemExit) as error:
        # A program that ends itself is no trainer that has finished, whatever code it gives.
        logger.exception("the trainer ends")
        life.teller.crash(crash_of(error))
        return EXIT_CRASHED
    return 0


class _Life:
    """One life of a trainer: it loads what the user brings, and runs it."""

    def __init__(self, settings: TrainerSettings) -> None:
        self._settings = settings
        self._driver: Driver | None = None
        self._session: Session | None = None

    @property
    def teller(self) -> Session | failing.Teller:
        """Who tells how the program ends."""
        if self._driver is not None:
            return self._driver.teller
        return self._session or failing.Teller(self._settings)

    def run(self) -> None:
        """Run until the job is over."""
        settings, config = self._settings, self._settings.config
        name = choose_device(config.device, settings.slot)
        with workload.user_code("setting up the device"):
            device = numerics.setup(name)
        backend = choose_backend(config.backend, name, config.shape.ranks_per_pod)
        check_devices(backend, config.shape.ranks_per_pod, torch.cuda.device_count())
        with workload.user_code(f"loading {config.entrypoint}"):
            entrypoint = workload.find(config.entrypoint)
        if isinstance(entrypoint, Loop):
            compilation.check_loop(config.compile, config.entrypoint)
            self._driver = Driver(settings, device, backend)
            loop.run(entrypoint, self._driver)
            return
        training, hello = _load_blocks(settings, entrypoint, name, backend)
        self._session = Session(settings, training, backend)
        self._session.run(hello)


def _load_blocks(
    settings: TrainerSettings, entrypoint: workload.Entrypoint, device: str, backend: str
) -> tuple[BlockTraining, dict[str, object]]:
    """What is trained, and how this trainer introduces itself."""
    config = settings.config
    with workload.user_code(f"loading {config.entrypoint}"):
        loaded = workload.call(config.entrypoint, entrypoint, config.workload, config.args)
        inner = inner_mesh(config, device, 0)
        extra = loaded.identify(torch.device(device), inner, backend)
        extra |= pipeline.identify(loaded, config.shape, inner)
        if config.compile == compilation.BLOCKS:
            extra |= trial.check(loaded, torch.device(device))
        compiles = config.compile == compilation.BLOCKS
        purity.try_blocks(loaded, torch.device(device), config.checks, compiles=compiles)
        unskippable = _find_unskippable(config, loaded, torch.device(device))
    hello: dict[str, object] = {
        "slot": settings.slot,
        "incarnation": settings.incarnation,
        "pid": os.getpid(),
        "accelerator": accelerator_of(torch.device(device)),
        "fingerprint": rules.with_rules(
            fingerprint.fingerprint(device, dtype=loaded.dtype, extra=extra)
        ),
    }
    twice = config.dmr is Mode.FULL
    loader = Loader(loaded.dataset, device, ahead=loaded.load_ahead, twice=twice)
    training = BlockTraining(
        workload=loaded, config=config, device=device, loader=loader, unskippable=unskippable
    )
    return training, hello


def _find_unskippable(
    config: JobConfig, loaded: workload.Workload, device: torch.device
) -> Collection[str]:
    """Return the blocks whose frozen units a replay must not skip.

    That is no part of the fingerprint: a weight gradient that is computed and not used costs time,
    and moves no bit.
    """
    snapshots = config.snapshots
    if snapshots is None or snapshots.log is not LogKind.BOUNDARY:
        return ()
    if config.compile == compilation.BLOCKS:
        return ()  # compiled code defers no weight gradient, so none is skipped
    began_s = time.monotonic()
    unskippable = trial.find_unskippable(loaded, device)
    for name, why in unskippable.items():
        logger.warning("frozen units of block %s are computed all the same: %s", name, why)
    took_s = time.monotonic() - began_s
    logger.info(
        "%d of %d blocks leave out the weight gradients of frozen units in a replay; their trial "
        "took %.2f s",
        len(loaded.blocks) - len(unskippable),
        len(loaded.blocks),
        took_s,
    )
    return unskippable
