"""Lists what is explored: configurations that hold, and deliberate mistakes that are found."""

from __future__ import annotations

from tests.model.values import Cfg


def budget(**faults: int) -> tuple:
    """How many faults of each kind may strike, by name."""
    return tuple(faults.get(kind, 0) for kind in KINDS)


KINDS = ("crash", "stop", "glitch", "sdc", "outage", "loss", "suspect", "trainer", "full", "damage")
EVERY_FAULT = (2, 2, 1, 1, 1, 1, 1, 0, 0, 0)
ALL = {"apis": 2, "grow": True, "reorder": True, "staged": True, "max_plans": 40}
EXHAUSTIVE = [
    Cfg("2x2, 2 steps, a crash anywhere, restart and rejoin", steps=2, bud=budget(crash=1)),
    Cfg("2x2, 1 step, a stop and continue anywhere", steps=1, bud=budget(stop=1)),
    Cfg(
        "2x2, 2 steps, a corrupt gradient and a spurious abort",
        steps=2,
        bud=budget(sdc=1, glitch=1),
    ),
    Cfg(
        "2x2, 1 step, a crash, backward ends stage by stage",
        steps=1,
        staged=True,
        bud=budget(crash=1),
    ),
    Cfg("2x1, 2 steps, two crashes", P=1, steps=2, bud=budget(crash=2)),
    Cfg("2x1, 2 steps, a crash and a stop", P=1, steps=2, bud=budget(crash=1, stop=1)),
    Cfg(
        "2x1, 1 step, a crash, a stop, a corrupt gradient",
        P=1,
        steps=1,
        bud=budget(crash=1, stop=1, sdc=1),
    ),
    Cfg(
        "2x1 + spare, 2 steps, a crash and a spurious abort",
        P=1,
        steps=2,
        spares=1,
        bud=budget(crash=1, glitch=1),
    ),
    Cfg("3x1, 1 step, two crashes", N=3, P=1, steps=1, bud=budget(crash=2)),
    Cfg(
        "2x1, 1 step, two apis race, crash, outage",
        P=1,
        steps=1,
        apis=2,
        bud=budget(crash=1, outage=1),
    ),
    Cfg(
        "2x1 + spare, 1 step, crash, Redis loses data, old plans arrive late",
        P=1,
        steps=1,
        spares=1,
        reorder=True,
        max_plans=10,
        bud=budget(crash=1, loss=1),
    ),
    Cfg("2x2, 1 step, a crash, two-round variant", steps=1, mode="two", bud=budget(crash=1)),
    Cfg(
        "2x1, 2 steps, a stop, two-round variant, NO determinism",
        P=1,
        steps=2,
        mode="two",
        nondet=True,
        bud=budget(stop=1),
    ),
]
RANDOM = [
    Cfg(
        "2x2 + spare, 3 steps, every fault, checkpoints",
        spares=1,
        steps=3,
        dup=True,
        ckpt=1,
        bud=EVERY_FAULT,
        **ALL,
    ),
    Cfg(
        "3x2 + spare, 3 steps, every fault, checkpoints",
        N=3,
        spares=1,
        steps=3,
        ckpt=2,
        bud=EVERY_FAULT,
        **ALL,
    ),
    Cfg(
        "3x1 + spare, 3 steps, 3 crashes, 2 stops, 2 corruptions",
        N=3,
        P=1,
        spares=1,
        steps=3,
        max_plans=40,
        bud=budget(crash=3, stop=2, sdc=2),
    ),
    Cfg(
        "3x2, 3 steps, two-round variant, every fault",
        N=3,
        steps=3,
        mode="two",
        bud=EVERY_FAULT,
        **ALL,
    ),
]


def mutant(rule: str, why: str, how: str = "explore", **kw) -> tuple:
    rules = frozenset(() if rule.startswith("(") else rule.split("+"))
    return Cfg(f"{rule}: {why}", rules=rules, **kw), how


