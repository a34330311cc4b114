"""A function with room for the frames behind it is otherwise the function that it was."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mainstay_train.base.frames import SLOTS, roomy

PROBE = """
import ctypes, resource, sys
from mainstay_train.base.frames import roomy

def leaf(): pass

def work():
    for _ in range(2000):
        leaf()

def deep(depth, call):
    return call() if depth == 0 else deep(depth - 1, call)

def faults(call, depth):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    deep(depth, call)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

for call in (work, roomy(work)):
    print(max(faults(call, depth) for depth in range(200)))
"""


def test_arguments_results_errors_and_its_name_are_the_functions() -> None:
    @roomy
    def divided(number: int, *, by: int = 1) -> float:
        """Divide."""
        return number / by

    assert divided(6, by=3) == 2
    assert divided(6) == 6
    assert (divided.__name__, divided.__doc__) == ("divided", "Divide.")
    with pytest.raises(ZeroDivisionError):
        divided(1, by=0)


def test_it_may_call_itself() -> None:
    @roomy
    def factorial(number: int) -> int:
        return 1 if number == 0 else number * factorial(number - 1)

    assert factorial(20) == 2432902008176640000


def test_calls_behind_it_take_no_memory_from_the_kernel_again_and_again() -> None:
    """Without room some depth of calls has each further one take a page."""
    done = subprocess.run([sys.executable, "-c", PROBE], check=True, capture_output=True, text=True)
    without, with_room = map(int, done.stdout.split())
    assert SLOTS * 8 > 1 << 16
    assert without > 1000
    assert with_room < 100
