"""What runs in the trainer's image: blocks, exact reduction, optimizer, launcher.

Everything here is public: our own trainer uses nothing else than a user can.
Importing this package does not import torch; its modules do.

The bits of a training run are a function of the job alone (design.md section 1),
never of the number of replicas or stages. Where that is decided:

- ``environment``, ``numerics``, ``fingerprint``: equal arithmetic, or a refusal
- ``draws``, ``initialization``, ``data``: random numbers and samples by address
- ``blocks``, ``split``: forward and backward over explicit tensors
- ``layout``: the flat buffers and the chunk grid on which reductions run
- ``optimizer``: gradient norm, clipping, apply
- ``digests``: how two states are compared
- ``workload``, ``models``: what the user brings as blocks, and a Llama built in
- ``own_loop``: a training loop of the user's own, on a plain module

Names for a training loop of one's own (docs/own-loop.md):

- ``loop``: the decorator that marks the entrypoint, a function of a session
- ``LoopSession``: what it gets: ``register(model, ...)``, ``steps()``, ``config``, ``device``
- ``Step``: ``work()``, ``commit()``, ``number``
- ``Work``: ``inputs``, ``targets``, ``generator()``, ``sample_ids()``, ``done(loss, tokens)``
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mainstay_train.base.decorator import loop

if TYPE_CHECKING:
    from mainstay_train.session.loop import LoopSession, Step, Work

__all__ = ["loop", "LoopSession", "Step", "Work"]


def __getattr__(name: str) -> object:
    """Import what needs torch only when it is asked for."""
    if name in __all__:
        from mainstay_train.session import loop as session_loop

        return getattr(session_loop, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