# Pod1 alone has the certificate and stops; pod3 settles q2 without it, pod1 returns in q3.
LONE_CERTIFICATE = (
    "replica0 finishes",
    "replica1 finishes",
    "pod0 posts",
    "pod1 posts",
    "pod2 posts",
    "pod3 posts",
    "pod0 completes",
    "pod1 completes",
    "pod2 completes",
    "pod3 completes",
    "pod1 completes vote",
    "STOP pod1",
    "pod0 aborts",
    "pod2 aborts",
    "pod3 aborts",
    "api0 decides q2",
    "pod0 adopts plan1",
    "pod2 adopts plan1",
    "pod3 adopts plan1",
    "pod3 completes settle of q2",
    "GLITCH pod0",
    "continue pod1",
    "api0 decides q3 [(0, 0, 0), (0, 1, 1)",
)
EXHAUSTIVE.append(
    Cfg(
        "2x2, a lone certificate holder stops and returns, then a crash",
        steps=1,
        grow=True,
        max_plans=12,
        secs=30,
        bud=budget(crash=1, stop=1, glitch=1),
        prefix=LONE_CERTIFICATE,
    )
)
MUTANTS = [
    mutant("vote_stage_only", "commit per stage group", steps=1, bud=budget(crash=1)),
    mutant(
        "vote_replica_only",
        "commit per pipeline (norm exchange inside the replica)",
        steps=1,
        bud=budget(crash=2),
    ),
    mutant(
        "in_place", "reduction overwrites the retained gradients", P=1, steps=1, bud=budget(crash=1)
    ),
    mutant(
        "roll_if_all_reduced",
        "in doubt, roll forward if all hold G (verdict of the dead unknown)",
        P=1,
        steps=1,
        bud=budget(crash=1, sdc=1),
    ),
    mutant(
        "no_cert_match+no_tiers",
        "G rolled forward with another quorum's certificate",
        P=1,
        steps=2,
        bud=budget(stop=1, sdc=1),
    ),
    mutant(
        "no_tiers",
        "states of returning ranks count like those of members",
        steps=1,
        grow=True,
        max_plans=6,
        bud=budget(crash=1, stop=1, glitch=1),
        prefix=LONE_CERTIFICATE,
    ),
    mutant(
        "issue_literal+no_tiers",
        "any rank ahead makes all roll forward, returning ranks included",
        P=1,
        steps=1,
        bud=budget(stop=1),
    ),
    mutant(
        "abort_in_apply",
        "abort interrupts apply",
        P=1,
        steps=1,
        fine=True,
        bud=budget(crash=1, stop=1),
    ),
    mutant(
        "no_incarnation",
        "membership bound to the pod, not to the process",
        P=1,
        steps=1,
        bud=budget(crash=1, glitch=1),
    ),
    mutant(
        "no_nonce",
        "quorum is only a number; Redis falls back",
        P=1,
        steps=1,
        spares=1,
        reorder=True,
        bud=budget(crash=1, loss=1),
    ),
    mutant(
        "old_base",
        "after Redis fell back, the next plan is derived from the older one",
        "simulate",
        N=3,
        steps=3,
        mode="two",
        bud=EVERY_FAULT,
        **ALL,
    ),
    mutant(
        "no_cas+no_nonce",
        "two apis commit from one base",
        P=1,
        steps=1,
        spares=1,
        apis=2,
        reorder=True,
        bud=budget(crash=1, stop=1),
    ),
    mutant(
        "edge",
        "a fault is an event, told once, instead of a state, repeated",
        P=1,
        steps=1,
        bud=budget(crash=1, outage=1),
    ),
    mutant(
        "late_is_gone",
        "settle gives up on members that are still on their way (plan storm)",
        P=1,
        steps=1,
        bud=budget(crash=1),
    ),
    mutant(
        "heal_outside",
        "step goes on without the vote of a healing member",
        P=1,
        steps=2,
        bud=budget(crash=1),
    ),
    mutant(
        "patch_missing_only",
        "stages that still hold a type sit out its recomputation",
        "simulate",
        spares=1,
        steps=3,
        staged=True,
        max_plans=40,
        bud=budget(crash=2),
    ),
    mutant(
        "ckpt_shared_dir",
        "checkpoint parts not keyed by (version, quorum)",
        steps=3,
        ckpt=1,
        bud=budget(),
    ),
    mutant(
        "two_any",
        "two rounds: roll forward if one rank per stage is prepared (rest heals)",
        "simulate",
        steps=2,
        mode="two",
        max_plans=40,
        bud=budget(crash=2, glitch=1),
    ),
    mutant(
        "(one round, no determinism)",
        "a fenced rank keeps a value that nobody else has",
        P=1,
        steps=1,
        nondet=True,
        bud=budget(stop=1),
    ),
    mutant(
        "strict_i3",
        "NOT a mistake: 'no loss while any copy of every stage lives' is unattainable",
        "simulate",
        steps=3,
        bud=budget(crash=1, stop=1),
        max_plans=40,
    ),
]
