from mainstay_core.base.backoff import doubled_s


def test_each_pause_is_twice_the_one_before_up_to_the_bound() -> None:
    assert [doubled_s(0.5, n, 10.0) for n in range(6)] == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0]


def test_no_number_of_failures_overflows() -> None:
    assert doubled_s(0.5, 10**6, 10.0) == 10.0
