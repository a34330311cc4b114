"""Sets torch up so that all ranks of a job compute with the same arithmetic.

Equal bits need equal kernels, cut at equal places, in an equal order (design rule
6). So: one thread on CPU, deterministic algorithms on CUDA, no TF32, no
reduced-precision accumulation, no flushing of denormals, and no compiled code whose
choices depend on timing. ``fingerprint`` writes these settings down; a rank with others is refused.
"""

from __future__ import annotations

import contextlib

import torch

from mainstay_train.base import environment

NUM_THREADS = 1
"""CPU threads of a rank. A property of the job's bits: part of the fingerprint."""


def setup(device: str | torch.device = "cpu") -> torch.device:
    """Fix this process's arithmetic for work on ``device``.

    Call it once in each trainer before the first kernel, after
    :func:`environment.prepare` has run before the import of torch.

    Args:
        device: "cpu", "cuda" or "cuda:i".

    Returns:
        The device, with its index where it has one.

    Raises:
        ValueError: The device is of an unsupported type or absent.
    """
    environment.prepare()  # what libraries read only at their first call still takes effect
    torch.set_num_threads(NUM_THREADS)
    with contextlib.suppress(RuntimeError):  # inter-op work has begun: it does not reduce
        torch.set_num_interop_threads(1)
    # As torch.use_deterministic_algorithms(True), which would import torch's compiler as well.
    torch.set_deterministic_debug_mode("error")
    # Deterministic mode would fill every fresh buffer with NaN; ours are written before read.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.set_flush_denormal(False)
    torch.set_float32_matmul_precision("highest")
    torch.set_default_dtype(torch.float32)
    chosen = torch.device(device)
    if chosen.type == "cuda":
        return _setup_cuda(chosen)
    if chosen.type != "cpu":
        raise ValueError(f"device must be cpu or cuda, not {chosen.type!r}")
    return chosen


def _setup_cuda(device: torch.device) -> torch.device:
    if not torch.cuda.is_available():
        raise ValueError("device is cuda but torch finds no CUDA device here")
    index: int | None = device.index
    device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
    if device.index >= torch.cuda.device_count():
        raise ValueError(f"device {device} is absent: there are {torch.cuda.device_count()}")
    torch.cuda.set_device(device)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = False  # would choose kernels by timing
    torch.backends.cudnn.deterministic = True
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    return device
