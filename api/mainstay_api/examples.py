"""Examples for the OpenAPI document: one for each answer that is not self-evident."""

from __future__ import annotations

from typing import Any

Responses = dict[int | str, dict[str, Any]]


def _example(description: str, value: object) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"example": value}}}


def _problem(error: str, detail: str, what_to_do: str) -> dict[str, str]:
    return {"error": error, "detail": detail, "what_to_do": what_to_do}


_QUORUM = {"id": 2, "nonce": "5be1d7c04f3a"}
_JOB = {
    "uid": "9f86d081884c7d65",
    "name": "demo",
    "state": "running",
    "reason": "",
    "step": 21,
    "steps": 60,
    "quorum": _QUORUM,
    "replicas": 3,
    "replicas_wanted": 4,
    "stages": 2,
    "followers": 1,
    "all_reduce_stack": 6,
    "pods": 8,
    "leaving": [
        {
            "pod": "demo-3",
            "uid": "demo-3-9c01aa",
            "reason": "told to end by SIGTERM",
            "left_s": 28.5,
            "waits": "",
        }
    ],
    "held_back": [],
    "recovering": [],
    "created_at_s": 1767225600.0,
    "entry": "blocks",
    "protections": [
        {"name": "ledger", "given": True, "why": "digests of every committed step"},
    ],
}
_PLAN = {
    "job": "9f86d081884c7d65",
    "quorum": _QUORUM,
    "lineage": 0,
    "planned": False,
    "unplanned_id": 2,
    "method": "mask",
    "members": [
        {
            "index": 0,
            "rank": {"replica": 0, "stage": 0, "inner": 0},
            "slot": {"pod": "demo-1-a1b2c3", "index": 0},
            "incarnation": "1f0e",
            "address": "127.8.1.2",
            "since": 1,
            "joining": False,
        }
    ],
    "chains": [{"replica": 0, "cells": [0], "formed_in": {"id": 1, "nonce": "77aa01"}}],
    "suppliers": [0, 0],
    "all_reduce_stack": 2,
    "rendezvous": {"pod": "demo-1-a1b2c3", "gather": "127.8.1.2:40001"},
    "reason": "every stage still has a living cell; 1 cell lost",
    "faults_fired": ["fault-0"],
    "created_at_s": 1767225700.0,
    "version": 1,
}
_RECOVERY = {
    "fault": "pod demo-3 (r1.s0.i0) is gone: its supervisor (pid 4711) ended by signal 9",
    "method": "mask",
    "exact": True,
    "reason": "every stage still has a living cell; 1 cell lost",
    "quorum": _QUORUM,
    "from_step": 20,
    "slots": [{"pod": "demo-3-d4e5f6", "index": 0}],
    "started_at_s": 1767225699.98,
    "first_commit_after_s": 0.061,
    "lost_steps": 0,
    "redone_steps": 0,
    "done": True,
    "detect_s": 0.004,
    "decide_s": 0.006,
    "fence_s": 0.015,
    "load_s": 0.001,
    "resume_s": 0.41,
}

