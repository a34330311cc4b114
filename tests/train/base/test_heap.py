import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
from mainstay_train.base import heap

if sys.argv[1] == "kept":
    assert heap.keep_freed()


def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def use():
    held = [bytearray(1 << 20) for _ in range(16)]
    for block in held:
        block[::4096] = b"x" * 256


use()
before = faults()
for _ in range(8):
    use()
print(faults() - before)
"""


def count_faults(kind):
    """Pages that the kernel gives a process which takes and frees 16 MiB eight times."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, kind], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is a setting of glibc")
def test_memory_that_was_freed_is_used_again_without_the_kernel():
    num_pages = 16 << 8
    assert count_faults("left") > num_pages
    assert count_faults("kept") < num_pages // 4
