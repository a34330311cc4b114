"""Environment variables that fix the arithmetic, set before torch is imported.

Apart from ``numerics`` because that module imports torch, and most of these are
read while torch and its libraries load. The launcher calls :func:`prepare` first
of all; a user's own loop does so before its ``import torch``.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

DETERMINISM = {
    # cuBLAS picks its algorithm by workspace; with this it keeps to reproducible ones
    # (CUDA documentation, cuBLAS, "Results reproducibility").
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # MKL: the same code path in every run on one processor (Intel oneMKL developer guide,
    # "Conditional numerical reproducibility"). Our operands are 64-byte aligned as it asks.
    "MKL_CBWR": "AUTO",
    # The number of threads decides where a reduction is cut.
    "MKL_DYNAMIC": "FALSE",
    "OMP_DYNAMIC": "FALSE",
}
"""Variables that change bits; their values belong to the fingerprint."""

THREADS = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
"""One thread per rank on CPU: ranks share the cores, and cuts stay where they are."""

COMPILER = {
    # What torch.use_deterministic_algorithms would set too, by importing the compiler: seconds.
    "TORCHINDUCTOR_DETERMINISTIC": "1",
}
"""Of torch's compiler, with ``runtime.compile`` or where a user's model calls it."""


FORKS = {
    # torch.cuda.is_available() would start the driver, in whatever a user imports. A launcher is
    # forked: none of its trainers could use a device then. So devices are counted by NVML.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
"""What lets a process find devices that only its children use."""


def prepare(environ: MutableMapping[str, str] | None = None) -> None:
    """Set every variable above, unless the user has set it.

    Args:
        environ: The environment to change; this process's own by default.
    """
    target = os.environ if environ is None else environ
    for name, value in (DETERMINISM | THREADS | COMPILER | FORKS).items():
        target.setdefault(name, value)
