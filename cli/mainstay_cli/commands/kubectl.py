"""``kubectl mainstay``: the same commands for the jobs of a cluster.

kubectl runs what is called ``kubectl-mainstay`` on PATH and hands over everything
that follows. Options that say which cluster may stand anywhere, as with kubectl.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from datetime import datetime
from typing import Annotated, Any, cast

import typer

from mainstay_cli.base.entry import run_app
from mainstay_cli.base.exits import CliError, UsageError
from mainstay_cli.cluster.jobs import ClusterJob, ClusterJobs, Options
from mainstay_cli.commands import (
    dmr,
    faults,
    findings,
    lineage,
    operations,
    run_report,
    snapshot_copies,
    status,
    timeline,
)
from mainstay_cli.commands.arguments import AS_JSON, JOB
from mainstay_cli.local import runs
from mainstay_core.base.words import printable_lines
from mainstay_core.job.sections import DEFAULT_MANAGER
from mainstay_core.pool.conditions import code_of
from mainstay_core.wire.api import ApiError

PROGRAM = "kubectl mainstay"
CLUSTER_OPTIONS = """
Options of all commands, anywhere, as with kubectl:

  -n, --namespace NAME: namespace of the job

  --context NAME: context of the kubeconfig

  --kubeconfig FILE: instead of KUBECONFIG or ~/.kube/config

  --api WHERE: NAMESPACE/SERVICE:PORT or URL of the api (or MAINSTAY_API); found by itself

  --service-account [NAMESPACE/]NAME: ask the api as this account, by a token for the api alone
