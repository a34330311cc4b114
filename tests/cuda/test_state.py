"""States of a device that are healed, copied to the host and written to files."""

import pytest
import torch
from tests.train.crew import ADDRESS
from tests.train.state.test_directory import make_commit, open_directory

from mainstay_core.rank.serving import Source, Wanted
from mainstay_core.wire.segments import SegmentKind
from mainstay_train.base import device as devices
from mainstay_train.exact.optimizer import Shared, StageState
from mainstay_train.kernels import bits
from mainstay_train.model import workload
from mainstay_train.snapshots.unit_bytes import UnitBytes
from mainstay_train.state.chunks import Staging, cut
from mainstay_train.state.heal import HealClient, HealServer, masters_digest
from mainstay_train.state.host_copy import HostCopy
from mainstay_train.state.part_files import Part, read_description, read_tensors

SMALL = {"dim": 64, "layers": 2, "heads": 2, "kvHeads": 1, "hidden": 96, "sequence": 8}
WANTED = Wanted("q2-abc", 1, 7)


def make_state(device, seed=None, dtype="bfloat16"):
    """A stage's state; with a seed it has been trained a little."""
    model = workload.load("", {**SMALL, "dtype": dtype, "attention": "explicit"})
    state = StageState(model.build(model.stages(2)[1], device), model.optimizer)
    if seed is not None:
        state.initialize(seed)
        random = torch.Generator().manual_seed(seed)
        gradient = torch.randn(state.layout.size, generator=random).to(device)
        state.apply(state.layout.block_views(gradient), 1.0, 1e-3)
        devices.moment(state.blocks[0].device).wait()  # a source serves what is written
    return state


def told(state):
    return [bits.digest_of([t.tensor]) for t in state.everything()]


@pytest.mark.parametrize("to", ["device", "cpu"])
@pytest.mark.parametrize("where", ["device", "cpu"])
def test_a_state_is_healed_from_and_to_a_device(device, where, to):
    places = {"device": device, "cpu": torch.device("cpu")}
    source, joiner = make_state(places[where], 1), make_state(places[to])
    servers = [HealServer(ADDRESS, lambda *_: source) for _ in range(2)]
    sources = [Source(f"{pod}/0", s.address) for pod, s in zip("ab", servers, strict=True)]
    expected = masters_digest(source)
    found = HealClient(ADDRESS).copy(joiner, sources=sources, wanted=WANTED, expected=expected)
    assert found == expected
    assert told(joiner) == told(source)
    for state in (source, joiner):
        gradient = torch.ones(state.layout.size, device=state.blocks[0].device)
        state.apply(state.layout.block_views(gradient), 0.5, 1e-3)
    if where == to:
        assert told(joiner) == told(source)


def test_a_copy_is_compared_with_its_holders(device):
    source, joiner = make_state(device, 1), make_state(device)
    servers = [HealServer(ADDRESS, lambda *_: source) for _ in range(3)]
    sources = [Source(f"{pod}/0", s.address) for pod, s in zip("abc", servers, strict=True)]
    HealClient(ADDRESS).copy(
        joiner, sources=sources[:1], wanted=WANTED, expected="", holders=sources
    )
    assert told(joiner) == told(source)


def test_staged_bytes_are_those_of_the_chunk(device):
    state, other, host = make_state(device, 1), make_state(device), make_state("cpu")
    staging, here = Staging(device, 4096), Staging(torch.device("cpu"), 4096)
    chunks = [cut(s.flats(), 4096) for s in (state, other, host)]
    with staging.beside():
        for mine, theirs, of_host in zip(*chunks, strict=True):
            read = bytes(staging.read(mine))
            staging.memory(mine.size_bytes)[:] = read
            staging.write(theirs)
            here.memory(mine.size_bytes)[:] = read
            here.write(of_host)
            assert mine.digest() == theirs.digest() == of_host.digest()
    for copied in (other, host):
        copied.refresh()
        assert told(copied) == told(state)


def test_what_is_written_is_read_while_the_device_is_at_what_came_later(needs_cuda):
    state = make_state(needs_cuda, 1)
    chunks = cut(state.flats(), 4096)
    expected = [chunk.digest() for chunk in chunks]
    staging = Staging(needs_cuda, 4096, is_written=True)
    torch.cuda._sleep(20_000_000_000)  # seconds, as a send that nobody receives yet
    later = devices.moment(needs_cuda)
    with staging.beside():
        for chunk, digest in zip(chunks, expected, strict=True):
            staging.read(chunk)
            assert chunk.digest() == digest
    assert not later.is_over()


@pytest.mark.parametrize("limit_bytes", [4096, 5 * 2048, 1 << 30])
def test_a_copy_on_the_host_has_the_bits_of_its_moment(device, limit_bytes):
    state = make_state(device, 3)
    copy = HostCopy(state, limit_bytes, 2048)
    for _ in range(2):  # the memory is used again
        before = {t.id: t.tensor.clone().reshape(-1).cpu() for t in state.state_tensors()}
        copy.begin()
        if limit_bytes > copy.size_bytes:
            assert not copy.wait_left(0)
            state.initialize(7)  # while the copy is on its way
        for chunk, copied in copy.chunks():
            assert copied.device.type == "cpu"
            assert torch.equal(copied, before[chunk.flat.id][chunk.start : chunk.stop])
        copy.end()


def test_parts_are_written_and_read_again_to_a_device(device, tmp_path):
    state = make_state(device, 3)
    copy = HostCopy(state, 1 << 20, 1 << 12)
    copy.begin()
    tensors = copy.tensors
    part = Part(
        stage=0,
        tensors=tensors,
        chunks=copy.chunks(),
        commit=make_commit(5),
        commit_chain="chain",
        masters=Shared.of(t for t in tensors if t.kind == "master").whole.hex(),
    )
    directory = open_directory(tmp_path)
    directory.write_part(5, "n1", part)
    copy.end()
    directory.complete(5, "n1", [(0, 0)])
    manifest, _ = directory.look()
    (listed,) = manifest.parts
    version = tmp_path / "step-00000005"
    described = read_description(version, listed, 5)
    for where in (device, torch.device("cpu")):
        wanted = {t.id: torch.empty_like(t.tensor, device=where) for t in tensors}
        read_tensors(version, listed, described, wanted)
        for tensor in tensors:
            assert bits.digest_of([wanted[tensor.id]]) == bits.digest_of([tensor.tensor])


@pytest.mark.parametrize("kind", [SegmentKind.STATE, SegmentKind.GRADIENT, SegmentKind.COMPUTE])
def test_units_are_written_to_segments_and_read_again(device, kind):
    states, units = [], []
    for seed in (1, None):
        states.append(make_state(device, seed))
        reduced = states[-1].layout.allocate(device=device)
        reduced.fill_(0.5 if seed else 0.0)
        units.append(UnitBytes(states[-1], reduced))
    for unit in range(len(units[0].names)):
        memory = memoryview(bytearray(units[0].size_bytes(unit, kind)))
        if not memory.nbytes:
            continue
        units[0].write(unit, kind, memory)
        digest = units[0].digest(unit, kind, memory)
        units[1].read(unit, kind, memory)
        again = memoryview(bytearray(memory.nbytes))
        units[1].write(unit, kind, again)
        assert units[1].digest(unit, kind, again) == digest
        assert bytes(again) == bytes(memory)
