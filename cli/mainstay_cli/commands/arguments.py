"""Declares the arguments that several commands have, with the same help everywhere."""

from __future__ import annotations

from typing import Annotated

import typer

JOB = Annotated[
    str | None,
    typer.Argument(
        help="Name of the job; if left out, the newest run of this machine, or the only "
        "TrainingJob of the namespace."
    ),
]
RUNNING_JOB = Annotated[str, typer.Argument(help="Name of the job.")]
AS_JSON = Annotated[bool, typer.Option("--json", help="Print JSON.")]
