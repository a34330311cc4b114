"""Compiles blocks with torch's compiler, where ``runtime.compile`` is Blocks.

A block's module is compiled as a whole; its loss is not, and neither are modules that compute
their weight gradients by themselves in a way that a compiler cannot follow. Shapes are fixed: each
has code of its own, so that the code of a micro-batch does not depend on which shapes came before
it. torch gives up compiling what it has compiled too often and runs it uncompiled, which would
depend on that too: here there is no such limit.

Nothing here imports the compiler before a block is compiled: it takes seconds.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import metadata
from typing import Any

import torch
from torch import nn

from mainstay_core.base.errors import InvalidSpecError, brief
from mainstay_train.exact.draws import Address
from mainstay_train.model import split

OFF, BLOCKS = "off", "blocks"
"""Values of ``runtime.compile``."""
PATH = "spec.runtime.compile"
BACKEND = "inductor"
MAX_VARIANTS = 1 << 20
"""Times that a function is compiled: blocks that differ times shapes, so no bound in practice."""


def compiled(module: nn.Module) -> Any:
    """Return what computes as ``module`` does, by compiled code; made at the first call."""
    _set_up()
    for inside in module.modules():
        if isinstance(inside, split.SplitModule) and not inside.compiles:
            inside.forward = _left_alone(inside.forward)
    if isinstance(module, split.SplitModule) and not module.compiles:
        return module
    return torch.compile(module, backend=BACKEND, dynamic=False)


def untraced(address: Address) -> Address:
    """Return an address whose draws the compiler leaves alone.

    It would take the numbers of an address for constants, and compile for each micro-batch.
    """
    kind = _untraced_address()
    return kind(address.seed, address.step, address.type, address.micro_batch)


def describe(device: torch.device) -> str:
    """Return what compiles for a device, as an entry of the fingerprint.

    Raises:
        InvalidSpecError: what is needed for that is not here.
    """
    _set_up()
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            raise InvalidSpecError(
                PATH, "is Blocks, which needs Triton on a GPU, and this torch has none; use Off"
            )
        return f"{BACKEND} by block, triton {metadata.version('triton')}"
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        compiler = cpp_builder.get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise InvalidSpecError(
            PATH,
            "is Blocks, which needs a C++ compiler on a CPU, and none is found where the trainers "
            "run; install g++ there (or name one by the variable CXX), or use Off",
        ) from error
    version = cpp_builder.get_compiler_version_info(compiler).strip().splitlines()[-1:]
    return f"{BACKEND} by block, {' '.join((compiler, *version))}"


def check_loop(compile_mode: str, entrypoint: str) -> None:
    """Refuse to compile for a training loop of the user's own.

    Raises:
        InvalidSpecError: ``compile_mode`` is not off.
    """
    if compile_mode != OFF:
        raise InvalidSpecError(
            PATH,
            f"is Blocks, but {entrypoint} is a training loop of its own, which has no blocks and "
            "may compile its model itself; use Off",
        )


def is_refusal(error: BaseException) -> bool:
    """Whether an error says that torch's compiler cannot compile something."""
    rooms = ("torch._dynamo", "torch._inductor", "torch._functorch")
    return any(kind.__module__.startswith(rooms) for kind in type(error).__mro__)


def refused(block: str, error: BaseException) -> InvalidSpecError:
    """Return what to say of a block that torch's compiler cannot compile."""
    return InvalidSpecError(
        PATH, f"is Blocks, but block {block!r} cannot be compiled here ({brief(error)}); use Off"
    )


@lru_cache(maxsize=1)
def _set_up() -> None:
    """Fix the compiler's choices in this process."""
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor

    fixed: dict[Any, dict[str, Any]] = {
        dynamo: {
            "recompile_limit": MAX_VARIANTS,
            "accumulated_recompile_limit": MAX_VARIANTS,
            "fail_on_recompile_limit_hit": True,
        },
        # Threads that compile would be processes, started beside those of this one.
        inductor: {"deterministic": True, "compile_threads": 1},
    }
    for config, values in fixed.items():
        for name, value in values.items():
            setattr(config, name, value)


def _left_alone(function: Any) -> Any:
    """Return a function that the compiler calls and does not look into."""
    disable: Any = torch.compiler.disable
    return disable(function)


@lru_cache(maxsize=1)
def _untraced_address() -> type[Address]:
    class Untraced(Address):
        __slots__ = ()
        hash64 = _left_alone(Address.hash64)
        generator = _left_alone(Address.generator)
        uniform = _left_alone(Address.uniform)

    return Untraced
