"""Processes that share one device: forked as trainers are, and connected over gloo."""

import os

import pytest
import torch
from tests.train.crew import make_group
from tests.train.exact.test_reduction import LAYOUT, bits, gradients, sum_by_rule_3
from torch.distributed import distributed_c10d

from mainstay_core.rank.connections import GroupEnded
from mainstay_core.rank.steps.step_plan import Supply
from mainstay_train.base import device as devices
from mainstay_train.comm import mesh as comm_mesh
from mainstay_train.comm.mesh import InnerMesh
from mainstay_train.comm.operations import Message
from mainstay_train.exact import numerics
from mainstay_train.exact.reduction import PartialStore, Reducer

WITHIN_S = 60


def heard(worker, within_s=WITHIN_S):
    """What a worker says; it may not stay silent."""
    assert worker.pipe.poll(within_s), "the worker says nothing: it hangs"
    return worker.hear()


def there(device):
    """The device of a worker, set up as a trainer does."""
    return numerics.setup(devices.choose_device("auto", 0) if device == "cuda" else device)


def _fork(pipe, device):
    began_with = torch.cuda.is_initialized()
    x = torch.arange(10.0, device=there(device))
    pipe.send((began_with, (x @ x).item(), os.getpid()))


def test_trainers_that_are_forked_from_a_warm_parent_use_the_device(crew, device):
    workers = [crew.fork(_fork, device.type) for _ in range(2)]
    told = [heard(worker) for worker in workers]
    assert [t[:2] for t in told] == [(False, 285.0)] * 2


def _exchange(pipe, store, rank, device):
    at = there(device)
    group = make_group(store, rank, 2)
    group.connect()
    sent = torch.arange(4.0, device=at) + 10 * rank
    received = torch.empty(4, device=at)
    group.finish_exchange(group.start_exchange(received, sent, [2, 2], [2, 2]))
    came = torch.empty(3, device=at)
    mine = Message(torch.full((3,), float(rank), device=at), 1 - rank, 7)
    works = group.send_and_receive(mine, Message(came, 1 - rank, 7))
    for work in works:
        group.finish(work)
    group.wait_for(devices.moment(at))
    pipe.send((received.tolist(), came.tolist()))


def test_ranks_exchange_tensors_of_one_device_over_gloo(crew, device):
    workers = [crew.fork(_exchange, crew.store, rank, device.type) for rank in range(2)]
    assert heard(workers[0]) == ([0.0, 1.0, 10.0, 11.0], [1.0] * 3)
    assert heard(workers[1]) == ([2.0, 3.0, 12.0, 13.0], [0.0] * 3)


def _reduce(pipe, store, rank, device):
    at = there(device)
    group = make_group(store, rank, 2)
    group.connect()
    flats, held = gradients(4, 3), PartialStore(LAYOUT, 2, at)
    for shard_type in (0, 1) if rank == 0 else (2, 3):
        held.scratch.copy_(flats[shard_type])
        held.complete(shard_type)
    table = [Supply(partial=p, index=rank) for p in held.held()]
    pipe.send(table)
    table = pipe.recv()
    reducer = Reducer(LAYOUT, at, 1 << 18, compares_wire=True)
    for _ in range(2):
        reduced = reducer.reduce(group, table, [0, 1], rank, held.partials)
    (differing,) = reducer.differing
    same = torch.equal(bits(reduced.cpu()), bits(sum_by_rule_3(flats, 2, 2)))
    pipe.send((same, differing.tolist()))


def test_cells_on_one_device_reduce_by_rule_3(crew, device):
    workers = [crew.fork(_reduce, crew.store, rank, device.type) for rank in range(2)]
    table = [supply for worker in workers for supply in heard(worker)]
    for worker in workers:
        worker.say(table)
    assert [heard(worker) for worker in workers] == [(True, [0, 0])] * 2


