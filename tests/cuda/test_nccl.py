"""NCCL on a real GPU, each case in a process of its own: one rank, or another that never comes.

Where there are two GPUs, two ranks are tried as well.
"""

import contextlib
import gc
import os
import threading
import time
from itertools import pairwise

import pytest
import torch
from tests.cuda.test_processes import heard
from tests.train.crew import ADDRESS, make_group
from tests.train.exact.test_reduction import LAYOUT, bits, gradients, sum_by_rule_3

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.rank.connections import GroupEnded
from mainstay_core.rank.steps.step_plan import Supply
from mainstay_train.base import device as devices
from mainstay_train.comm import mesh as comm_mesh
from mainstay_train.comm import nccl
from mainstay_train.comm.group import RANK, Group
from mainstay_train.comm.mesh import InnerMesh
from mainstay_train.comm.operations import Message
from mainstay_train.exact import numerics
from mainstay_train.exact.reduction import PartialStore, Reducer

pytestmark = pytest.mark.usefixtures("needs_cuda")
NUM_GROUPS = 8
"""How many come and go."""
LONG_CYCLES = 6_000_000_000
"""Of the device: some seconds."""


class Meeting:
    """A meeting at which all other ranks have said nothing, at once."""

    def meet(self, key, body, size, ended):
        del key, ended
        (rank,) = RANK.unpack(body[: RANK.size])
        return [body if peer == rank else RANK.pack(peer) for peer in range(size)]

    def wake(self):
        pass


def alone(rank=0, size=1, *, connect_s=30.0, timeout_s=200.0):
    """A group whose other ranks never come."""
    numerics.setup("cuda:0")
    return Group(
        name="alone",
        meeting=Meeting(),
        rank=rank,
        size=size,
        address=ADDRESS,
        backend="nccl",
        timeout_s=timeout_s,
        connect_s=connect_s,
    )


def swap(group, sent, received):
    exchange = group.start_exchange(received, sent, [len(received)], [len(sent)])
    group.finish_exchange(exchange)
    group.wait_for(devices.moment(sent.device))


def works(group):
    """Whether an exchange of a group of one rank gives what it should."""
    sent = torch.arange(5.0, device="cuda")
    received = torch.full((5,), -1.0, device="cuda")
    swap(group, sent, received)
    return received.tolist() == sent.tolist()


def _operations(pipe):
    began_s = time.monotonic()
    group = alone()
    group.connect()
    took_s = time.monotonic() - began_s
    raw = group.process_group
    x = torch.arange(6.0, device="cuda")
    raw.allreduce([x]).wait()
    gathered = [torch.empty(6, device="cuda")]
    raw.allgather([gathered], [x]).wait()
    scattered = torch.empty(6, device="cuda")
    raw.reduce_scatter([scattered], [[x]]).wait()
    group.wait_for(devices.moment(x.device))
    tensors = [x.tolist(), gathered[0].tolist(), scattered.tolist()]
    pipe.send((group.connected, works(group), tensors, took_s))


def test_a_communicator_of_one_rank_connects_and_computes(crew):
    connected, is_right, tensors, took_s = heard(crew.fork(_operations))
    print(f"connected after {took_s:.2f} s")  # noqa: T201 - for whoever runs this on a new machine
    assert connected
    assert is_right
    assert tensors == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]] * 3


def _together(pipe):
    group = alone()
    group.connect()
    sent = torch.arange(7.0, device="cuda")
    came = torch.empty(7, device="cuda")
    going, coming = group.send_and_receive(Message(sent, 0, 1), Message(came, 0, 1))
    group.finish(going)
    group.finish(coming)
    group.wait_for(devices.moment(sent.device))
    pipe.send((came.tolist(), going.is_over, coming.is_over))


def test_a_send_and_a_receive_are_one_operation(crew):
    assert heard(crew.fork(_together)) == ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0], True, True)


def _abort_idle(pipe):
    group = alone()
    group.connect()
    before = works(group)
    began_s = time.monotonic()
    group.shutdown("over")
    took_s = time.monotonic() - began_s
    whys = []
    for _ in range(2):
        try:
            works(group)
        except GroupEnded as end:
            whys.append(end.why)
    another = alone()
    another.connect()
    after = works(another)
    del group
    gc.collect()
    pipe.send((before, whys, after, works(another), took_s))


def test_a_group_that_is_ended_does_nothing_more_and_another_one_does(crew):
    before, whys, after, again, took_s = heard(crew.fork(_abort_idle))
    print(f"an abort took {took_s:.2f} s")  # noqa: T201
    assert (before, after, again) == (True, True, True)
    assert whys == ["over"] * 2


