"""Plans which living cells form whole replicas, after some cells of each stage were lost.

A lost cell breaks its replica's chain. The other cells of that chain still hold the state of their
stages, which does not depend on the replica. So the remains of broken chains are mated. The number
of whole replicas is then the least number of living cells of a stage, not the number of chains that
were not hit (64 replicas of 16 stages with 16 cells lost: 60.9 on average against 49.6). Living
cells that no chain needs are followers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.sparse import csr_array
from scipy.sparse.csgraph import min_weight_full_bipartite_matching

from mainstay_core.base.errors import InfeasiblePlanError, InvalidSpecError
from mainstay_core.base.words import count


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A living cell as chaining sees it.

    Attributes:
        cell_id: name of the cell, unique in the job, e.g. of its first slot.
        domain: failure domain; links inside of one are preferred.
        replica: replica that it served last; None for a newcomer. It decides
            only which lane a mated chain takes over.
    """

    cell_id: str
    domain: str = ""
    replica: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chaining:
    """Whole replicas made of living cells.

    Attributes:
        chains: per replica, ascending, its cells' ids in stage order.
        followers: per stage the living cells without a chain, ascending.
        links_changed: links (neighbouring cells of a chain) that were in no chain before.
        reason: one sentence for people.
    """

    chains: dict[int, tuple[str, ...]]
    followers: tuple[tuple[str, ...], ...]
    links_changed: int
    reason: str


def plan_chaining(
    living: Sequence[Sequence[Cell]],
    lanes: int,
    replicas_wanted: int,
    previous: Mapping[int, Sequence[str]] | None = None,
) -> Chaining:
    """Chain living cells to as many whole replicas as there can be.

    The number of replicas is the least number of living cells of a stage, at
    most ``replicas_wanted``. Among all ways to chain so many, the result minimises
    in this order:

    1. links changed: those of its chains that no previous chain has. Chains that
       are still whole stay as they are, which costs no optimum: a link that breaks
       one can always be exchanged for the chain's own. If there are more of them
       than replicas, those of the lowest replicas stay;
    2. links across failure domains, among the chains that are new.

    A new chain takes the lane from which most of its cells come, ties by the lowest
    lane. Equal arguments give equal plans, in whatever order the cells are listed.

    The new chains are vertex-disjoint paths through the stages: a minimum-weight
    perfect matching of cells' outgoing with next cells' incoming ends, where an
    unused cell is matched with itself. With b cells a stage outside of whole
    chains the graph has O(stages * b^2) edges.

    Args:
        living: per stage its living cells, in any order.
        lanes: homes of the job; replicas are named by them.
        replicas_wanted: number of replicas wanted, 1..lanes.
        previous: per replica the ids of its cells in stage order, lost ones included.

    Returns:
        The chains.

    Raises:
        InfeasiblePlanError: a stage has no living cell, so that no replica is whole.
        InvalidSpecError: two cells with one id, or numbers out of their range.
    """
    previous = {} if previous is None else previous
    _check_arguments(living, lanes, replicas_wanted, previous)
    fewest = min(range(len(living)), key=lambda stage: len(living[stage]))
    num_whole = min(replicas_wanted, len(living[fewest]))
    if num_whole == 0:
        raise InfeasiblePlanError(f"stage {fewest} has no living cell, so no replica is whole")
    alive = [{cell.cell_id for cell in cells} for cells in living]
    intact = [
        replica
        for replica, ids in sorted(previous.items())
        if all(cell_id in ids_alive for cell_id, ids_alive in zip(ids, alive, strict=True))
    ]
    chains = {replica: tuple(previous[replica]) for replica in intact[:num_whole]}
    used = set(chain.from_iterable(chains.values()))
    rest = [
        sorted((cell for cell in cells if cell.cell_id not in used), key=lambda cell: cell.cell_id)
        for cells in living
    ]
    links = {link for ids in previous.values() for link in pairwise(ids)}
    paths = _link_cells(rest, num_whole - len(chains), links)
    free_lanes = [lane for lane in range(lanes) if lane not in chains]
    chains |= _name_paths(paths, free_lanes)
    return _describe(living, chains, links, fewest, replicas_wanted)


