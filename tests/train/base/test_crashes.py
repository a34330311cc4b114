"""A crash names the user's lines, whatever of ours and of torch's lies between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.wire.crashes import MAX_FRAMES, Crash
from mainstay_train.base.crashes import crash_of
from mainstay_train.model.workload import WorkloadError, user_code

HERE = str(Path(__file__))


def caught(call: Any) -> Crash:
    try:
        call()
    except BaseException as error:
        return crash_of(error)
    raise AssertionError("nothing was raised")


def lines(crash: Crash) -> list[str]:
    return [frame.rpartition(" in ")[2] for frame in crash.frames]


def test_the_users_frames_are_told_innermost_last_and_torchs_are_not() -> None:
    def loss() -> None:
        torch.zeros(2, 3) @ torch.zeros(2, 3)

    class Model(torch.nn.Module):
        def forward(self) -> None:
            loss()

    crash = caught(Model())
    assert crash.type == "RuntimeError"
    assert "cannot be multiplied" in crash.message
    assert lines(crash)[-2:] == ["forward", "loss"]
    assert all(frame.startswith(f"{HERE}:") for frame in crash.frames)


def test_no_more_frames_than_a_few_are_told_and_those_are_the_last() -> None:
    def deep(left: int) -> None:
        if not left:
            raise OSError("gone")
        deep(left - 1)

    crash = caught(lambda: deep(50))
    assert lines(crash) == ["deep"] * MAX_FRAMES


def test_an_error_of_ours_stands_for_the_users_that_it_was_raised_from() -> None:
    def mistake() -> None:
        with user_code("computing step 3"):
            raise KeyError("labels")

    crash = caught(mistake)
    assert (crash.type, crash.message) == ("KeyError", "'labels'")
    assert lines(crash)[-1] == "mistake"


def test_what_the_user_is_refused_for_names_no_line_of_ours() -> None:
    def refuse() -> None:
        raise InvalidSpecError("workload", "has no blocks")

    error = crash_of(InvalidSpecError("workload", "has no blocks"))
    assert (error.type, error.frames) == ("InvalidSpecError", ())
    assert lines(caught(refuse))[-1] == "refuse"


def test_an_exception_without_a_line_of_the_users_has_the_one_that_raised_it() -> None:
    with pytest.raises(OSError) as caught_here:
        Path("/nowhere/at/all").read_text()
    below = caught_here.tb.tb_next
    (frame,) = crash_of(caught_here.value.with_traceback(below)).frames
    assert "pathlib" in frame


def test_a_class_that_cannot_say_what_it_is_is_told_all_the_same() -> None:
    class BrokenError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    def broken() -> None:
        raise BrokenError

    def ended() -> None:
        raise SystemExit(3)

    assert caught(broken).message == "(its text cannot be had: RuntimeError)"
    assert caught(broken).type.endswith("BrokenError")
    assert (caught(ended).type, caught(ended).message) == ("SystemExit", "3")


def test_a_mistake_of_the_user_that_we_found_is_told_as_ours() -> None:
    def left() -> None:
        raise WorkloadError("step 3 was not committed")

    assert caught(left).message == "step 3 was not committed"