"""
UNSEEN_S = 60.0
"""An operator looks at a new job within a second, and after its own start within this."""
_RANK = re.compile(r"r(\d+)\.s(\d+)(?:\.i(\d+))?")

app = typer.Typer(
    name=PROGRAM,
    help="TrainingJobs of a cluster: where they stand, what happened to them, their ranks' logs.",
    epilog=CLUSTER_OPTIONS,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(faults.app, name="faults")
stores = typer.Typer(
    help="List and verify what the pods of a job hold of its state.", no_args_is_help=True
)
stores.command("ls", help=snapshot_copies.LS_HELP)(snapshot_copies.ls)
stores.command("verify", help=snapshot_copies.VERIFY_HELP)(snapshot_copies.verify)
app.add_typer(stores, name="snapshots")
checks = typer.Typer(
    help="Show which checks by re-execution a job executes; mainstay dmr profiles and plans them.",
    no_args_is_help=True,
)
checks.command("show", help=dmr.SHOW_HELP)(dmr.show)
app.add_typer(checks, name="dmr")
app.command("findings", help=findings.HELP)(findings.show)
app.command("timeline", help=timeline.HELP)(timeline.show)
app.command("report", help=run_report.HELP)(run_report.show)
app.command("lineage", help=lineage.LINEAGE_HELP)(lineage.show)
app.command("approximate", help=lineage.APPROXIMATE_HELP)(lineage.approximate)
app.command("drain", help=operations.DRAIN_HELP)(operations.drain)


@app.command(
    "status",
    help="Show a job: conditions, step, quorum, ranks with pods, recovery.\n\n"
    "Example: kubectl mainstay status llama-tiny -n research",
)
def show_status(job: JOB = None, as_json: AS_JSON = False) -> None:
    found = _find(job)
    live: dict[str, Any] = {}
    problem = ""
    unseen = explain_unseen(found.manifest, found.cluster.kube.now_s)
    try:
        live = asyncio.run(status.fetch(found))
    except (ApiError, CliError) as error:
        # Where nobody serves the namespace, there may be no api, or none that this user knows.
        if not unseen and not isinstance(error, ApiError):
            raise
        problem = "\n  ".join(filter(None, (unseen, str(error))))
    if as_json:
        told = {"problem": problem} if problem else {}
        print(json.dumps({"status": found.manifest.get("status"), **live, **told}, indent=1))
    else:
        print(render_object(found.manifest))
        print(status.render(live) if live else printable_lines(f"  {problem}"))


@app.command(
    "logs",
    help="Print the log of the pod that serves a rank now. A rank keeps its name when another pod "
    "takes its place.\n\n"
    "Examples:\n\n"
    "  kubectl mainstay logs llama-tiny --rank r1.s0 --follow\n\n"
    "  kubectl mainstay logs llama-tiny --rank r0.s1 --container supervisor --tail 50",
)
def print_logs(
    job: JOB = None,
    rank: Annotated[str, typer.Option(help="As in status: r1.s0, or r1.s0.i1.")] = "r0.s0",
    container: Annotated[str, typer.Option("-c", "--container", help="Its container.")] = "trainer",
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Print what comes.")] = False,
    tail: Annotated[int | None, typer.Option(help="Only so many last lines.", min=0)] = None,
    previous: Annotated[
        bool, typer.Option("-p", "--previous", help="Of the container before its restart.")
    ] = False,
) -> None:
    found = _find(job)
    name = find_pod(asyncio.run(_fetch_members(found)), rank)
    path = f"/api/v1/namespaces/{found.namespace}/pods/{name}/log"
    params = {
        "container": container,
        "follow": str(follow).lower(),
        "previous": str(previous).lower(),
        **({"tailLines": str(tail)} if tail is not None else {}),
    }
    for line in found.cluster.kube.stream_lines(path, **params):
        print(line, flush=follow)


def find_pod(members: list[dict[str, Any]], rank: str) -> str:
    """Return the name of the pod that serves a rank.

    Args:
        members: as the api lists them.
        rank: ``r1.s0``, or ``r1.s0.i1`` where a stage has several ranks.

    Raises:
        UsageError: there is no such rank now.
    """
    match = _RANK.fullmatch(rank)
    if match is None:
        raise UsageError(f"--rank: {rank!r} is no rank; name one as in status, e.g. r1.s0")
    replica, stage, inner = (int(number or 0) for number in match.groups())
    for member in members:
        if (member["replica"], member["stage"], member["inner"]) == (replica, stage, inner):
            return str(member["slot"]).rpartition("/")[0]
    there = ", ".join(str(m["rank"]) for m in members if m.get("replica") is not None)
    raise UsageError(f"--rank: nobody serves {rank} now; there are: {there or 'none'}")


def render_object(manifest: dict[str, Any]) -> str:
    """Return what the cluster itself says of a job: its state, and conditions worth a look."""
    seen = manifest.get("status") or {}
    where = f"{manifest['metadata']['namespace']}/{manifest['metadata']['name']}"
    counts = [
        f"{words} {seen[key]}"
        for key, words in (("ready", "pods ready"), ("spares", "spares"))
        if seen.get(key)
    ]
    head = [seen.get("state") or "not seen by the operator yet", *counts]
    lines = [f"{where}: {', '.join(head)}"]
    lines += [
        f"  {c['type']}: {c['message'] or c['reason']}"
        for c in seen.get("conditions", [])
        if is_worth_a_look(c)
    ]
    return printable_lines("\n".join(lines))


def explain_unseen(manifest: dict[str, Any], now_s: float) -> str:
    """Return why nobody has looked at a job for long, and what to do; '' if somebody has.

    Args:
        manifest: the TrainingJob.
        now_s: wall clock of the API server.
    """
    metadata, spec = manifest["metadata"], manifest.get("spec") or {}
    manager = spec.get("managedBy", DEFAULT_MANAGER)
    if manager != DEFAULT_MANAGER:
        return f"spec.managedBy is {manager}: Mainstay's operator leaves this job to it"
    if (manifest.get("status") or {}).get("observedGeneration") is not None:
        return ""
    age_s = now_s - datetime.fromisoformat(metadata["creationTimestamp"]).timestamp()
    if age_s < UNSEEN_S:
        return ""
    namespace = metadata["namespace"]
    return (
        f"no operator has looked at it in {age_s:.0f} s: none seems to serve namespace "
        f"{namespace}.\n"
        f"  Make the job in a namespace that is served, or have {namespace} served as well, by "
        f"whoever installed Mainstay:\n"
        f"    helm get values RELEASE -n RELEASE_NAMESPACE --all  # watchNamespaces, rbac.cluster\n"
        f"    helm upgrade RELEASE CHART -n RELEASE_NAMESPACE --reset-then-reuse-values "
        f"--set watchNamespaces='{{OTHERS,{namespace}}}'\n"
        f"  If it is served already, look whether the operator runs:\n"
        f"    kubectl get deployments -A -l app.kubernetes.io/part-of=mainstay"
    )


def is_worth_a_look(condition: dict[str, Any]) -> bool:
    """Return whether a condition says that something is not as it should be, or over."""
    if condition["type"] == "Initialized" or code_of(condition) in ("NoneWanted", "NotStarted"):
        return False
    if condition["type"] == "Ready":
        return bool(condition["status"] != "True")
    good = ("Protected", "SparesAvailable", "Exact")
    wrong_if = "False" if condition["type"] in good else "True"
    return bool(condition["status"] == wrong_if)


def main() -> None:
    """Run the command line."""
    options, rest = parse_options(sys.argv[1:])
    runs.PLACE.set(ClusterJobs(options))
    run_app(app, rest, PROGRAM)


def parse_options(arguments: list[str]) -> tuple[Options, list[str]]:
    """Return the options that say which cluster, wherever they stand, and the rest."""
    parser = argparse.ArgumentParser(prog=PROGRAM, add_help=False, allow_abbrev=False)
    parser.add_argument("-n", "--namespace")
    parser.add_argument("--context")
    parser.add_argument("--kubeconfig")
    parser.add_argument("--api")
    parser.add_argument("--service-account", dest="account")
    known, rest = parser.parse_known_args(arguments)
    return Options(**vars(known)), rest


def _find(job: str | None) -> ClusterJob:
    return cast(ClusterJob, runs.find(job))


async def _fetch_members(job: ClusterJob) -> list[dict[str, Any]]:
    async with job.connect() as api:
        return list(await api.fetch(job.job, "members"))


if __name__ == "__main__":
    main()
