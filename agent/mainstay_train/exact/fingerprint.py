"""The numerics fingerprint: what must be equal for bits to be equal (design.md 1, rule 6).

Fixed at a job's first step. A rank whose fingerprint differs is refused, with
the differing entries named, since it would compute other bits and every check
against the ledger would call it a fault.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping

import torch

from mainstay_train.base import environment
from mainstay_train.exact import layout
from mainstay_train.sums import norms


def fingerprint(
    device: str | torch.device, *, dtype: torch.dtype, extra: Mapping[str, str] | None = None
) -> dict[str, str]:
    """What this process's arithmetic depends on, as sorted text entries.

    Call it after :func:`numerics.setup`, whose settings it reads back.

    Args:
        device: Where the rank computes.
        dtype: Compute type of the workload.
        extra: Further entries, e.g. the data set's fingerprint or the inner layout.
    """
    entries = {
        "torch": torch.__version__,
        "dtype": str(dtype).removeprefix("torch."),
        "chunk_elements": str(layout.CHUNK),
        "pad_elements": str(layout.PAD),
        "norm": f"fp64, rows of {norms.COLUMNS}, then halves",
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "compile": "eager",
    }
    chosen = torch.device(device)
    entries |= _cuda_entries(chosen) if chosen.type == "cuda" else _cpu_entries()
    for name in environment.DETERMINISM:
        entries[f"env.{name}"] = os.environ.get(name, "")
    return dict(sorted((entries | dict(extra or {})).items()))


def digest_of(entries: Mapping[str, str]) -> str:
    """Return a short text that differs where fingerprints do."""
    told = json.dumps(dict(entries), sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()[:32]


def differences(expected: Mapping[str, str], found: Mapping[str, str]) -> tuple[str, ...]:
    """One sentence per entry that differs, sorted by name; empty when equal."""
    names = sorted(expected.keys() | found.keys())
    return tuple(
        f"{name} is {found.get(name, 'absent')!r}, the job's is {expected.get(name, 'absent')!r}"
        for name in names
        if expected.get(name) != found.get(name)
    )


def _cpu_entries() -> dict[str, str]:
    return {
        "device": f"cpu {_cpu_model()}",
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "mkl": str(torch.backends.mkl.is_available()),  # type: ignore[no-untyped-call]
        "onednn": str(torch.backends.mkldnn.is_available()),  # type: ignore[no-untyped-call]
    }


def _cuda_entries(device: torch.device) -> dict[str, str]:
    major, minor = torch.cuda.get_device_capability(device)
    return {
        "device": f"cuda {torch.cuda.get_device_name(device)}",
        "capability": f"{major}.{minor}",
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
        "tf32": str(torch.backends.cuda.matmul.allow_tf32),
    }


def _cpu_model() -> str:
    """Vendor, family and model: kernels are chosen by them, not by the marketing name alone."""
    wanted = {"vendor_id": "", "cpu family": "", "model": "", "model name": ""}
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                key, _, value = line.partition(":")
                if key.strip() in wanted and not wanted[key.strip()]:
                    wanted[key.strip()] = value.strip()
    except OSError:
        return f"{platform.machine()} {platform.processor()}".strip()
    found = " ".join(value for value in wanted.values() if value)
    return f"{platform.machine()} {found}".strip()
