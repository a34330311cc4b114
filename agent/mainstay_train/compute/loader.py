"""Loads batches one micro-batch ahead, on a thread of their own.

``Dataset.batch`` reads files and takes time of the host, in which the device would have nothing
more to do. So the batch that is needed next is loaded while the one before is computed.

A batch is asked for by its address, and is given to nobody who asks for another. So what was
loaded for a step that was interrupted, or that a newer plan computes otherwise, is dropped. A call
of the user's cannot be interrupted: the next one begins when it has returned.

The thread waits when nothing is asked for. It ends with its loader, and with the process.

Each batch is copied: a data set may have one buffer for all of them, and what is loaded next would
overwrite what a backward, a recompute or a check still reads. So bits depend neither on how far
ahead is loaded nor on what is checked.

Where a job checks what it computes, each batch is fetched twice, and a third time if the two
differ: a wrong sample is a wrong gradient.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from mainstay_core.base.digest import Digest
from mainstay_core.dmr.flips import Execution, Flip
from mainstay_core.dmr.verdicts import Judgement, Verdict, judge
from mainstay_train.base import device as devices
from mainstay_train.exact.draws import Address
from mainstay_train.kernels import bits
from mainstay_train.kernels.regions import Region
from mainstay_train.kernels.twins import Overwritten
from mainstay_train.model import data
from mainstay_train.model.data import Batch, Dataset
from mainstay_train.model.workload import WorkloadError

logger = logging.getLogger(__name__)

FEW_BYTES = 1 << 20
"""So much beside a batch may be copied with it, or as much as it has itself."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A batch, as it is asked for."""

    address: Address
    digests: bool
    """Whether the digest of its samples is wanted."""
    flips: tuple[Flip, ...] = ()
    """Wrong bits that faults put into its fetches."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A batch, and what is known of it before it is computed."""

    batch: Batch
    """In page-locked memory where the device copies from there by itself."""
    num_tokens: int
    consumed: Digest
    """Digest of its samples; zero where none is wanted."""
    judgement: Judgement | None = None
    """On three fetches of it, where the first two differed."""
    num_differing: int = 0
    """Numbers in which they did."""


@dataclass(slots=True, eq=False)
class _Order:
    """A batch on its way."""

    wanted: Wanted
    begun: bool = False
    over: bool = False
    loaded: Loaded | None = None
    error: BaseException | None = None


class _Desk:
    """The order that a loader gives its thread. The thread knows no more, so the loader can go."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.order: _Order | None = None
        self.ended = False

    def end(self) -> None:
        with self.changed:
            self.ended = True
            self.changed.notify_all()


class _Fetch:
    """Fetches a batch. A loader's thread has it and no reference to the loader, which may go."""

    def __init__(self, dataset: Dataset, device: torch.device, *, twice: bool) -> None:
        self._once, self.twice = partial(_load, dataset, device), twice

    def __call__(self, wanted: Wanted) -> Loaded:
        return _load_twice(self._once, wanted) if self.twice else self._once(wanted)


class Loader:
    """Loads batches of one data set for one device; used by one thread.

    Args:
        dataset: of the workload.
        device: where batches will be copied to.
        ahead: whether to load on a thread; else :meth:`take` does, on its caller's. It does as well
            where nothing could go on meanwhile: the data set waits for nothing, and the device is
            the host.
        twice: whether each batch is fetched twice and compared.
    """

    def __init__(
        self,
        dataset: Dataset,
        device: str | torch.device = "cpu",
        *,
        ahead: bool = True,
        twice: bool = False,
    ) -> None:
        self._load = _Fetch(dataset, torch.device(device), twice=twice)
        gains = torch.device(device).type != "cpu" or data.waits(dataset)
        self._ahead, self._desk = ahead and gains, _Desk()
        self._thread: threading.Thread | None = None

    def fetch_twice(self, *, twice: bool) -> None:
        """Say whether batches are fetched twice from the next one on."""
        self._load.twice = twice

    def rest(self) -> None:
        """Wait until nothing is being loaded; what is ordered is loaded when it is taken."""
        desk = self._desk
        with desk.changed:
            desk.changed.wait_for(
                lambda: desk.order is None or desk.order.over or not desk.order.begun
            )
            desk.order = None

    def order(self, wanted: Wanted) -> None:
        """Begin to load a batch, in place of one that was ordered before and not taken."""
        if not self._ahead:
            return
        desk = self._desk
        with desk.changed:
            if desk.order is not None and desk.order.wanted == wanted:
                return
            desk.order = _Order(wanted)
            desk.changed.notify_all()
        if self._thread is None:
            # Not at the interpreter's exit: a thread that frees tensors then aborts the process.
            weakref.finalize(self, desk.end).atexit = False
            self._thread = threading.Thread(
                target=_serve, args=(desk, self._load), name="data", daemon=True
            )
            self._thread.start()

    def take(self, wanted: Wanted) -> Loaded:
        """Return a batch; waits until it is there.

        Raises:
            BaseException: what ``Dataset.batch`` raised, with its own traceback.
        """
        if not self._ahead:
            return self._load(wanted)
        self.order(wanted)
        desk = self._desk
        with desk.changed:
            order = desk.order
            assert order is not None
            desk.changed.wait_for(lambda: order.over)
            desk.order = None
        if order.error is not None:
            raise order.error
        assert order.loaded is not None
        return order.loaded


