"""A workload: the blocks, loss, optimizer and addressed data that an entrypoint returns.

``workload.entrypoint`` of a TrainingJob is "module:function" (or
"path/to/file.py:function"). The function gets ``workload.config`` (a mapping) and
``workload.args`` (a list of strings) and returns a :class:`Workload`. The built-in
models come in by the same door. Written by the user, read by the trainers.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from mainstay_core.base.bounds import MAX_STATISTICS
from mainstay_core.base.errors import InvalidSpecError, MainstayError
from mainstay_core.base.shape import Cut
from mainstay_core.job import protections
from mainstay_core.job.stages import cut_blocks
from mainstay_train.base.decorator import Loop
from mainstay_train.comm.mesh import SINGLE, InnerMesh
from mainstay_train.exact import layout
from mainstay_train.exact import optimizer as optimizers
from mainstay_train.model import losses, split, units
from mainstay_train.model.blocks import Block, BlockSpec, built
from mainstay_train.model.data import Dataset

DEFAULT_ENTRYPOINT = "mainstay_train.models.llama:workload"

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Compute types; masters, gradients and sums are fp32 in any case."""

USER_ERRORS = (
    ValueError,
    TypeError,
    NameError,
    AttributeError,
    LookupError,
    ArithmeticError,
    AssertionError,
)
"""What a mistake in the user's code or configuration raises. Anything else is a crash, which
restarts: a device error or lack of memory may be gone on other hardware.
"""


class WorkloadError(MainstayError):
    """The user's code failed, as it would on any rank: the job fails with this reason."""


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """Tell mistakes in the user's code, called inside, from bugs of ours.

    Raises:
        WorkloadError: one of :data:`USER_ERRORS` was raised inside; names ``what``.
            WorkloadError and InvalidSpecError are passed on as they are.
    """
    try:
        yield
    except (InvalidSpecError, WorkloadError):
        raise
    except USER_ERRORS as error:
        raise WorkloadError(f"{what}: {type(error).__name__}: {error}") from error


Entrypoint = Callable[[Mapping[str, Any], Sequence[str]], "Workload"]


