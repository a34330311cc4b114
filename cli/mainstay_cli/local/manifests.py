"""Reads a job's YAML and a faults file; every mistake becomes one message with the file's name."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import yaml

from mainstay_cli.base.exits import UsageError
from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.faults import files
from mainstay_core.faults.points import FaultPoint
from mainstay_core.job import spec

NUMBER_TAG = "tag:mainstay.dev,2026:number"
"""Of the forms of numbers that kubectl knows and PyYAML does not: 1e-3, 1.5e3, -.5."""
_FLOAT_TAG = "tag:yaml.org,2002:float"
_NUMBER = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$|[-+]\.[0-9]+$",
)
_MAX_INTEGER = 2**63
"""Integers of kubectl's JSON are of 64 bits."""


class _StrictLoader(yaml.SafeLoader):
    """A YAML loader that refuses a key that is given twice, and reads 1e-3 as kubectl does."""


class _Dumper(yaml.SafeDumper):
    """A YAML dumper that puts a text such as '1e-3' in quotes, as the loader takes it for one."""


def _mapping_without_duplicates(loader: _StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if key in keys:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {key!r} is given twice", key_node.start_mark
            )
        keys.add(key)
    return loader.construct_mapping(node, deep=True)


def _number(loader: _StrictLoader, node: yaml.ScalarNode) -> int | float | str:
    """Return a number with a point or an exponent as kubectl's JSON has it.

    A whole one is an integer. One that no float can hold stays the text that it is.
    """
    number = float(loader.construct_yaml_float(node))
    if math.isinf(number) and "inf" not in node.value.lower():
        return str(node.value)
    if not number.is_integer():
        return number
    # Of the shortest text that means this float, as JSON has it, not of all its binary digits.
    whole = int(Decimal(repr(number)))
    return whole if -_MAX_INTEGER <= whole < _MAX_INTEGER else number


_StrictLoader.add_constructor(
    yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping_without_duplicates
)
# PyYAML reads 1e-3 and 1.5e3 as texts, kubectl as numbers: a file must mean the same to both.
for _reader_or_writer in (_StrictLoader, _Dumper):
    _reader_or_writer.add_implicit_resolver(NUMBER_TAG, _NUMBER, list("-+.0123456789"))
for _tag in (NUMBER_TAG, _FLOAT_TAG):
    _StrictLoader.add_constructor(_tag, _number)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFile:
    """A job's file, read and checked."""

    path: Path
    manifest: dict[str, Any]
    """As the user wrote it, with the name possibly replaced."""
    job: spec.TrainingJob


def load_yaml(path: Path) -> Any:
    """Return the data of a YAML file.

    Raises:
        UsageError: the file cannot be read or is no YAML.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: is not a text file (UTF-8)") from error
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise UsageError(f"{where}: not valid YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, TypeError, ValueError) as error:
        raise UsageError(f"{path}: not valid YAML: {error}") from error


def dump_yaml(data: Any) -> str:
    """Return data as YAML that :func:`load_yaml` reads as the same data."""
    return str(yaml.dump(data, Dumper=_Dumper, sort_keys=False))


def load_job(path: Path, name: str | None = None) -> JobFile:
    """Return the job of a file.

    Args:
        path: a TrainingJob in YAML.
        name: replaces ``metadata.name``.

    Raises:
        UsageError: the file or the job cannot be used.
    """
    manifest = load_yaml(path)
    metadata = manifest.get("metadata") or {} if isinstance(manifest, dict) else None
    if name is not None and isinstance(metadata, dict):
        manifest = manifest | {"metadata": metadata | {"name": name}}
    try:
        job = spec.parse_training_job(manifest)
        entrypoint = _absolute_entrypoint(path, job.spec.workload.entrypoint)
        if entrypoint != job.spec.workload.entrypoint:
            workload = manifest["spec"]["workload"] | {"entrypoint": entrypoint}
            manifest = manifest | {"spec": manifest["spec"] | {"workload": workload}}
            job = spec.parse_training_job(manifest)
        _check_local(job)
        if _shares_devices(job) and job.spec.runtime.backend == "Auto":
            # A trainer would choose by what its own pod has, and see all devices of the machine.
            runtime = (manifest["spec"].get("runtime") or {}) | {"backend": "Gloo"}
            manifest = manifest | {"spec": manifest["spec"] | {"runtime": runtime}}
            job = spec.parse_training_job(manifest)
    except InvalidSpecError as error:
        raise UsageError(f"{path}: {error}") from error
    return JobFile(path=path, manifest=manifest, job=job)


def _shares_devices(job: spec.TrainingJob) -> bool:
    """Return whether ranks may share a device: the first slots of all pods have the same one."""
    return job.spec.runtime.device != "CPU" and job.num_pods > 1


def _check_local(job: spec.TrainingJob) -> None:
    """Refuse what only a cluster brings about and a local run would miss, and a bad beginning.

    What concerns the cluster alone is left alone, as nothing is missing without it: template,
    managedBy, priorityClassName, ttlSecondsAfterFinished, topology keys, the budget of repairs,
    quarantine.
    """
    job.check_beginning()
    if job.spec.active_deadline_seconds is not None:
        raise InvalidSpecError(
            "spec.activeDeadlineSeconds",
            "is kept by a cluster's operator; a local run ends with its steps or when it is "
            "stopped: remove it",
        )
    if job.spec.suspend:
        raise InvalidSpecError(
            "spec.suspend",
            "is true: there is nothing to run; set it to false, or remove it",
        )
    if job.spec.runtime.backend == "NCCL" and _shares_devices(job):
        raise InvalidSpecError(
            "spec.runtime.backend",
            f"is NCCL, which takes one rank on each GPU; the {job.num_pods} pods of a local run "
            "(spares included) share this machine's GPUs: use Gloo or Auto, or one pod with all "
            "ranks (parallelism.ranksPerPod)",
        )


def search_path(job_file: Path) -> tuple[Path, ...]:
    """Return where a job's code is looked for first: beside its file, then here."""
    return tuple(dict.fromkeys((job_file.absolute().parent, Path.cwd())))


def _absolute_entrypoint(job_file: Path, entrypoint: str) -> str:
    """Return a ``file.py:function`` with its file's absolute path; a module's stays as it is."""
    file, _, function = entrypoint.rpartition(":")
    if not file.endswith(".py"):
        return entrypoint
    places = search_path(job_file)
    for place in places:
        if (place / file).is_file():
            return f"{place / file}:{function}"
    searched = " or ".join(str(place) for place in places)
    raise UsageError(f"{job_file}: spec.workload.entrypoint: there is no {file} in {searched}")


def load_faults(path: Path, job: spec.TrainingJob) -> tuple[FaultPoint, ...]:
    """Return the faults of a file, checked against the job.

    Raises:
        UsageError: the file cannot be used.
    """
    try:
        return files.parse_faults(
            load_yaml(path),
            job.shape,
            job.spec.spares.replicas,
            has_snapshots=job.spec.snapshots.enabled,
        )
    except InvalidSpecError as error:
        raise UsageError(f"{path}: {error}") from error