def _serve(desk: _Desk, load: Callable[[Wanted], Loaded]) -> None:
    """Load what is ordered until the desk ends: the thread of a loader."""
    while True:
        with desk.changed:
            desk.changed.wait_for(
                lambda: desk.ended or (desk.order is not None and not desk.order.begun)
            )
            if desk.ended:
                return
            order = desk.order
            assert order is not None
            order.begun = True
        try:
            order.loaded = load(order.wanted)
        except BaseException as error:  # whatever it is, it is raised where the batch is taken
            order.error = error
        with desk.changed:
            order.over = True
            if order.error is not None and desk.order is not order:
                # Nobody will take it. If the batch is wanted again, it fails again.
                logger.info("a batch that is not needed did not load", exc_info=order.error)
            desk.changed.notify_all()
        del order  # what waits here keeps no batch


def _load_twice(load: Callable[..., Loaded], wanted: Wanted) -> Loaded:
    """Return a batch of which two fetches were equal.

    Raises:
        WorkloadError: three fetches gave three batches, so the data set is no function of the
            address: it would do so on any device.
    """
    first, second = load(wanted), load(wanted, Execution.CHECKER)
    told = _told(first), _told(second)
    if told[0] == told[1]:
        return first
    judgement = judge(*told, _told(load(wanted, None)), used=False)
    if judgement.verdict is Verdict.UNRELIABLE:
        address = wanted.address
        raise WorkloadError(
            f"the data set gave three different batches for micro-batch {address.micro_batch} of "
            f"type {address.type} in step {address.step}; `batch` must be a function of its address"
        )
    pairs = [(first.batch.tokens, second.batch.tokens), (first.batch.targets, second.batch.targets)]
    return replace(
        first if judgement.verdict is Verdict.CHECKER_HIT else second,
        judgement=judgement,
        num_differing=sum(bits.count_differing(*pair) for pair in pairs),
    )


def flipped(batch: Batch, flips: Sequence[Flip], execution: Execution | None) -> Batch:
    """Return a batch with the wrong bits of one of its fetches; None: the third one."""
    parts = [batch.tokens, batch.targets]
    for flip in flips:
        if execution is not None and flip.execution in (execution, Execution.BOTH):
            which = flip.output % len(parts)
            parts[which] = parts[which].clone()  # it may be the data set's own memory
            bits.flip_bit(parts[which], flip.element, flip.bit)
    return Batch(*parts)


def _own(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a data set's tensor in other memory, from which a device copies by itself."""
    if _must_be_packed(tensor):
        return devices.page_locked(tensor.clone(), device)
    locked = devices.page_locked(tensor, device)
    if locked is not tensor:
        return locked
    # With its strides and its alignment: kernels may choose by both.
    (copy,) = Overwritten([(tensor, True)], replaces=False).copy().written
    return devices.page_locked(copy, device)


def _must_be_packed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's numbers lie far apart, or share memory as what is expanded does.

    A few columns of all samples lie far apart: what is between them would be copied and locked as
    well. Nothing can be copied into a tensor whose numbers share memory.
    """
    region, num_bytes = Region.of(tensor), tensor.numel() * tensor.element_size()
    between = region.end - region.start - num_bytes if region is not None else 0
    return between < 0 or between > max(num_bytes, FEW_BYTES)


def _told(loaded: Loaded) -> str:
    """Return a digest of a batch and of what is known of it."""
    batch = bits.digest_of([loaded.batch.tokens, loaded.batch.targets])
    return f"{batch} {loaded.num_tokens} {loaded.consumed.hex()}"


def _load(
    dataset: Dataset,
    device: torch.device,
    wanted: Wanted,
    execution: Execution | None = Execution.PRIMARY,
) -> Loaded:
    """Fetch a batch, as which fetch of it; None: the third one."""
    if device.type == "cuda":  # of this thread: else memory is locked for the first device
        torch.cuda.set_device(device)
    batch = flipped(dataset.batch(wanted.address), wanted.flips, execution)
    batch = Batch(_own(batch.tokens, device), _own(batch.targets, device))
    consumed = data.consumed_digest(wanted.address, batch) if wanted.digests else Digest.zero()
    num_tokens = data.num_tokens(batch)
    return Loaded(batch, num_tokens, consumed)
