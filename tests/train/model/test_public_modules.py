"""The paths by which user code imports what is public, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

ROOM = "mainstay_train"
PUBLIC = ("blocks", "data", "draws", "losses", "optimizer", "split", "workload")


def run(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_user_code_imports_the_public_modules_by_their_own_paths() -> None:
    run(
        "from mainstay_train.workload import Workload\n"
        "import mainstay_train.optimizer\n"
        "from mainstay_train.data import Dataset\n"
        "from mainstay_train import workload\n"
        "assert Workload is workload.Workload\n"
        "assert mainstay_train.optimizer.each\n"
    )


def test_each_public_module_is_one_module_whatever_path_it_is_imported_by() -> None:
    run(
        "import importlib, sys, mainstay_train\n"
        "assert 'torch' not in sys.modules\n"
        f"for name in {PUBLIC}:\n"
        "    module = importlib.import_module(f'mainstay_train.{name}')\n"
        "    assert module is getattr(mainstay_train, name), name\n"
        "    assert module is sys.modules[module.__name__], name\n"
        "    assert module.__spec__.name == module.__name__, name\n"
    )


def test_a_module_that_is_not_public_has_no_path_outside_of_its_room() -> None:
    said = run(
        f"try:\n    import {ROOM}.engine\nexcept ModuleNotFoundError as error:\n    print(error)\n"
    )
    assert said == f"No module named '{ROOM}.engine'\n"
