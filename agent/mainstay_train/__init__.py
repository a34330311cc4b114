"""Trains in the user's image: blocks, exact reduction, optimizer, checkpoints, launcher.

A user imports this package and never a room of it: ``from mainstay_train import data`` and
``from mainstay_train.data import Dataset`` name the same module. Importing the package does not
import torch; its names do, when they are first asked for. Our own trainer uses nothing that a
user cannot use.

For a model that is brought as blocks (``workload.entrypoint`` returns a ``Workload``):

- ``workload``: what an entrypoint returns
- ``blocks``: pieces of a model between which only explicit tensors pass
- ``losses``: losses that never hold all logits in fp32
- ``split``: modules whose backward computes input and weight gradients apart
- ``data``: samples by address, from folders of text files
- ``draws``: random numbers by address
- ``optimizer``: optimizers that run on the fixed grid of chunks

For a training loop of one's own (docs/own-loop.md):

- ``loop``: the decorator that marks the entrypoint, a function of a session
- ``LoopSession``: what it gets: ``register(model, ...)``, ``steps()``, ``config``, ``device``
- ``Step``: ``work()``, ``commit()``, ``number``
- ``Work``: ``inputs``, ``targets``, ``generator()``, ``sample_ids()``, ``done(loss, tokens)``

Rooms, each importing only those below it (docs/architecture.md):

- ``launcher``: starts trainers
- ``session``: runs one rank
- ``state``: copies state to peers and to disk
- ``compute``: computes the steps of one stage
- ``models``: builds the models that come with Mainstay
- ``model``: describes what a user brings
- ``exact``: computes everything that the bits depend on
- ``comm``: connects ranks
- ``base``: settings, sockets, threads, errors of a trainer's process
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mainstay_train.base.decorator import loop

if TYPE_CHECKING:
    from mainstay_train.exact import draws, optimizer
    from mainstay_train.model import blocks, data, losses, split, workload
    from mainstay_train.session.loop import LoopSession, Step, Work

__all__ = [
    "loop",
    "LoopSession",
    "Step",
    "Work",
    "blocks",
    "data",
    "draws",
    "losses",
    "optimizer",
    "split",
    "workload",
]

_MODULES = {
    "blocks": "model",
    "data": "model",
    "draws": "exact",
    "losses": "model",
    "optimizer": "exact",
    "split": "model",
    "workload": "model",
}
"""Public module to the room that it is in."""


class _PublicModules(MetaPathFinder, Loader):
    """Imports the public modules by their public paths: users write ``mainstay_train.data``.

    The rooms are ours to change, these paths are not. An entry of ``sys.modules`` for each would
    do, but it takes the module itself, and so torch, when the package is imported.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to import a public module; None for any other."""
        del path, target
        package, _, module = name.rpartition(".")
        is_ours = package == __name__ and module in _MODULES
        return ModuleSpec(name, self) if is_ours else None

    def exec_module(self, module: ModuleType) -> None:
        """Have the module of the room stand under the public path, so that there is one of it."""
        sys.modules[module.__name__] = __getattr__(module.__name__.rpartition(".")[2])


sys.meta_path.append(_PublicModules())


def __getattr__(name: str) -> Any:
    """Import what needs torch only when it is asked for."""
    if name in _MODULES:
        return importlib.import_module(f"mainstay_train.{_MODULES[name]}.{name}")
    if name in __all__:
        return getattr(importlib.import_module("mainstay_train.session.loop"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
