"""The gather: real sockets, the server in one event loop, members as threads."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from mainstay_agent.gather import GatherServer
from mainstay_core.base.errors import LocalProtocolError
from mainstay_core.base.frames import PREFIX
from mainstay_core.gather.client import QuorumAborted
from mainstay_train.comm.gather_client import GatherClient

HOST = "127.0.0.1"


@dataclass
class Star:
    """A gather server in a thread of its own, and the members that a test made."""

    server: GatherServer
    loop: asyncio.AbstractEventLoop
    address: str
    clients: list[GatherClient] = field(default_factory=list)

    def member(
        self,
        index: int,
        size: int,
        quorum: str = "q1-a",
        incarnation: str | None = None,
        on_abort: Callable[[str, tuple[int, ...]], None] | None = None,
    ) -> GatherClient:
        client = GatherClient(
            self.address, quorum, index, size, incarnation or f"life-{index}", HOST, on_abort
        )
        self.clients.append(client)
        return client

    def quorum(self, size: int, name: str = "q1-a") -> list[GatherClient]:
        members = [self.member(index, size, name) for index in range(size)]
        for result in gather(members, "hello"):
            assert len(result) == size
        return members

    def call(self, function: Callable[[], Any]) -> Any:
        async def run() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result()


@pytest.fixture
def star() -> Iterator[Star]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = GatherServer()
    address = asyncio.run_coroutine_threadsafe(server.start(HOST), loop).result()
    made = Star(server, loop, address)
    yield made
    for client in made.clients:
        client.close()
    asyncio.run_coroutine_threadsafe(server.close(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def gather(members: list[GatherClient], key: str) -> list[list[bytes]]:
    for index, member in enumerate(members):
        member.post(key, f"{key}-{index}".encode() * index)
    return [member.wait(key) for member in members]


def in_thread(function: Callable[[], Any]) -> Future[Any]:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(function)
    pool.shutdown(wait=False)
    return future


def test_all_get_all_bodies_in_index_order(star: Star) -> None:
    members = star.quorum(4)
    expected = [f"vote-{index}".encode() * index for index in range(4)]
    assert gather(members, "vote") == [expected] * 4


def test_keys_do_not_wait_for_each_other(star: Star) -> None:
    first, second = star.quorum(2)
    first.post("a", b"1")
    first.post("b", b"2")
    second.post("b", b"3")
    assert first.wait("b") == second.wait("b") == [b"2", b"3"]
    second.post("a", b"4")
    assert first.wait("a") == [b"1", b"4"]


def test_a_large_body_arrives_whole(star: Star) -> None:
    members = star.quorum(3)
    bodies = [bytes([index]) * 3_000_000 for index in range(3)]
    posts = [
        in_thread(lambda m=m, b=b: m.post("big", b)) for m, b in zip(members, bodies, strict=True)
    ]
    assert all(member.wait("big") == bodies for member in members)
    for post in posts:
        post.result()


def test_when_a_member_dies_all_others_are_aborted_with_it_as_suspect(star: Star) -> None:
    members = star.quorum(4)
    waits = []
    for member in members[:2] + members[3:]:
        member.post("vote", b"yes")
        waits.append(in_thread(lambda m=member: m.wait("vote")))
    members[2].shutdown("killed")
    for wait in waits:
        with pytest.raises(QuorumAborted) as caught:
            wait.result()
        assert caught.value.suspects == (2,)


def test_an_abort_names_its_suspects_to_all_others_at_once(star: Star) -> None:
    told: list[tuple[str, tuple[int, ...]]] = []
    heard = threading.Event()
    told_self: list[str] = []

    def on_abort(why: str, suspects: tuple[int, ...]) -> None:
        told.append((why, suspects))
        heard.set()

    members = [
        star.member(0, 3, on_abort=lambda why, _: told_self.append(why)),
        star.member(1, 3, on_abort=on_abort),
        star.member(2, 3),
    ]
    gather(members, "hello")
    members[0].abort("the stage group failed", (2,))
    assert heard.wait(60)
    assert told == [("the stage group failed", (2,))]
    with pytest.raises(QuorumAborted, match="the stage group failed"):
        members[2].wait("vote")
    with pytest.raises(QuorumAborted, match="the stage group failed"):
        members[0].post("vote", b"")
    members[0].close()
    assert told_self == []


def test_who_joins_after_an_abort_is_told(star: Star) -> None:
    members = [star.member(index, 3) for index in range(2)]
    members[0].post("settle", b"0")
    members[1].post("settle", b"1")
    members[0].abort("no heal source", (1,))
    with pytest.raises(QuorumAborted):
        members[1].wait("settle")
    late = star.member(2, 3)
    with pytest.raises(QuorumAborted, match="no heal source") as caught:
        late.wait("settle")
    assert caught.value.suspects == (1,)


def test_a_restarted_process_does_not_enter_a_running_quorum(star: Star) -> None:
    members = star.quorum(2)
    newcomer = star.member(1, 2, incarnation="another-life")
    with pytest.raises(QuorumAborted, match="another-life"):
        newcomer.wait("vote")
    assert gather(members, "vote")[0] == [b"", b"vote-1"]


def test_a_member_with_another_size_is_refused(star: Star) -> None:
    star.quorum(2)
    with pytest.raises(QuorumAborted, match="has 2 members, not 3"):
        star.member(2, 3).wait("vote")


def test_what_was_gathered_before_the_end_is_still_returned(star: Star) -> None:
    members = star.quorum(2)
    for index, member in enumerate(members):
        member.post("vote", bytes([index]))
    assert members[0].wait("vote") == [b"\0", b"\1"]
    members[0].shutdown("killed")
    with pytest.raises(QuorumAborted):
        members[1].wait("next")
    assert members[1].wait("vote") == [b"\0", b"\1"]


def test_shutdown_wakes_a_waiting_thread_without_calling_on_abort(star: Star) -> None:
    told: list[str] = []
    member = star.member(0, 2, on_abort=lambda why, _: told.append(why))
    member.post("vote", b"")
    wait = in_thread(lambda: member.wait("vote"))
    member.shutdown("a newer plan is here")
    with pytest.raises(QuorumAborted, match="a newer plan is here"):
        wait.result()
    member.close()
    assert told == []


def test_members_that_move_on_together_do_not_disturb_each_other(star: Star) -> None:
    members = star.quorum(3)
    members[0].leave()
    members[1].leave()
    # The room of the next quorum works although the old one still has a member.
    assert gather(star.quorum(3, "q2-b"), "settle")[0][1] == b"settle-1"
    assert members[2].ended is None
    members[2].post("vote", b"")
    with pytest.raises(QuorumAborted, match="has moved on") as caught:
        members[2].wait("vote")
    assert caught.value.suspects == ()


def test_who_waits_for_a_member_that_leaves_is_aborted(star: Star) -> None:
    members = star.quorum(2)
    members[0].post("vote", b"")
    wait = in_thread(lambda: members[0].wait("vote"))
    members[1].leave()
    with pytest.raises(QuorumAborted, match="member 1 has moved on"):
        wait.result()


def test_a_room_that_all_have_left_stays_closed(star: Star) -> None:
    for member in star.quorum(2):
        member.leave()
        member.close()
    late = star.member(0, 2)
    with pytest.raises(QuorumAborted):
        late.wait("vote")


def test_quorums_with_one_id_and_two_nonces_never_mix(star: Star) -> None:
    ours, theirs = star.quorum(2, "q5-a"), star.quorum(2, "q5-b")
    theirs[0].abort("gone", ())
    with pytest.raises(QuorumAborted):
        theirs[1].wait("vote")
    assert len(gather(ours, "vote")) == 2


def test_a_connection_refused_is_an_abort_that_names_the_server(star: Star) -> None:
    asyncio.run_coroutine_threadsafe(star.server.close(), star.loop).result()
    with pytest.raises(QuorumAborted, match=star.address):
        star.member(0, 2).post("vote", b"")


def test_posting_a_key_twice_is_a_bug_of_the_caller(star: Star) -> None:
    member = star.member(0, 2)
    member.post("vote", b"")
    with pytest.raises(LocalProtocolError):
        member.post("vote", b"")


def call(star: Star) -> socket.socket:
    host, _, port = star.address.rpartition(":")
    caller = socket.create_connection((host, int(port)))
    caller.settimeout(30)
    return caller


def test_a_frame_that_a_stranger_announces_is_not_waited_for(star: Star) -> None:
    """Held until it is complete, 2 GiB would be the supervisor's memory."""
    with call(star) as stranger:
        stranger.sendall(PREFIX.pack(2, 2 << 30) + b"{}")
        with pytest.raises(ConnectionError):
            stranger.sendall(bytes(64 << 20))


def test_strangers_do_not_keep_a_pod_from_ending(star: Star) -> None:
    """It is told to end once nobody who counts is connected."""
    members = star.quorum(2)
    with call(star) as silent:
        for member in members:
            member.leave()
        asyncio.run_coroutine_threadsafe(star.server.wait_quiet(), star.loop).result(timeout=30)
        silent.close()


def test_members_meet_in_the_midst_of_strangers(star: Star) -> None:
    idle = [call(star) for _ in range(300)]
    members = star.quorum(4)
    idle += [call(star) for _ in range(300)]
    assert gather(members, "vote") == [[f"vote-{i}".encode() * i for i in range(4)]] * 4
    for each in idle:
        each.close()