def _abort_started(pipe):
    """Another thread ends the group while the device has not come to its operation."""
    group = alone()
    group.connect()
    works(group)
    torch.cuda._sleep(LONG_CYCLES)
    sent, received = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
    exchange = group.start_exchange(received, sent, [4], [4])
    thread = threading.Thread(target=group.shutdown, args=("another one says so",))
    thread.start()
    thread.join()
    try:
        group.finish_exchange(exchange)
        told = "it counts"
    except GroupEnded as end:
        told = end.why
    torch.cuda.synchronize()
    fresh = torch.ones(3, device="cuda").sum().item()
    another = alone()
    another.connect()
    pipe.send((told, fresh, works(another)))


def test_what_an_ended_group_had_started_does_not_count(crew):
    assert heard(crew.fork(_abort_started)) == ("another one says so", 3.0, True)


def _abandon(pipe):
    group = alone()
    group.connect()
    torch.cuda._sleep(LONG_CYCLES)
    sent, received = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
    started = [group.start_exchange(received, sent, [4], [4])]
    began_s = time.monotonic()
    group.abandon(started)
    took_s = time.monotonic() - began_s
    torch.cuda.synchronize()
    pipe.send((group.ended, took_s))


def test_exchanges_are_abandoned(crew):
    ended, took_s = heard(crew.fork(_abandon))
    print(f"abandoned after {took_s:.2f} s")  # noqa: T201
    assert ended == "an exchange was given up"


def _late(pipe):
    """The operation's own timeout passes while the device is busy with something else."""
    # The same time bounds connecting, which took 0.7 s on a GPU that many processes shared.
    group = alone(timeout_s=2.0)
    group.connect()
    sent, received = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
    # It bounds the first exchange, too, which connects point to point.
    group.finish_exchange(group.start_exchange(received, sent, [4], [4]))
    torch.cuda.synchronize()
    torch.cuda._sleep(2 * LONG_CYCLES)
    group.finish_exchange(group.start_exchange(received, sent, [4], [4]))
    try:
        group.wait_for(devices.moment(sent.device))
        told = "in time"
    except GroupEnded as end:
        told = end.why
    group.shutdown("late")
    torch.cuda.synchronize()
    threading.Event().wait(3)  # torch's watchdog looks every second or so
    another = alone()
    another.connect()
    pipe.send((told, group.ended is not None, works(another)))


def test_a_process_outlives_an_operation_that_is_late(crew):
    told, is_ended, is_right = heard(crew.fork(_late))
    assert is_ended
    assert "the device was not done within 2 s" in told
    assert is_right


def _nobody_comes(pipe, connect_s, abort_s):
    group = alone(size=2, connect_s=connect_s)
    shut_s = []

    def end():
        began_s = time.monotonic()
        group.shutdown("the quorum is over")
        shut_s.append(time.monotonic() - began_s)

    thread = threading.Timer(abort_s, end)
    if abort_s:
        thread.start()
    began_s = time.monotonic()
    try:
        group.connect()
        told = "connected"
    except GroupEnded as ended:
        told = ended.why
    took_s = time.monotonic() - began_s
    if abort_s:
        thread.join()
    fresh = torch.ones(3, device="cuda").sum().item()
    pipe.send((told, took_s, shut_s, fresh))
    another = alone()
    another.connect()
    pipe.send(works(another))


def test_connecting_ends_within_its_bound_if_a_rank_never_comes(crew):
    worker = crew.fork(_nobody_comes, 4.0, 0)
    told, took_s, _, fresh = heard(worker, 45)
    print(f"after {took_s:.1f} s: {told}")  # noqa: T201
    assert told == "alone: not all ranks met within 4 s"
    assert fresh == 3.0
    assert took_s < 20
    assert heard(worker)


def test_connecting_ends_when_the_group_is_ended(crew):
    worker = crew.fork(_nobody_comes, 25.0, 1.5)
    told, took_s, shut_s, fresh = heard(worker, 60)
    print(f"after {took_s:.1f} s, the end itself took {shut_s} s: {told}")  # noqa: T201
    assert told == "the quorum is over"
    assert fresh == 3.0
    assert took_s < 12, "an abort ends an initialization that does not block"
    assert heard(worker)


def _settings(pipe):
    group = alone()
    group.connect()
    pipe.send({name: os.environ.get(name) for name in nccl.SETTINGS})
    with contextlib.suppress(AttributeError):
        assert group.process_group.options.config.blocking == 0


def test_torch_is_told_to_end_no_process(crew):
    assert heard(crew.fork(_settings)) == nccl.SETTINGS


def _mesh(pipe):
    group = alone()
    group.connect()
    comm_mesh.enter(group)
    inner = InnerMesh(size=1, index=0, device_type="cuda")
    told = comm_mesh.tell_all([3, 5], inner)
    said = comm_mesh.exchange_all(b"hello", inner)
    comm_mesh.leave()
    group.shutdown("over")
    pipe.send((told, said))