def _cell(pipe, store, rank, device):
    at = there(device)
    group = make_group(store, rank, 2)
    group.connect()
    comm_mesh.enter(group)
    inner = InnerMesh(size=2, index=rank, device_type=at.type)
    told = comm_mesh.tell_all([rank, 5], inner)
    said = comm_mesh.exchange_all(b"x" * (3 + rank), inner)
    comm_mesh.leave()
    pipe.send((told, said))


def test_ranks_of_a_cell_tell_each_other_on_one_device(crew, device):
    workers = [crew.fork(_cell, crew.store, rank, device.type) for rank in range(2)]
    assert [heard(w) for w in workers] == [(((0, 5), (1, 5)), (b"xxx", b"xxxx"))] * 2


def _collectives(pipe, store, rank, device):
    """What DTensor and its kind call of an inner mesh, and what a user's code may."""
    at = there(device)
    group = make_group(store, rank, 2)
    group.connect()
    comm_mesh.enter(group)
    functional, name = torch.ops._c10d_functional, comm_mesh.GROUP_NAME
    mine = torch.arange(4.0, device=at) + rank
    started = {
        "all_reduce": functional.all_reduce(mine, "sum", name),
        "all_gather": functional.all_gather_into_tensor(mine, 2, name),
        "reduce_scatter": functional.reduce_scatter_tensor(mine, "sum", 2, name),
        "all_to_all": functional.all_to_all_single(mine, [2, 2], [2, 2], name),
        "broadcast": functional.broadcast(mine, 0, name),
    }
    yielded = {kind: functional.wait_tensor(result).tolist() for kind, result in started.items()}
    raw = distributed_c10d._resolve_process_group(name)
    whole, added = torch.empty(8, device=at), mine.clone()
    raw._allgather_base(whole, mine).wait()
    raw.allreduce([added]).wait()
    yielded |= {"whole": whole.tolist(), "added": added.tolist(), "mine": mine.tolist()}
    comm_mesh.leave()
    pipe.send(yielded)


def test_every_collective_of_a_mesh_reaches_the_device(crew, device):
    workers = [crew.fork(_collectives, crew.store, rank, device.type) for rank in range(2)]
    first, second = (heard(worker) for worker in workers)
    gathered = [0.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 4.0]
    summed = [1.0, 3.0, 5.0, 7.0]
    for each in (first, second):
        assert each["all_reduce"] == each["added"] == summed
        assert each["all_gather"] == each["whole"] == gathered
        assert each["broadcast"] == [0.0, 1.0, 2.0, 3.0]
    assert (first["reduce_scatter"], second["reduce_scatter"]) == (summed[:2], summed[2:])
    assert (first["all_to_all"], second["all_to_all"]) == (
        [0.0, 1.0, 1.0, 2.0],
        [2.0, 3.0, 3.0, 4.0],
    )
    assert (first["mine"], second["mine"]) == ([0.0, 1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0])


def _lost(pipe, store, rank, device):
    at = there(device)
    group = make_group(store, rank, 2)
    group.connect()
    pipe.send("connected")
    pipe.recv()
    try:
        sent, received = torch.zeros(2, device=at), torch.empty(2, device=at)
        group.finish_exchange(group.start_exchange(received, sent, [1, 1], [1, 1]))
    except GroupEnded:
        pipe.send("ended")


def test_a_rank_whose_peer_is_killed_hears_of_it(crew, device):
    workers = [crew.fork(_lost, crew.store, rank, device.type) for rank in range(2)]
    assert [heard(worker) for worker in workers] == ["connected"] * 2
    workers[1].kill()
    workers[0].say()
    assert heard(workers[0]) == "ended"


@pytest.mark.parametrize("device_name", ["cpu", "cuda"])
def test_each_worker_has_the_arithmetic_of_its_device(crew, device, device_name):
    if device_name != device.type:
        pytest.skip("of another device")
    worker = crew.fork(_arithmetic, device_name)
    assert heard(worker) == (True, "highest", ":4096:8")


def _arithmetic(pipe, device):
    there(device)
    pipe.send(
        (
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
            os.environ["CUBLAS_WORKSPACE_CONFIG"],
        )
    )
