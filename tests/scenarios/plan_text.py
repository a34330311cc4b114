"""Plans, partials and slots as scenarios show them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mainstay_core.wire.plan import Member, Partial, Plan


def show_plan(plan: Plan) -> list[str]:
    """Return a plan in a few lines: who is chained to which replica, and who computes what."""
    kind = "planned" if plan.planned else "unplanned"
    lines = [f"{plan.quorum} {plan.method}, {kind}" + (", pausing" if plan.pause else "")]
    for chain in plan.chains:
        cells = " ".join(_name(plan.members[i]) for i in chain.cells)
        kept = "" if chain.formed_in == plan.quorum else f", as formed in {chain.formed_in}"
        types = [t for t, replica in enumerate(plan.suppliers) if replica == chain.replica]
        lines.append(f"  replica {chain.replica}: {cells}{kept}; types {list_runs(types)}")
    followers = [m for m in plan.members if m.rank.replica is None]
    if followers:
        names = ", ".join(f"{_name(m)} of {_place(plan, m)}" for m in followers)
        lines.append(f"  followers: {names}")
    if plan.outgoing:
        names = ", ".join(str(m.slot) for m in plan.outgoing)
        lines.append(f"  lets go once it is adopted: {names}")
    return lines


def _name(member: Member) -> str:
    return f"{member.slot}{'(joins)' if member.joining else ''}"


def _place(plan: Plan, member: Member) -> str:
    stage = f"stage {member.rank.stage}"
    return f"{stage}.{member.rank.inner}" if plan.ranks_per_stage > 1 else stage


def list_runs(numbers: Iterable[int]) -> str:
    """Return numbers with runs shortened: 0-3 5."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return " ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs) or "none"


def show_partials(held: Sequence[Partial]) -> str:
    """Return the types that partials hold, one buffer to a word."""
    return " ".join(list_runs(range(p.first, p.last + 1)) for p in held) or "nothing"
