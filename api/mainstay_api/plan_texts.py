"""Answers with a plan: its JSON is made once, however many supervisors get it.

A plan has an entry for each member, and after a fault most members ask at once.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from mainstay_core.base import codec
from mainstay_core.base.ids import JobUid
from mainstay_core.wire.plan import Plan

MAX_KEPT = 64
"""Jobs whose newest plan is kept as text: a plan of the largest jobs has some MiB."""


class PlanTexts:
    """Keeps the JSON of the newest plan of each job that was asked about last."""

    def __init__(self) -> None:
        self._kept: collections.OrderedDict[JobUid, tuple[Plan, str]] = collections.OrderedDict()

    def answer(
        self, plan: Plan | None, body: Mapping[str, Any] | None = None, status: int = 200
    ) -> Response:
        """Return an answer whose field ``plan`` is the plan.

        Args:
            plan: None is null.
            body: the other fields.
            status: of HTTP.
        """
        return with_plan("null" if plan is None else self._text_of(plan), body, status)

    def _text_of(self, plan: Plan) -> str:
        kept = self._kept.pop(plan.job, None)
        # Plans never change, so the same object has the same text.
        if kept is None or kept[0] is not plan:
            kept = (plan, codec.dumps(plan))
        self._kept[plan.job] = kept
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return kept[1]


def with_plan(text: str, body: Mapping[str, Any] | None = None, status: int = 200) -> Response:
    """Return an answer with a field ``plan`` that is JSON already.

    Args:
        text: JSON of the plan.
        body: the other fields.
        status: of HTTP.
    """
    before = json.dumps(dict(body), separators=(",", ":"))[:-1] + "," if body else "{"
    content = f'{before}"plan":{text}}}'
    return Response(content, status_code=status, media_type="application/json")
