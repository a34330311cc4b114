"""Plans pushed as server-sent events: first the current one, then each, and none is lost."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest

from mainstay_api.store import RedisStore
from mainstay_api.streams import Streams
from mainstay_core.base.ids import JobUid


def test_a_new_listener_gets_the_current_plan_first(job: Any, listen: Any) -> None:
    job.start()
    listener = listen(job)
    listener.wait(lambda each: each.plans() == [1])
    job.kill(1)
    listener.wait(lambda each: each.plans() == [1, 2])


def test_a_listener_before_the_first_plan_gets_it_when_it_comes(job: Any, listen: Any) -> None:
    listener = listen(job)
    job.start()
    listener.wait(lambda each: each.plans() == [1])


def test_resuming_brings_what_was_missed(job: Any, listen: Any) -> None:
    job.start(num_pods=4)
    first = listen(job)
    first.wait(lambda each: each.plans() == [1])
    seen = first.events[-1][0]
    first.close()
    job.kill(1)
    job.settle()
    resumed = listen(job, last_id=seen)
    job.kill(2)
    resumed.wait(lambda each: each.plans()[-1] == 3)
    with_id = [data["quorum"]["id"] for entry, _, data in resumed.events if entry]
    assert with_id == [2, 3], "each missed plan once, in order"


def test_history_is_not_pushed(job: Any, listen: Any) -> None:
    listener = listen(job)
    job.start()
    job.api.post(f"{job.path}/stop")
    listener.wait(lambda each: "stop" in each.kinds())
    assert listener.kinds() == ["plan", "stop"]


def test_a_listener_that_comes_after_the_end_is_told_so(job: Any, listen: Any) -> None:
    job.start()
    job.api.post(f"{job.path}/stop")
    listener = listen(job)
    listener.wait(lambda each: each.kinds() == ["plan", "stop"])
    assert listener.events[-1][2]["state"] == "stopped"


def test_a_fault_on_a_spare_is_pushed_with_its_pod(api: Any, new_job: Any, listen: Any) -> None:
    job = new_job(api, faults=[{"id": "f0", "step": 1, "action": "kill-pod", "spare": 0}])
    job.start(num_pods=5)
    listener = listen(job)
    job.commit(0)
    listener.wait(lambda each: "inject" in each.kinds())
    data = listener.events[-1][2]
    assert (data["id"], data["pod"], data["action"]) == ("f0", "pod-4", "kill-pod")


def test_every_replica_of_the_api_pushes_what_any_of_them_decides(
    new_api: Any, new_job: Any, listen: Any
) -> None:
    one, other = new_api(), new_api()
    job = new_job(one)
    job.start()
    far = listen(_at(job, other))
    far.wait(lambda each: each.plans() == [1])
    job.kill(1)
    far.wait(lambda each: each.plans() == [1, 2])


def _at(job: Any, api: Any) -> Any:
    """The same job through another api."""
    moved = copy.copy(job)
    moved.api = api
    return moved


def test_an_idle_stream_is_kept_alive(new_api: Any, new_job: Any, listen: Any) -> None:
    job = new_job(new_api(keep_alive_s=0.05))
    listener = listen(job)
    listener.wait(lambda each: each.comments >= 2)


def test_streams_end_with_the_server(new_api: Any, new_job: Any, listen: Any) -> None:
    api = new_api()
    job = new_job(api)
    listeners = [listen(job) for _ in range(3)]
    api._server.handle_exit(15, None)
    for listener in listeners:
        assert listener.ended.wait(timeout=60)


def test_a_stream_ends_when_the_store_is_away_and_can_be_opened_again(
    own_redis: Any, new_api: Any, new_job: Any, listen: Any
) -> None:
    job = new_job(new_api(own_redis.url))
    job.start()
    own_redis.stop()
    early = listen(job)
    assert early.ended.wait(timeout=60)
    own_redis.start()
    again = listen(job)
    again.wait(lambda each: each.plans() == [1])


def test_a_stream_survives_an_outage_of_the_store(
    own_redis: Any, new_api: Any, new_job: Any, listen: Any
) -> None:
    job = new_job(new_api(own_redis.url))
    job.start()
    listener = listen(job)
    listener.wait(lambda each: each.plans() == [1])
    own_redis.stop()
    own_redis.start()
    job.kill(1)
    with job.beating(range(4)):
        listener.wait(lambda each: each.plans() == [1, 2])


def test_of_a_pods_streams_the_newest_stay_and_no_other_pod_loses_one(
    new_api: Any, new_job: Any, listen: Any
) -> None:
    job = new_job(new_api(streams_per_pod=2))
    job.start()
    other = listen(job, pod="pod-1")
    mine = []
    for _ in range(5):
        mine.append(listen(job, pod="pod-0"))
        mine[-1].wait(lambda each: each.plans() == [1])
    for listener in mine[:3]:
        assert listener.ended.wait(timeout=60)
    job.kill(1)
    for listener in (other, *mine[3:]):
        listener.wait(lambda each: each.plans() == [1, 2])


def test_who_may_listen_is_asked_now_and_then(shared_redis: Any) -> None:
    asked: list[bool] = []

    async def may_still() -> bool:
        asked.append(True)
        return len(asked) < 3

    async def run() -> list[str]:
        store = RedisStore(shared_redis.url)
        streams = Streams(store, keep_alive_s=0.01, check_s=0.0)
        heard = [line async for line in streams.listen(JobUid("none"), None, "pod", may_still)]
        await streams.aclose()
        await store.aclose()
        return heard

    assert asyncio.run(run()) == [": alive\n\n"] * 2
    assert len(asked) == 3


def test_a_pod_that_reads_none_of_its_streams_gets_no_more_of_them(shared_redis: Any) -> None:
    async def run() -> list[bool]:
        store = RedisStore(shared_redis.url)
        streams = Streams(store, keep_alive_s=0.01, per_pod=1)
        opened: list[Any] = []
        uid, room = JobUid("unread"), list[bool]()
        for _ in range(4):
            room.append(streams.has_room(uid, "pod"))
            opened.append(streams.listen(uid, None, "pod"))
            await anext(opened[-1])  # and nobody takes another entry from it
        room += [streams.has_room(uid, "pod"), streams.has_room(uid, "other")]
        for listening in opened:
            await listening.aclose()
        room.append(streams.has_room(uid, "pod"))
        await streams.aclose()
        await store.aclose()
        return room

    assert asyncio.run(run()) == [True, True, True, True, False, True, True]


class Watched(RedisStore):
    """A store that notes who waits for entries of a stream."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.readers: dict[asyncio.Task[Any], None] = {}

    async def read_stream(self, uid: JobUid, after: str, block_s: float | None) -> Any:
        task = asyncio.current_task()
        assert task is not None
        if block_s is not None:
            self.readers[task] = None
        return await super().read_stream(uid, after, block_s)


@pytest.mark.parametrize(("linger_s", "num_readers"), [(60.0, 1), (0.0, 3)])
def test_who_opens_and_closes_streams_has_one_reader_meanwhile(
    shared_redis: Any, linger_s: float, num_readers: int
) -> None:
    async def run() -> int:
        store = Watched(shared_redis.url)
        streams = Streams(store, keep_alive_s=0.01, linger_s=linger_s)
        for _ in range(3):
            listening = streams.listen(JobUid("on-and-off"), None, "pod")
            await anext(listening)
            newest = tuple(store.readers)[-1]
            await listening.aclose()
            if not linger_s:
                # Nobody listens, so it ends.
                await asyncio.wait([newest])
        await streams.aclose()
        await store.aclose()
        assert all(reader.done() for reader in store.readers)
        return len(store.readers)

    assert asyncio.run(run()) == num_readers