def _check_arguments(
    living: Sequence[Sequence[Cell]],
    lanes: int,
    replicas_wanted: int,
    previous: Mapping[int, Sequence[str]],
) -> None:
    if not living:
        raise InvalidSpecError("living", "has no stage, must have at least one")
    if not 1 <= replicas_wanted <= lanes:
        raise InvalidSpecError("replicas_wanted", f"is {replicas_wanted}, must be in 1..{lanes}")
    ids = [cell.cell_id for cells in living for cell in cells]
    if len(set(ids)) != len(ids):
        twice = min(cell_id for cell_id in ids if ids.count(cell_id) > 1)
        raise InvalidSpecError("living", f"lists the cell {twice} twice")
    for replica, cells in previous.items():
        if not 0 <= replica < lanes or len(cells) != len(living):
            raise InvalidSpecError(
                "previous", f"replica {replica} must be in 0..{lanes - 1} with {len(living)} cells"
            )


def _link_cells(
    stages: Sequence[Sequence[Cell]], num_paths: int, links: set[tuple[str, str]]
) -> list[tuple[Cell, ...]]:
    """Return ``num_paths`` disjoint paths of least cost, with one cell per stage.

    Left nodes are the cells' outgoing ends and then the paths' starts. Right nodes are the cells'
    incoming ends and then the paths' ends. Every perfect matching has the same number of edges. So
    a weight of 1 on each changes nothing, while an edge of weight 0 would be no edge.
    """
    if num_paths == 0:
        return []
    cells = list(chain.from_iterable(stages))
    first = np.cumsum([0, *(len(stage) for stage in stages)])
    change = num_paths * len(stages) + 1
    edges = [(i, i, 1) for i in range(len(cells))]
    for path in range(len(cells), len(cells) + num_paths):
        edges += [(path, i, 1) for i in range(first[1])]
        edges += [(i, path, 1) for i in range(first[-2], first[-1])]
    for stage in range(len(stages) - 1):
        for i in range(first[stage], first[stage + 1]):
            for j in range(first[stage + 1], first[stage + 2]):
                known = (cells[i].cell_id, cells[j].cell_id) in links
                crosses = cells[i].domain != cells[j].domain
                edges.append((i, j, 1 + (0 if known else change) + crosses))
    left, right, weights = (np.array(column) for column in zip(*edges, strict=True))
    size = len(cells) + num_paths
    graph = csr_array((weights.astype(np.float64), (left, right)), shape=(size, size))
    following = min_weight_full_bipartite_matching(graph)[1].tolist()
    paths = []
    for path in range(len(cells), size):
        at = following[path]
        members = []
        while at < len(cells):
            members.append(cells[at])
            at = following[at]
        paths.append(tuple(members))
    return sorted(paths, key=lambda path: path[0].cell_id)


def _name_paths(
    paths: Sequence[tuple[Cell, ...]], free_lanes: Sequence[int]
) -> dict[int, tuple[str, ...]]:
    """Give each path the lane that most of its cells served."""
    if not paths:
        return {}
    served = np.array(
        [[sum(cell.replica == lane for cell in path) for lane in free_lanes] for path in paths]
    )
    # All paths agree about which lane is lower, so the lowest lanes win among equals.
    costs = np.arange(len(free_lanes)) - served * (len(paths) * len(free_lanes) + 1)
    rows, columns = linear_sum_assignment(costs)
    return {
        free_lanes[column]: tuple(cell.cell_id for cell in paths[row])
        for row, column in zip(rows.tolist(), columns.tolist(), strict=True)
    }


def _describe(
    living: Sequence[Sequence[Cell]],
    chains: Mapping[int, tuple[str, ...]],
    links: set[tuple[str, str]],
    fewest: int,
    replicas_wanted: int,
) -> Chaining:
    used = set(chain.from_iterable(chains.values()))
    followers = tuple(
        tuple(sorted(cell.cell_id for cell in cells if cell.cell_id not in used))
        for cells in living
    )
    changed = sum(link not in links for ids in chains.values() for link in pairwise(ids))
    reason = f"whole: {len(chains)} of {count(replicas_wanted, 'replica')}"
    if len(chains) < replicas_wanted:
        reason += f", as stage {fewest} has {count(len(living[fewest]), 'living cell')}"
    num_followers = sum(map(len, followers))
    reason += f"; {count(changed, 'link')} changed, {count(num_followers, 'follower')}"
    return Chaining(
        chains={replica: chains[replica] for replica in sorted(chains)},
        followers=followers,
        links_changed=changed,
        reason=reason,
    )
