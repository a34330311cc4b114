"""What a command imports before it does anything."""

import subprocess
import sys

HEAVY = ("mainstay_core.coordinator", "mainstay_core.sim", "numpy", "scipy", "torch")


def test_no_command_imports_what_only_a_few_need() -> None:
    code = (
        f"import sys, mainstay_cli.commands.main; print([m for m in {HEAVY} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
