"""Shows what the stores of a running job hold, and what a check of them has found, as text."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from mainstay_core.base.words import count, show_bytes
from mainstay_core.wire.recoveries import name_log
from mainstay_core.wire.segments import runs_of

MAX_DAMAGED = 20
"""Damaged copies that are printed one by one."""


def describe_snapshots(told: Mapping[str, Any]) -> str:
    """Return windows, coverage and stores of a job, in several lines."""
    lines = [*describe_summary(told["summary"]), ""]
    lines += [f"  {'position':<9} {'copies':>6} {'replay':>7}  not survived alone"]
    places = {p["position"]: _place(p) for p in told["positions"]}
    renewed = _renewed_stages(told["positions"])
    lines += [f"  {_position_line(position, places, renewed)}" for position in told["positions"]]
    lines += ["", f"  {'store':<24} {'used':>10} {'of':>10}  position  units (states; gradients)"]
    for store in told["stores"]:
        head = (
            f"{store['name']:<24} {show_bytes(store['used_bytes']):>10} "
            f"{show_bytes(store['memory_bytes']):>10}"
        )
        groups = [_group(group, places) for group in store["units"]]
        groups = [*groups, *_logs(store.get("logs", ()), places)] or ["nothing"]
        if store.get("num_damaged"):
            groups.append(f"{_damaged(store['num_damaged'])} not counted here")
        lines += [
            f"  {head if not number else ' ' * len(head)}  {group}"
            for number, group in enumerate(groups)
        ]
    lines += [f"  {name:<24} has not told anything of its store" for name in told["silent"]]
    return "\n".join(lines)


def describe_summary(summary: Mapping[str, Any]) -> list[str]:
    """Return what the snapshots of a job come to, one line each."""
    window, flight = summary["window"], summary["in_flight"]
    done = f"window {_versions(window)} is complete" if window else "no window is complete yet"
    more = f", {_versions(flight)} is copied" if flight else ""
    kinds = ", ".join(f"{k['kind']} {show_bytes(k['size_bytes'])}" for k in summary["kinds"])
    used = (
        f"{count(summary['num_stores'], 'store')} with {kinds or 'nothing'} in "
        f"{show_bytes(summary['used_bytes'])} of {show_bytes(summary['memory_bytes'])}; fullest: "
        f"{summary['fullest']}, {show_bytes(summary['fullest_used_bytes'])} of "
        f"{show_bytes(summary['fullest_memory_bytes'])}"
        if summary["num_stores"]
        else "no pod has told yet what its store holds"
    )
    lines = [
        f"snapshots: {done}{more}; {count(summary['lag'], 'step')} since",
        f"  {used}",
        f"  {summary['coverage']}",
    ]
    if summary.get("expected_bytes"):
        expected, bound = summary["expected_bytes"], summary["bound_bytes"]
        told = (
            f"{show_bytes(expected)} while nobody is lost, and needs room for {show_bytes(bound)}"
        )
        if summary.get("is_auto"):
            told += "; both are for the longest window that Auto may choose"
        lines.insert(2, f"  a store is expected to hold up to {told}")
    if summary.get("ordering"):
        order, log = summary["ordering"], name_log(summary.get("log", ""))
        told = f"  units are copied in the order {order}; a lost state is made anew from {log}"
        if summary.get("log_reason"):
            told += f": {summary['log_reason']}"
        lines.insert(1, told)
    if summary["num_covered"]:
        lines += [f"  a replay would take {count(summary['replay_steps'], 'step')} now at most"]
    if summary["short_of"]:
        lines += [f"  memory is short: {summary['short_of']}"]
    if summary.get("num_discarded"):
        left = summary.get("num_damaged", 0)
        told = f"{left} of them still there, which cover nothing" if left else "none is left"
        lines += [f"  found so far: {_damaged(summary['num_discarded'])}; {told}"]
    return lines


def _damaged(number: int) -> str:
    return count(number, "damaged segment or commit", "damaged segments or commits")


def describe_check(found: Mapping[str, Any]) -> list[str]:
    """Return what a check of all stores has found."""
    stores = count(len(found["told"]), "store")
    commits = count(found.get("num_records", 0), "commit")
    read = (
        f"read {count(found['num_segments'], 'segment')} "
        f"({show_bytes(found['size_bytes'])}) and {commits} in {stores}: copies of "
        f"{found['num_compared']} compared, {found['num_alone']} have one copy only"
    )
    lines = [read]
    lines += [
        f"  DAMAGED: {copy['unit_name'] or 'a unit'} on pod {copy['pod']}: "
        f"{copy['segment']}: {copy['why']}"
        for copy in found["damaged"][:MAX_DAMAGED]
    ]
    if len(found["damaged"]) > MAX_DAMAGED:
        lines += [f"  and {len(found['damaged']) - MAX_DAMAGED} more"]
    records = found.get("damaged_records", ())
    lines += [
        f"  DAMAGED: the commit of step {record['step']} on pod {record['pod']}: it does not have "
        "the seal with which it was written"
        for record in records[:MAX_DAMAGED]
    ]
    if len(records) > MAX_DAMAGED:
        lines += [f"  and {len(records) - MAX_DAMAGED} more commits"]
    return lines


def _position_line(
    position: Mapping[str, Any], places: Mapping[int, str], renewed: Collection[int]
) -> str:
    lost = [f"pod {name}" for name in position["pods"]]
    lost += [f"domain {name}" for name in position["domains"] if name not in position["pods"]]
    steps = str(position["replay_steps"]) if position["is_covered"] else "-"
    why = "" if position["is_covered"] else f"  NOT COVERED: {position['why_not']}"
    return (
        f"{_place(position):<9} {position['num_copies']:>6} {steps:>7}  "
        f"{', '.join(lost) or 'none'}{_replay_of(position, places, renewed)}{why}"
    )


def _renewed_stages(positions: Sequence[Mapping[str, Any]]) -> frozenset[int]:
    """Return the stages that are being made anew: stores can, and no member has some state."""
    return frozenset(p["stage"] for p in positions if p["is_covered"] and not p["num_members"])


def _replay_of(
    position: Mapping[str, Any], places: Mapping[int, str], renewed: Collection[int]
) -> str:
    """Return whether a position is being made anew, and with which others, or would be."""
    stretch = position.get("stretch")
    others = ""
    if stretch is not None and stretch["first"] < stretch["last"]:
        first, last = (places.get(stretch[n], str(stretch[n])) for n in ("first", "last"))
        others = f" with {first} to {last}"
    # From boundary logs all inner ranks of a stage are made anew, from gradients each by itself.
    if position["stage"] in renewed and (stretch is not None or not position["num_members"]):
        return f"  is being made anew{others}"
    return f"  once lost, made anew{others}" if others and position["num_members"] else ""


def _place(position: Mapping[str, Any]) -> str:
    inner = f".i{position['inner']}" if position["inner"] else ""
    return f"s{position['stage']}{inner}"


def _versions(window: Mapping[str, Any]) -> str:
    return f"{window['first']} to {window['first'] + window['length'] - 1}"


def _group(group: Mapping[str, Any], places: Mapping[int, str]) -> str:
    place = places.get(group["position"], f"position {group['position']}")
    states = ", ".join(map(str, group["states"])) or "none"
    computes = group.get("computes", ())
    more = f"; compute weights {_runs(computes)}" if computes else ""
    return (
        f"{place:<9} {_runs(group['units'])} of {group['num_units']} "
        f"({states}; {_runs(group['gradients'])}{more})"
    )


def _logs(logs: Sequence[Mapping[str, Any]], places: Mapping[int, str]) -> list[str]:
    """Return which steps' boundary logs there are, one line for each sender and kind."""
    steps: dict[tuple[int, str], set[int]] = {}
    for log in logs:
        found = steps.setdefault((log["position"], log["kind"]), set())
        found.update(range(log["first_step"], log["last_step"] + 1))
    return [
        f"{places.get(position, f'position {position}'):<9} {kind} of steps "
        f"{_runs([{'first': run.first, 'last': run.last} for run in runs_of(sorted(found))])}"
        for (position, kind), found in sorted(steps.items())
    ]


def _runs(runs: Sequence[Mapping[str, int]]) -> str:
    shown = (
        str(run["first"]) if run["first"] == run["last"] else f"{run['first']}-{run['last']}"
        for run in runs
    )
    return ", ".join(shown) or "none"
