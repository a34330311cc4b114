"""A played accelerator: tensors that compute on the CPU, and a count of how often the host waits.

Its device is called "meta", a name that torch knows and nobody computes on. A tensor there wraps
one in host memory. What an accelerator's host would wait for is counted: looks at values, copies to
host memory, copies from it that do not go behind the host's back, and waits for a moment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

from mainstay_train.base import device as devices
from mainstay_train.base.device import Moment

DEVICE = torch.device("meta")
MOMENT = "a moment"
"""Of :attr:`PlayedDevice.waits`: the product waits until the device has come to a moment."""

_LOOKS = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "is_nonzero", "_unique2"}
"""What an accelerator's host has to wait for, beside copies: a value, or a size that depends on
values."""


class _There(torch.Tensor):
    """A tensor of the played device."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> _There:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )
        made.held = held
        return made  # type: ignore[no-any-return]

    def __init__(self, held: torch.Tensor) -> None: ...

    def __repr__(self, **_: Any) -> str:
        return f"there({self.held})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} of a played device, outside of it")


class _Moment:
    """A moment of the played device, which has done its work when the host goes on."""

    def __init__(self, waits: list[str]) -> None:
        self._waits = waits

    def is_over(self) -> bool:
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        del timeout_s
        self._waits.append(MOMENT)


class PlayedDevice(TorchDispatchMode):
    """Computes on the played device, in this thread, while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        """What the host has waited for."""
        self._moment = devices.moment

    def __enter__(self) -> Self:
        of_others = self._moment = devices.moment

        def moment(device: torch.device) -> Moment:
            return _Moment(self.waits) if device == DEVICE else of_others(device)

        devices.moment = moment  # the product asks there for all moments
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        devices.moment = self._moment
        super().__exit__(*raised)

    def waited(self, do: Callable[[], Any]) -> list[str]:
        """What the host waits for in ``do``."""
        before = len(self.waits)
        do()
        return self.waits[before:]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if _is_there(leaf)]
        target = kwargs.get("device")
        if not given and target != DEVICE:
            return func(*args, **kwargs)
        comes_from_host = not given or (name == "copy_" and not _is_there(args[1]))
        goes_to_host = target is not None and target != DEVICE
        goes_to_host |= name == "copy_" and not _is_there(args[0])
        self._note(name, args, kwargs, comes_from_host, goes_to_host)
        if target == DEVICE:
            kwargs["device"] = torch.device("cpu")
            kwargs.pop("pin_memory", None)
        held_args, held_kwargs = pytree.tree_map(
            lambda leaf: leaf.held if _is_there(leaf) else leaf, (args, kwargs)
        )
        out = func(*held_args, **held_kwargs)
        if name == "_to_copy" and comes_from_host and out is args[0]:
            out = out.clone()
        if goes_to_host:
            return args[0] if name == "copy_" else out
        wrapped = pytree.tree_map(
            lambda leaf: _There(leaf) if isinstance(leaf, torch.Tensor) else leaf, out
        )
        if not given:
            return wrapped
        return return_and_correct_aliasing(func, args, kwargs, wrapped)

    def _note(
        self, name: str, args: Any, kwargs: Any, comes_from_host: bool, goes_to_host: bool
    ) -> None:
        by_mask = name.startswith("index") and any(
            _is_there(leaf) and leaf.dtype == torch.bool for leaf in pytree.tree_leaves(args[1:2])
        )
        if name in _LOOKS or by_mask:
            self.waits.append(name)
        elif goes_to_host:
            self.waits.append(f"{name} to the host")
        elif comes_from_host and name in ("copy_", "_to_copy"):
            behind = kwargs.get("non_blocking") or (name == "copy_" and any(args[2:]))
            if not behind:
                self.waits.append(f"{name} from the host")


def _is_there(value: object) -> bool:
    return isinstance(value, _There)
