"""Exceptions that interrupt a trainer although nothing is wrong with its job.

None of these is a failure of the process that sees it. It keeps its state, its
partials and its mark, parks, and waits for the next plan (protocol section 5).
"""

from __future__ import annotations

from mainstay_core.base.errors import MainstayError


class JobOver(MainstayError):  # noqa: N818 - a state, not a failure
    """The job is complete, and this trainer has nothing left to do in it."""
