"""Asks a process with torch one question; this command has none itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from mainstay_cli.base.exits import MachineError
from mainstay_core.base import codec
from mainstay_core.base.errors import MalformedError

AnswerT = TypeVar("AnswerT")


def ask(
    module: str,
    question: object,
    search_path: Iterable[Path],
    kind: type[AnswerT],
    *,
    problem: str,
    takes: str,
) -> AnswerT:
    """Return what a module of the trainers' package answers.

    Args:
        module: is run as a program; it reads the question from its standard input.
        question: a message.
        search_path: where the user's code is looked for first.
        kind: of the answer, a message on its last line: a library may have printed others.
        problem: what is wrong if it does not answer, for people.
        takes: of how much of the model it needs the memory, for people.

    Raises:
        MachineError: it does not answer: there is no torch here, or too little memory.
    """
    paths = [*map(str, search_path), os.environ.get("PYTHONPATH", "")]
    result = subprocess.run(
        [sys.executable, "-m", module],
        input=codec.dumps(question),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )
    try:
        return codec.loads(kind, (result.stdout.splitlines() or [""])[-1])
    except MalformedError as error:
        last_words = (result.stderr.strip().splitlines() or ["it was killed"])[-1]
        raise MachineError(
            f"{problem}: {last_words} (it takes a Python with torch, extra `train`, and the "
            f"memory of {takes})"
        ) from error
