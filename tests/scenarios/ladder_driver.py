"""The recovery ladder in scenarios: a situation, and the row that answers it."""

from __future__ import annotations

from collections.abc import Iterable

from tests.scenarios.scenario_files import Call, Command, Driver

from mainstay_core.coordinator import ladder
from mainstay_core.wire.reinitialisation import BlockOutline, StageOutline


def outline_of(stages: Iterable[str]) -> tuple[StageOutline, ...]:
    """The blocks of each stage, by their kinds: a letter for each block."""
    return tuple(
        tuple(
            BlockOutline(name=f"{kind}{stage}.{number}", kind=kind)
            for number, kind in enumerate(kinds)
        )
        for stage, kinds in enumerate(stages)
    )


class LadderDriver(Driver):
    """A question to a pure function: nothing is kept from one command to the next."""

    def commands(self) -> dict[str, Command]:
        return {"decide": self._decide}

    def _decide(self, call: Call) -> list[str]:
        """Ask, by stage: ``living`` cells, and ``holding`` the state (as many if not said).

        ``blocks`` are those of each stage, a letter for each block's kind.
        """
        living = [int(n) for n in call.need("living").split(",")]
        given = call.get("holding")
        holding = [int(n) for n in given.split(",")] if given else living
        logged = {int(n) for n in call.names("replayable")}
        if len(holding) != len(living):
            raise call.error("living and holding speak of other numbers of stages")
        could = call.names("if-built")
        situation = ladder.Situation(
            stages=tuple(
                ladder.StageHolders(
                    stage=stage,
                    holders=holders,
                    living=cells,
                    replayable=stage in logged,
                )
                for stage, (cells, holders) in enumerate(zip(living, holding, strict=True))
            ),
            step=call.count("step"),
            free_slots=call.count("free"),
            leaving=call.count("leaving"),
            lost=call.count("lost"),
            disagreement=call.get("disagreement"),
            durable_step=None if call.flag("seed-gone") else call.count("durable"),
            allow_approximate=call.flag("approximate-allowed"),
            approximate_after_lost_steps=(
                call.count("approximate-after") if call.has("approximate-after") else None
            ),
            outline=outline_of(call.names("blocks")),
            executable=ladder.EXECUTABLE | {ladder.Row[name.upper()] for name in could},
        )
        answer = ladder.decide(situation)
        exact = "exact" if answer.exact else "not exact"
        origin = "" if answer.from_step is None else f", from step {answer.from_step}"
        return [
            f"row {answer.row.value} ({answer.row.name.lower()}), {exact}{origin}: {answer.reason}",
            *(f"passed over {why}" for why in answer.why_not),
        ]