Kernels = Callable[[torch.device], Mapping[str, str]]
"""(device) -> entries of the fingerprint, e.g. {"attention": "flash"}. It raises InvalidSpecError
where the device has no such kernel, or none whose bits are the same each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One contract for built-in and user models.

    Raises:
        InvalidSpecError: The blocks cannot form a pipeline.
    """

    blocks: tuple[BlockSpec, ...]
    """In model order, at least two. The first takes tokens, the last has the loss."""
    dataset: Dataset
    activation_shape: tuple[int, ...]
    """Of the tensor between any two blocks, a micro-batch's: [micro_batch_size, ...]."""
    learning_rate: optimizers.Schedule
    """Learning rate by step."""
    dtype: torch.dtype = torch.float32
    """Of activations and compute parameters."""
    optimizer: optimizers.OptimizerFactory = field(default_factory=optimizers.adamw)
    clip_norm: float | None = 1.0
    """Bound on the global norm of the mean gradient per token; None does not clip."""
    load_ahead: bool = True
    """Whether a thread of its own calls ``dataset.batch``, one micro-batch ahead. False: the main
    thread does, when the micro-batch begins; for a data set that is bound to the thread in which
    the entrypoint ran."""
    kernels: Kernels | None = None
    """Which kernels the blocks compute with, where they can choose."""

    def __post_init__(self) -> None:
        if len(self.blocks) < 2:
            raise InvalidSpecError(
                "workload", f"has {len(self.blocks)} block, needs an input and an output block"
            )
        names = [spec.name for spec in self.blocks]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise InvalidSpecError("workload", f"block names must be unique, {twice} are not")
        early = [spec.name for spec in self.blocks[:-1] if spec.is_last]
        if early or not self.blocks[-1].is_last:
            raise InvalidSpecError("workload", "the last block, and only it, must have a loss")
        if self.blocks[-1].loss is not None and self.blocks[-1].module_loss is not None:
            raise InvalidSpecError("workload", "has a last block with both loss and module_loss")
        counted = sum(len(spec.statistics) for spec in self.blocks)
        if counted > MAX_STATISTICS:
            raise InvalidSpecError(
                "workload", f"has blocks that count {counted} integers, at most {MAX_STATISTICS}"
            )
        if self.dtype not in DTYPES.values():
            raise InvalidSpecError("workload", f"dtype must be one of {sorted(DTYPES)}")

    def layouts(self) -> tuple[layout.BlockLayout, ...]:
        """Every block's flat layout, of shapes alone: allocates nothing."""
        with torch.device("meta"):
            return tuple(
                layout.BlockLayout.of_module(spec.name, spec.build()) for spec in self.blocks
            )

    def costs(self) -> list[float]:
        """Relative cost of each block, in model order."""
        return [
            float(flat.num_parameters) if spec.cost is None else spec.cost
            for spec, flat in zip(self.blocks, self.layouts(), strict=True)
        ]

    def stages(self, stages: int, cut: Cut = Cut.BALANCED) -> list[range]:
        """Block indices of each stage, the same on every rank.

        Args:
            stages: number of stages.
            cut: the rule by which the model is cut.

        Raises:
            InvalidSpecError: There are more stages than blocks.
        """
        try:
            return cut_blocks(self.costs(), stages, cut)
        except ValueError as error:
            raise InvalidSpecError("parallelism.stages", str(error)) from error

    def statistics(self, blocks: Iterable[int]) -> tuple[slice, ...]:
        """Where the statistics of some blocks lie in those of a commit: blocks in model order.

        Args:
            blocks: their indices.
        """
        ends = [*accumulate((len(spec.statistics) for spec in self.blocks), initial=0)]
        return tuple(slice(ends[i], ends[i + 1]) for i in blocks)

    def popularity(self, statistics: Sequence[int]) -> dict[str, int]:
        """How many tokens of a step each unit had whose tokens are counted, by the unit's name.

        Args:
            statistics: of the step's commit.
        """
        found: dict[str, int] = {}
        wheres = self.statistics(range(len(self.blocks)))
        for spec, where in zip(self.blocks, wheres, strict=True):
            counts = statistics[where]
            found |= units.popularity(spec.name, spec.units, spec.statistics, counts)
        return found

    def build(
        self,
        blocks: Iterable[int],
        device: str | torch.device = "cpu",
        inner: InnerMesh = SINGLE,
        *,
        compiles: bool = False,
    ) -> list[Block]:
        """Make some of the blocks on ``device``, their parameters zero until initialised.

        Args:
            blocks: their indices.
            device: where they compute.
            inner: the ranks of the stage.
            compiles: whether they run as compiled code.
        """
        return [
            Block(self.blocks[i], device=device, dtype=self.dtype, inner=inner, compiles=compiles)
            for i in blocks
        ]

    def inner_fingerprint(self, inner: InnerMesh) -> dict[str, str]:
        """Entries for the numerics fingerprint: how the blocks lie on the inner mesh.

        Raises:
            InvalidSpecError: there is an inner mesh, and no block uses it.
        """
        if inner.size == 1:
            return {}
        if all(spec.parallelize is None for spec in self.blocks):
            raise InvalidSpecError(
                "spec.parallelism.ranksPerStage",
                f"is {inner.size}, but no block of the workload has a `parallelize`; use 1",
            )
        placed = hashlib.blake2b(digest_size=8)
        with torch.device("meta"):
            for spec in self.blocks:
                module = built(spec, inner)
                in_parts = split.parameters_in_parts(module)
                for name, parameter in module.named_parameters():
                    placements = getattr(parameter, "placements", "copy")
                    how = " in parts" if id(parameter) in in_parts else ""
                    placed.update(
                        f"{spec.name}.{name}{tuple(parameter.shape)}{placements}{how}".encode()
                    )
        return {"inner": f"{inner.size} ranks, {placed.hexdigest()}"}

    def fingerprint(self, device: torch.device) -> dict[str, str]:
        """Entries for the numerics fingerprint: what the user brings and bits depend on.

        Args:
            device: where the blocks compute.

        Raises:
            InvalidSpecError: see :data:`Kernels`.
        """
        shapes = hashlib.blake2b(digest_size=8)
        for flat in self.layouts():
            for param in flat.params:
                shapes.update(f"{param.name}{param.shape}".encode())
        return {
            "model": shapes.hexdigest(),
            "data": self.dataset.fingerprint(),
            "loss": f"in chunks of {losses.CHUNK_ELEMENTS} logits",
            "weight_gradients": f"fp32, widened by {split.WIDENED_ELEMENTS} elements",
            **(self.kernels(device) if self.kernels is not None else {}),
        }

    def identify(self, device: torch.device, inner: InnerMesh, backend: str) -> dict[str, str]:
        """Return all entries of the fingerprint that are not of the machine.

        Those of compiled code are left out.

        Args:
            device: where the blocks compute.
            inner: the ranks of a stage.
            backend: over which cells reduce.

        Raises:
            InvalidSpecError: no block uses the inner mesh, or see :data:`Kernels`.
        """
        return {
            **self.inner_fingerprint(inner),
            **self.fingerprint(device),
            protections.ENTRY_KEY: protections.BLOCKS,
            "reduction": f"canonical/{backend}",
        }


