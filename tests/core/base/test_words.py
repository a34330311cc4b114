from mainstay_core.base.words import count


def test_one_of_a_thing_is_singular() -> None:
    assert [count(n, "replica") for n in (0, 1, 2)] == ["0 replicas", "1 replica", "2 replicas"]
    assert [count(n, "loss", "losses") for n in (1, 2)] == ["1 loss", "2 losses"]
