import pytest

from mainstay_core.base.shape import JobShape
from mainstay_core.dmr.settings import Mode
from mainstay_core.job.config import SnapshotConfig
from mainstay_core.job.protections import Protection, entry_of, protections_of


def shape(**degrees: int) -> JobShape:
    defaults = {
        "lanes": 2,
        "shards_per_lane": 2,
        "replicas": 2,
        "min_replicas": 1,
        "stages": 1,
        "steps": 5,
        "seed": 0,
    }
    return JobShape(**(defaults | degrees))


def given(entry: str, **degrees: int) -> set[str]:
    return {p.name for p in protections_of(shape(**degrees), entry) if p.given}


def test_the_entry_is_what_a_trainer_told() -> None:
    assert entry_of({}) == ""
    assert entry_of({"a/0": {"torch": "2"}, "b/0": {"entry": "loop"}}) == "loop"
    assert protections_of(shape(), "") == ()


def test_an_own_loop_has_all_but_what_needs_blocks() -> None:
    loop, blocks = (given(e, checkpoint_every_steps=5) for e in ("loop", "blocks"))
    assert loop == {
        "mask",
        "patch",
        "exact reduction",
        "heal",
        "ledger",
        "durable checkpoints",
    }
    assert blocks - loop == {"pipeline stages"}


def test_checks_of_an_own_loop_say_what_they_cost() -> None:
    def checks(entry: str, dmr: Mode) -> Protection:
        (found,) = (p for p in protections_of(shape(), entry, None, dmr) if p.name.startswith("op"))
        return found

    assert checks("loop", Mode.FULL).given
    assert "at twice the cost" in checks("loop", Mode.FULL).why
    assert checks("loop", Mode.OFF) == checks("blocks", Mode.OFF)


@pytest.mark.parametrize("entry", ["loop", "blocks"])
def test_snapshots_add_the_replay(entry: str) -> None:
    kept = SnapshotConfig(memory_bytes=1, peers=1)
    (replay,) = (p for p in protections_of(shape(), entry, kept) if p.name == "replay")
    assert (replay.given, replay.why) == (
        True,
        "a stage that nobody holds is made anew from memory, where each part is kept in 2 pods",
    )
    assert "replay" not in given(entry)


@pytest.mark.parametrize("entry", ["loop", "blocks"])
def test_settings_take_protections_away(entry: str) -> None:
    assert "durable checkpoints" not in given(entry)
    assert {"mask", "patch", "heal"}.isdisjoint(given(entry, replicas=1))


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        (Mode.OFF, "detection.dmr.mode is Off"),
        (Mode.PIGGYBACK, "gradients, sums and apply are executed once"),
        (Mode.FULL, "every operator is executed twice"),
    ],
)
def test_modes_of_checks_say_what_they_cover(mode: Mode, words: str) -> None:
    for entry in ("loop", "blocks"):
        told = {p.name: p for p in protections_of(shape(), entry, dmr=mode)}["op-level checks"]
        assert told.given == (mode is Mode.FULL or (mode is not Mode.OFF and entry == "blocks"))
        assert entry == "loop" or words in told.why


def test_every_protection_says_why() -> None:
    for entry in ("loop", "blocks"):
        names = [p.name for p in protections_of(shape(), entry)]
        assert len(set(names)) == len(names) == 9
        assert all(p.why for p in protections_of(shape(), entry))