def load(
    entrypoint: str, config: Mapping[str, Any] | None = None, args: Sequence[str] = ()
) -> Workload:
    """Call the entrypoint of a workload of blocks.

    Args:
        entrypoint: "module:function" or "path/to/file.py:function"; "" is the built-in Llama.
        config: ``workload.config``.
        args: ``workload.args``.

    Raises:
        InvalidSpecError: No such module or function, a refused configuration, or a
            result that is no Workload; says what would be right.
    """
    entrypoint = entrypoint or DEFAULT_ENTRYPOINT
    function = find(entrypoint)
    if isinstance(function, Loop):
        raise InvalidSpecError(
            "workload.entrypoint", f"{entrypoint!r} is an own loop, not a workload of blocks"
        )
    return call(entrypoint, function, config or {}, args)


def call(
    entrypoint: str, function: Entrypoint, config: Mapping[str, Any], args: Sequence[str]
) -> Workload:
    """Call what :func:`find` has found.

    Raises:
        InvalidSpecError: It takes or returns something else, or refuses its configuration.
    """
    _require_parameters(entrypoint, function)
    result = function(dict(config), list(args))
    if not isinstance(result, Workload):
        raise InvalidSpecError(
            "workload.entrypoint",
            f"{entrypoint!r} must return a mainstay_train.workload.Workload, "
            f"it returned {type(result).__name__}",
        )
    return result


def refuse_unknown(config: Mapping[str, Any], known: Iterable[str], path: str) -> None:
    """Refuse keys of ``config`` that are not ``known``, naming the valid ones.

    Raises:
        InvalidSpecError: There is such a key.
    """
    valid = sorted(known)
    for key in config:
        if key not in valid:
            near = difflib.get_close_matches(str(key), valid, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InvalidSpecError(f"{path}.{key}", f"is unknown{hint} (valid: {', '.join(valid)})")


def find(entrypoint: str) -> Entrypoint | Loop[Any]:
    """The function that an entrypoint names: of a workload, or a loop marked as such.

    Raises:
        InvalidSpecError: No such module or function; says what would be right.
    """
    entrypoint = entrypoint or DEFAULT_ENTRYPOINT
    module_name, _, function_name = entrypoint.rpartition(":")
    if not module_name or not function_name:
        raise InvalidSpecError(
            "workload.entrypoint", f'must be "module:function", got {entrypoint!r}'
        )
    module = _module(module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        public = sorted(
            name
            for name, value in vars(module).items()
            if callable(value)
            and not name.startswith("_")
            and getattr(value, "__module__", None) == module.__name__
        )
        raise InvalidSpecError(
            "workload.entrypoint",
            f"{module_name!r} has no function {function_name!r} (it has: {', '.join(public)})",
        )
    return function  # type: ignore[no-any-return]


def _require_parameters(entrypoint: str, function: Entrypoint) -> None:
    try:
        inspect.signature(function).bind({}, [])
    except TypeError as error:
        raise InvalidSpecError(
            "workload.entrypoint",
            f"{entrypoint!r} must take (config, args): {error}; or, if it is a training loop of "
            "your own that takes a session, mark it with @mainstay_train.loop",
        ) from error
    except ValueError:  # written in C: it has no signature to look at
        pass


def _module(name: str) -> ModuleType:
    if name.endswith(".py"):
        return _module_of_file(Path(name))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # The module itself is missing, or something that it imports: not the same mistake.
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            message = f"no module {name!r} on this Python's path"
        else:
            message = f"module {name!r} needs {error.name!r}, which is not installed"
        raise InvalidSpecError("workload.entrypoint", message) from error


def _module_of_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InvalidSpecError("workload.entrypoint", f"no file {str(path)!r}")
    name = f"mainstay_workload_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up by name
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        del sys.modules[name]
        raise InvalidSpecError(
            "workload.entrypoint", f"{str(path)!r} needs {error.name!r}, which is not installed"
        ) from error
    return module
