"""Describes what the theory must know of a job: its model, state types, shape and speed.

The profiles of the MoEvement paper's models are in :mod:`mainstay_core.theory.paper_jobs`. One of
your own is a JSON file, read by :func:`read_profile`; docs/snapshots-theory.md describes its
fields.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from mainstay_core.base import codec
from mainstay_core.base.bounds import MAX_MEMBERS, Name, Range, Seconds
from mainstay_core.base.errors import InvalidSpecError, MalformedError
from mainstay_core.snapshots.prices import StateTypes
from mainstay_core.snapshots.units import MAX_UNITS
from mainstay_core.theory.iteration import StepTimes, step_s

Parameters = Annotated[float, Range(1.0, 1e15)]
"""A number of parameters."""
Degree = Annotated[int, Range(1, 65_536)]
"""A degree of parallelism, or a number of layers or experts."""
Tokens = Annotated[int, Range(1, 2**40)]
"""A number of tokens, sequences or elements."""
Rate = Annotated[float, Range(1.0, 1e18)]
"""Bytes per second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A mixture-of-experts model, by its counts."""

    num_params: Parameters
    num_active_params: Parameters
    """Parameters that one token meets."""
    num_layers: Degree
    num_experts: Degree
    """Routed experts of a layer, shared ones not counted."""
    num_routed: Degree
    """Experts to which a token is routed in a layer."""

    @property
    def num_units(self) -> int:
        """Return the number of units: of each layer its experts, its gate and the rest."""
        return self.num_layers * (self.num_experts + 2)

    @property
    def expert_share(self) -> float:
        """Return the routed experts' share of all parameters.

        A token meets ``rest + experts * num_routed / num_experts`` parameters, which leaves one
        unknown.
        """
        unrouted = 1 - self.num_routed / self.num_experts
        if unrouted == 0:
            return 0.0
        return (self.num_params - self.num_active_params) / unrouted / self.num_params

    @property
    def expert_compute_share(self) -> float:
        """Return the routed experts' share of the parameters that one token meets."""
        met = self.expert_share * self.num_params * self.num_routed / self.num_experts
        return met / self.num_active_params


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The parallelism of a job, and what it computes in a step."""

    num_stages: Degree
    num_pipelines: Degree
    expert_ways: Degree
    """Accelerators that share the experts of a stage."""
    sequences: Tokens
    """Sequences of a step, over all pipelines."""
    sequence_length: Tokens
    """Tokens of a sequence."""
    width: Tokens
    """Elements of a token's activation at a stage's border."""

    @property
    def num_accelerators(self) -> int:
        """Return the number of accelerators of the job."""
        return self.num_stages * self.num_pipelines * self.expert_ways


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProfile:
    """A job as the theory sees it.

    Attributes:
        name: what tables call it.
        model: its parameters.
        types: bytes of their copies.
        shape: its parallelism.
        times: what a step takes, part by part.
        snapshot_bytes_per_s: bytes of snapshots that leave all accelerators of one pipeline
            together in a second.
        dense_stall_s: what a step with a dense snapshot takes longer; computed if left out.
        rollback_factor: seconds that a rollback costs for each second of steps that it redoes:
            1 if steps are computed again as fast as before.
        downtime_s: seconds from a failure to the first replayed step.
    """

    name: Name
    model: Model
    types: StateTypes
    shape: Shape
    times: StepTimes
    snapshot_bytes_per_s: Rate
    dense_stall_s: Seconds | None = None
    rollback_factor: Annotated[float, Range(0.0, 1000.0)] = 1.0
    downtime_s: Seconds = 0.0

    @property
    def step_s(self) -> float:
        """Return the seconds of a step without any snapshot."""
        return step_s(self.times)

    @property
    def rate_per_param(self) -> float:
        """Return the bytes per parameter that leave a pipeline's accelerators in a second."""
        return self.snapshot_bytes_per_s / self.model.num_params

    @property
    def stall_s(self) -> float:
        """Return what a step with a dense snapshot takes longer.

        A snapshot leaves beside the forward and backward passes; what does not fit delays the
        optimizer (section 2.3).
        """
        if self.dense_stall_s is not None:
            return self.dense_stall_s
        return max(0.0, self.types.full_bytes / self.rate_per_param - self.step_s)


def read_profile(text: str) -> JobProfile:
    """Return the job that a profile file describes.

    Args:
        text: JSON.

    Raises:
        InvalidSpecError: it is no JSON, or a field is missing, unfit or out of its bounds; the
            field is named.
    """
    try:
        profile = codec.decode(JobProfile, codec.parse_json(text, "profile"), "profile")
    except MalformedError as error:
        raise InvalidSpecError(error.field, error.problem) from error
    model = profile.model
    if model.num_routed > model.num_experts:
        raise InvalidSpecError(
            "profile.model.num_routed",
            f"is {model.num_routed}, must be at most num_experts ({model.num_experts})",
        )
    least = model.num_params * model.num_routed / model.num_experts
    if not least <= model.num_active_params <= model.num_params:
        raise InvalidSpecError(
            "profile.model.num_active_params",
            f"is {model.num_active_params:g}, must be between {least:g} (a token's share of the "
            f"experts, if all parameters were experts') and num_params ({model.num_params:g})",
        )
    if profile.types.full_bytes == 0:
        raise InvalidSpecError(
            "profile.types", "has no bytes of masters and optimizer: a snapshot would be empty"
        )
    if model.num_units > MAX_UNITS:
        raise InvalidSpecError(
            "profile.model",
            f"has {model.num_units} units (layers x (experts + 2)), must have at most {MAX_UNITS}",
        )
    _check_shape(profile)
    return profile


def _check_shape(profile: JobProfile) -> None:
    shape, stage_s = profile.shape, profile.times.stage_s
    if shape.num_stages * shape.num_pipelines > MAX_MEMBERS:
        raise InvalidSpecError(
            "profile.shape",
            f"has {shape.num_stages * shape.num_pipelines} cells (stages x pipelines), must have "
            f"at most {MAX_MEMBERS}",
        )
    if [len(stages) for stages in stage_s] != [shape.num_stages] * shape.num_pipelines:
        raise InvalidSpecError(
            "profile.times.stage_s",
            f"must have {shape.num_pipelines} lists (pipelines) of {shape.num_stages} numbers "
            "(stages)",
        )
    if profile.step_s <= 0:
        raise InvalidSpecError("profile.times", "a step takes no time; give stage_s above 0")