def test_an_inner_mesh_runs_over_it(crew):
    assert heard(crew.fork(_mesh)) == (((3, 5),), (b"hello",))


def _many(pipe):
    """Groups that come and go, as in a job of many faults."""
    numerics.setup("cuda:0")
    free = []
    for _ in range(NUM_GROUPS):
        group = alone()
        group.connect()
        assert works(group)
        group.shutdown("the next one comes")
        del group
        gc.collect()
        torch.cuda.synchronize()
        free.append(torch.cuda.mem_get_info()[0])
    pipe.send([value / 2**20 for value in free])


def test_groups_that_are_gone_leave_nothing(crew):
    free = heard(crew.fork(_many), 120)
    print("MiB free after each group:", [round(value) for value in free])  # noqa: T201
    # What is made once is made with the first groups. What groups leave behind goes on to grow;
    # whatever else the machine runs may take memory too, but not with each group.
    taken = [before - after for before, after in pairwise(free)]
    assert any(each < 1 for each in taken[-3:])


def _share(pipe, store, rank):
    at = numerics.setup("cuda:0")
    group = make_group(store, rank, 2, connect_s=20.0, backend="nccl")
    try:
        group.connect()
        pipe.send("connected")
    except InvalidSpecError as refused:
        pipe.send(str(refused))
    pipe.send(torch.ones(3, device=at).sum().item())


def test_two_ranks_on_one_gpu_are_refused_by_name(crew):
    workers = [crew.fork(_share, crew.store, rank) for rank in range(2)]
    told = [heard(worker) for worker in workers]
    print(told)  # noqa: T201
    assert told[0] == told[1]
    assert "spec.runtime.backend: is NCCL, which takes one rank on each GPU" in told[0]
    assert [heard(worker) for worker in workers] == [3.0, 3.0], "the device is as it was"


def _pair(pipe, store, rank):
    """All that two ranks do, each on a GPU of its own."""
    at = numerics.setup(f"cuda:{rank}")
    group = make_group(store, rank, 2, connect_s=20.0, backend="nccl")
    group.connect()
    pipe.send("connected")
    sent, received = torch.arange(4.0, device=at) + 10 * rank, torch.empty(4, device=at)
    group.finish_exchange(group.start_exchange(received, sent, [2, 2], [2, 2]))
    came = torch.empty(3, device=at)
    mine = Message(torch.full((3,), float(rank), device=at), 1 - rank, 7)
    for work in group.send_and_receive(mine, Message(came, 1 - rank, 7)):
        group.finish(work)
    group.wait_for(devices.moment(at))
    pipe.send((received.tolist(), came.tolist()))
    flats, held = gradients(4, 3), PartialStore(LAYOUT, 2, at)
    for shard_type in (0, 1) if rank == 0 else (2, 3):
        held.scratch.copy_(flats[shard_type])
        held.complete(shard_type)
    own = [Supply(partial=p, index=rank) for p in held.held()]
    pipe.send(own)
    reducer = Reducer(LAYOUT, at, 1 << 18, compares_wire=True)
    reduced = reducer.reduce(group, pipe.recv(), [0, 1], rank, held.partials)
    group.wait_for(devices.moment(at))
    pipe.send(torch.equal(bits(reduced.cpu()), bits(sum_by_rule_3(flats, 2, 2))))
    pipe.recv()  # one of the two is killed meanwhile
    threading.Timer(1.0, group.shutdown, args=("the other one is gone",)).start()
    began_s = time.monotonic()
    try:
        group.finish_exchange(group.start_exchange(received, sent, [2, 2], [2, 2]))
        group.wait_for(devices.moment(at))
        told = "it counts"
    except GroupEnded as end:
        told = end.why
    torch.cuda.synchronize()
    pipe.send((told, time.monotonic() - began_s))


def test_two_ranks_on_two_gpus_work(crew):
    if torch.cuda.device_count() < 2:
        pytest.skip("there are not two GPUs")
    workers = [crew.fork(_pair, crew.store, rank) for rank in range(2)]
    assert [heard(worker, 90) for worker in workers] == ["connected"] * 2
    assert [heard(worker) for worker in workers] == [
        ([0.0, 1.0, 10.0, 11.0], [1.0] * 3),
        ([2.0, 3.0, 12.0, 13.0], [0.0] * 3),
    ]
    table = [supply for worker in workers for supply in heard(worker)]
    for worker in workers:
        worker.say(table)
    assert [heard(worker) for worker in workers] == [True, True]
    workers[1].kill()
    workers[0].say()
    why, took_s = heard(workers[0])
    print(f"{why} after {took_s:.1f} s")  # noqa: T201
    assert why == "the other one is gone"