PROBLEMS: Responses = {
    401: _example(
        "No token, or not this one",
        _problem(
            "unauthorized",
            "the token is missing",
            "send 'Authorization: Bearer TOKEN' with the api's MAINSTAY_ADMIN_TOKEN "
            "(or MAINSTAY_TOKEN)",
        ),
    ),
    404: _example(
        "No such job",
        _problem(
            "unknown-job",
            "there is no job 'demmo'",
            "list the jobs with GET /v1/jobs; a job is named by its uid or its name",
        ),
    ),
    409: _example(
        "The job has moved on; a stale fact's answer carries the current plan",
        {
            **_problem(
                "stale",
                "parked of q1-77aa01 is stale: the job is in q2-5be1d7c04f3a",
                "adopt the plan in this reply; tell only what concerns its quorum",
            ),
            "plan": _PLAN,
        },
    ),
    413: _example(
        "The body is too long: it was not read",
        {
            **_problem(
                "body-too-large",
                "the body is longer than 64 MiB, the limit of this api",
                "send less at once, or raise MAINSTAY_MAX_BODY_MIB (value api.maxBodyMiB) of the "
                "api",
            ),
            "limit_bytes": 67_108_864,
        },
    ),
    422: _example(
        "Something in the request cannot be used",
        {
            **_problem(
                "invalid-spec",
                "spec.parallelism.replicas: is 5, but there are only 4 lanes",
                "correct spec.parallelism.replicas",
            ),
            "field": "spec.parallelism.replicas",
        },
    ),
    503: _example(
        "The store is not reached: nothing was decided",
        _problem(
            "store-unavailable",
            "Redis: connection refused",
            "ask again: training goes on meanwhile, and nothing was decided",
        ),
    ),
}
JOB: Responses = {200: _example("The job", _JOB), 201: _example("The job", _JOB)}
JOBS: Responses = {200: _example("All jobs", [_JOB])}
PLAN_REPLY: Responses = {200: _example("The current plan, or null", {"plan": _PLAN})}
REGISTERED: Responses = {
    200: _example(
        "The job as its processes see it, the current plan, and where the stream stands",
        {
            "config": {"job": "9f86d081884c7d65", "name": "demo"},
            "manifest": {"kind": "TrainingJob", "metadata": {"name": "demo"}},
            "restored_at_s": 0.0,
            "plan": _PLAN,
            "cursor": "1-0",
        },
    )
}
BEAT: Responses = {
    200: _example(
        "The newest quorum",
        {
            "quorum": _QUORUM,
            "state": "running",
            "restored_at_s": 0.0,
            "now_s": 1767225700.0,
        },
    )
}
STORE_REPLY: Responses = {
    200: _example("The newest check of the store that is wanted; 0: none", {"check": 0})
}
_KINDS = [
    {"kind": "gradient", "num_segments": 40, "size_bytes": 41943040},
    {"kind": "state", "num_segments": 20, "size_bytes": 62914560},
]
_WINDOW = {"first": 16, "length": 4}
_STORES = {
    "window": _WINDOW,
    "in_flight": {"first": 20, "length": 4},
    "lag": 2,
    "kinds": _KINDS,
    "memory_bytes": 536870912,
    "used_bytes": 104857600,
    "fullest": "demo-1",
    "fullest_used_bytes": 52428800,
    "fullest_memory_bytes": 134217728,
    "num_stores": 4,
    "num_positions": 2,
    "num_covered": 2,
    "num_survive_pod": 2,
    "num_survive_domain": 2,
    "replay_steps": 5,
    "num_discarded": 0,
    "num_refused": 0,
    "short_of": "",
    "coverage": "the loss of any one pod is survived; the loss of all trainers, whose pods live, "
    "is survived",
    "log": "gradients",
    "ordering": "Popularity",
}
SNAPSHOTS: Responses = {
    200: _example(
        "What stores hold, and which losses each position survives",
        {
            "lineage": 0,
            "step": 21,
            "summary": _STORES,
            "positions": [
                {
                    "position": 0,
                    "stage": 0,
                    "inner": 0,
                    "is_covered": True,
                    "why_not": "",
                    "num_members": 1,
                    "num_copies": 3,
                    "replay_steps": 5,
                    "pods": [],
                    "domains": [],
                }
            ],
            "stores": [
                {
                    "name": "demo-1",
                    "domain": "demo-1",
                    "pod": "demo-1-a1b2c3",
                    "address": "10.0.0.7:40123",
                    "memory_bytes": 134217728,
                    "used_bytes": 52428800,
                    "kinds": _KINDS,
                    "lineage": 0,
                    "keep_from": 16,
                    "windows": [_WINDOW],
                    "units": [
                        {
                            "position": 0,
                            "num_units": 4,
                            "units": [{"first": 0, "last": 1}],
                            "states": [16, 20],
                            "gradients": [{"first": 16, "last": 20}],
                        }
                    ],
                    "judged": [{"first": 16, "last": 20}],
                    "num_refused": 0,
                    "short_of": "",
                    "num_discarded": 0,
                }
            ],
            "silent": [],
        },
    )
}
CHECK: Responses = {
    200: _example(
        "The number of a check, and what it has found so far",
        {
            "check": 1,
            "told": ["demo-1", "demo-2"],
            "waiting": [],
            "num_segments": 120,
            "size_bytes": 104857600,
            "num_compared": 60,
            "num_alone": 0,
            "damaged": [],
            "num_records": 24,
            "damaged_records": [],
        },
    )
}
RESTORED: Responses = {
    200: _example("The plan that is in force now; null if the job has none yet", {"plan": _PLAN})
}
RECOVERIES: Responses = {200: _example("All recoveries, oldest first", [_RECOVERY])}
FINDINGS: Responses = {
    200: _example(
        "How many findings there were, and the newest",
        {
            "counts": {"primary": 1},
            "untold": 0,
            "findings": [
                {
                    "place": 1,
                    "told": {
                        "finding": {
                            "step": 20,
                            "slot": {"pod": "demo-1-a1b2c3", "index": 0},
                            "rank": {"replica": 0, "stage": 1, "inner": 0},
                            "in_pass": "weight",
                            "shard_type": 3,
                            "micro_batch": 0,
                            "block": "layers.3",
                            "ordinal": 4,
                            "operator": "aten.mm",
                            "output": 0,
                            "num_elements": 1,
                            "verdict": "primary",
                            "remedy": "repair",
                            "reason": "the third execution equals the checker: the primary one "
                            "was hit, and nobody has used its value",
                        },
                        "incarnation": "1f0e",
                        "number": 0,
                        "at_s": 1767225700.0,
                    },
                }
            ],
        },
    )
}
_FAULT = {
    "id": "fault-0",
    "step": 20,
    "action": "kill-pod",
    "phase": "backward",
    "replica": 1,
    "stage": 0,
    "inner": 0,
    "state": "fired",
    "fired": {"pod": "demo-3", "slot": 0, "rank": "r1.s0.i0", "at_s": 1767225699.98},
}
FAULTS: Responses = {
    200: _example("All faults, with what became of each", [_FAULT]),
    201: _example("The new faults", [_FAULT]),
}
PODS: Responses = {
    200: _example(
        "What the provider should bring about",
        {
            "state": "running",
            "num_pods": 5,
            "leaving": [],
            "ending": [],
            "pods": [
                {
                    "uid": "3f0c9a5e-demo-0",
                    "name": "demo-0",
                    "address": "10.0.1.7",
                    "domain": "node-a",
                    "serving": True,
                    "leaving": "",
                }
            ],
        },
    )
}
DELETED: Responses = {
    200: _example("Whether there was such a job", {"uid": "9f86d081884c7d65", "deleted": True})
}
SUMMARY: Responses = {
    200: _example(
        "The job on one page",
        {
            "uid": "9f86d081884c7d65",
            "name": "demo",
            "namespace": "training",
            "state": "running",
            "reason": "",
            "suspend": False,
            "recovering": False,
            "quorum": _QUORUM,
            "all_reduce_stack": 1,
            "replicas": {"whole": 4, "wanted": 4, "min": 1, "lanes": 4, "followers": 0},
            "pods": {
                "wanted": 9,
                "living": 9,
                "serving": 8,
                "leaving": 0,
                "spares_wanted": 1,
                "spares_free": 1,
            },
            "training": {
                "step": 41,
                "steps": 60,
                "loss": 3.21,
                "step_seconds": 0.21,
                "committed_at_s": 1767225699.9,
                "goodput": 1.0,
                "ettr": 0.97,
            },
            "recovery": {
                "active": [],
                "last": None,
                "counts": {"mask": 1, "join": 1},
                "lost_steps": 0,
                "approximate": 0,
            },
            "checkpoint": {"every_steps": 20, "step": 40, "problem": ""},
        },
    )
}
LINEAGE: Responses = {
    200: _example(
        "The forks, and what each stage could be made anew from",
        {
            "exact": False,
            "approximate_since": 20,
            "course": "approximate since step 20",
            "num_forks": 1,
            "forks": [
                {
                    "version": 20,
                    "chain": "00000000000000000000000000000003",
                    "made": {
                        "positions": [
                            {
                                "stage": 1,
                                "blocks": [
                                    {
                                        "block": "layers.1",
                                        "sources": [
                                            {
                                                "kind": "neighbour",
                                                "stage": stage,
                                                "block": f"layers.{stage}",
                                                "weight": weight,
                                            }
                                            for stage, weight in ((0, 0.75), (2, 0.25))
                                        ],
                                        "norms_sq": [0.375, 0.125],
                                    }
                                ],
                            }
                        ],
                        "reason": "stage 1 is made anew from 0.75 of stage 0, 0.25 of stage 2",
                    },
                    "lr_boost": 1.1,
                    "boost_steps": None,
                    "outcome": {
                        "quorum": {"id": 3, "nonce": "5eed"},
                        "states": [
                            {"stage": stage, "masters": f"{stage + 4:032x}"} for stage in range(3)
                        ],
                    },
                }
            ],
            "allowed": True,
            "after_lost_steps": 100,
            "permitted_by": "",
            "stages": [
                {
                    "stage": 0,
                    "possible": False,
                    "reason": "stage 0 is an end of the pipeline: it has no two neighbours",
                },
                {
                    "stage": 1,
                    "possible": True,
                    "reason": "stages 0 and 2, weighed by their squared gradient norms in the last "
                    "step",
                },
            ],
        },
    )
}
APPROXIMATE: Responses = {
    200: _example(
        "What the permission would come to, with dry_run; else the job, and what was allowed",
        {
            "would": "stage 1 is made anew from stages 0 and 2, weighed by their squared gradient "
            "norms in the last step, as soon as a trainer is free; the job is approximate since "
            "step 20 then. Otherwise it goes back to the seed, and loses 20 steps",
            "stages": [1],
            "lost_steps": 20,
            "why_not": ["row 0 (hand_over): 1 cell already lost"],
        },
    )
}
WITHDRAWN: Responses = {
    200: _example(
        "The job, and what was taken back",
        {
            "withdrawn": "alice takes back what alice has allowed for one recovery of stages 0 to "
            "2 that would lose more than 100 steps otherwise",
        },
    )
}
STREAM: Responses = {
    200: {
        "description": "Server-sent events",
        "content": {
            "text/event-stream": {"example": 'id: 1767225700000-0\nevent: plan\ndata: {"job": ...}'}
        },
    }
}
